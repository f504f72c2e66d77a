"""Recomputation (gradient checkpointing): the backward pass runs a part of the forward pass again in place of keeping its activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from torch import nn

from gradaccum_torch.recomputation.checks import recomputed_twice_error, require_callable, require_no_parts, require_options
from gradaccum_torch.recomputation.function import Recomputed
from gradaccum_torch.recomputation.module import recompute_module
from gradaccum_torch.recomputation.policy import Policy
from gradaccum_torch.recomputation.run import Rules

__all__ = ["recompute"]

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


@overload
def recompute(
    function: M,
    *,
    segments: int | None = None,
    submodules: Iterable[str | nn.Module] | None = None,
    policy: Policy | None = None,
    preserve_rng_state: bool = True,
) -> M: ...
@overload
def recompute(function: F, *, policy: Policy | None = None, preserve_rng_state: bool = True) -> F: ...
def recompute(
    function: Any,
    *,
    segments: int | None = None,
    submodules: Iterable[str | nn.Module] | None = None,
    policy: Policy | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """Give back `function`, or the module itself, so that the backward pass recomputes its activations.

    Gradients have the same bits as without. The second run draws the same random numbers, and finds the parameters, the buffers, the
    autocast and the ``train()`` or ``eval()`` mode of the first. It leaves the buffers as they are: BatchNorm's statistics move once. Hooks
    of submodules inside run twice, because they may change what the submodule returns. Under `torch.no_grad` nothing is recomputed.

    Under `torch.compile` the compiler recomputes, and policies and random numbers are its own. Only ``backend="eager"``, which is there to
    debug Dynamo, draws new random numbers.

    A module stays the same object, with the same parameters and keys of its ``state_dict()``: only its ``forward`` is replaced.

    Args:
        function: a function of tensors, or nests of them, or a module. Of an `nn.Sequential` segments are recomputed, of any other module
            the whole forward pass.
        segments: parts of equal length to cut an `nn.Sequential` into, about the square root of its length by default. The memory is then
            that of the inputs of all segments and the activations of one.
        submodules: the submodules to recompute, as names of ``named_modules()`` or themselves, such as ``model.layers``.
        policy: what to keep all the same: a list of operations such as ``[torch.ops.aten.mm.default]``, or a function as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it. Such a part allows for one backward pass only.
        preserve_rng_state: with False the second run draws other random numbers, which is right, and faster, only where none are drawn.

    Raises:
        ArgumentTypeError: `function` can not be called, or an argument is of the wrong type.
        ArgumentValueError: more segments than layers, a submodule that is none of the module's, or both `segments` and `submodules`.
        UsageError: it is recomputed already, or cannot be replaced. The second run raises it, too, for parameters that changed since.

    Examples:
        >>> import torch
        >>> model = recompute(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(9)]))  # In three segments of three.
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> len(model.state_dict())
        18
    """
    require_options(policy, preserve_rng_state)
    rules = Rules(policy, preserve_rng_state)
    if isinstance(function, nn.Module):
        return recompute_module(function, segments, submodules, rules)
    require_no_parts(segments, submodules)
    if isinstance(function, Recomputed):
        raise recomputed_twice_error("function", "one that recompute() returned")
    require_callable(function)
    return Recomputed(function, rules)
