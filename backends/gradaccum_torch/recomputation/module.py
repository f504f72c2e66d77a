"""The public call, and modules whose activations are recomputed: the instance's ``forward`` is replaced, the module is not wrapped.

So parameters, submodules and keys of ``state_dict()`` stay as they are, and the module's own hooks run once. The replacement refers to the
module as an attribute, so that a copy or a pickle refers to the copy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from torch import nn

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import explain, segment_cuts
from gradaccum_torch.recomputation.function import (
    Policy,
    Recomputed,
    Rules,
    recomputed_twice_error,
    require_callable,
    require_chain,
    require_no_parts,
    require_options,
    require_replaceable,
    run,
)

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
    """Return `function`, or the module itself, such that the backward pass recomputes its activations.

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
        ArgumentTypeError: `function` cannot be called, or an argument is of the wrong type.
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


M = TypeVar("M", bound=nn.Module)


def recompute_module(module: M, segments: int | None, submodules: Iterable[str | nn.Module] | None, rules: Rules) -> M:
    if submodules is not None:
        if segments is not None:
            fix = "Leave one of them out."
            raise explain(ArgumentValueError, "segments, submodules", expected="one of the two", found="both", fix=fix)
        for each in _parts_of(module, submodules):
            _replace(each, _Whole(each, rules))
        return module
    _require_ordinary(module, "function")
    if segments is None and type(module).forward is not nn.Sequential.forward:
        _replace(module, _Whole(module, rules))
        return module
    require_chain(segments, module)
    number = len(segment_cuts(len(_layers(module)), segments))
    _replace(module, _Segments(module, number, rules))
    return module


class _Whole:
    """The replacement of ``module.forward`` that recomputes all of it; it calls an instance's own ``forward``."""

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        self._module, self._rules = module, rules
        self._own = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self._forward(), (self._module,), args, kwargs, self._rules)

    def _forward(self) -> Callable[..., Any]:
        return self._own or functools.partial(type(self._module).forward, self._module)


class _Segments(_Whole):
    """The replacement of ``forward`` of an `nn.Sequential`, cut by its length at each call."""

    def __init__(self, module: nn.Module, segments: int, rules: Rules) -> None:
        super().__init__(module, rules)
        self._segments = segments

    def __call__(self, input: Any) -> Any:
        layers = _layers(self._module)
        for cut in segment_cuts(len(layers), min(self._segments, len(layers))):
            part = layers[cut.start : cut.stop]
            input = run(functools.partial(_chain, part), part, (input,), {}, self._rules)
        return input


def _require_ordinary(module: nn.Module, argument: str) -> None:
    if isinstance(module.__dict__.get("forward"), _Whole):
        raise recomputed_twice_error(argument, f"a {type(module).__name__} that is recomputed")
    require_replaceable(module, argument)


def _replace(module: nn.Module, forward: _Whole) -> None:
    module.__dict__["forward"] = forward


def _layers(module: nn.Module) -> list[nn.Module]:
    assert isinstance(module, nn.Sequential)
    return list(module)


def _chain(layers: Sequence[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


def _parts_of(module: nn.Module, submodules: Iterable[str | nn.Module]) -> list[nn.Module]:
    if isinstance(submodules, str) or not isinstance(submodules, Iterable):
        expected, fix = "a list of names or modules", "Write submodules=[...]."
        raise explain(ArgumentTypeError, "submodules", expected=expected, got=submodules, fix=fix)
    named = dict(module.named_modules(remove_duplicate=False))
    own = {id(each): each for each in named.values()}
    parts: dict[int, nn.Module] = {}
    for index, wanted in enumerate(submodules):
        argument = f"submodules[{index}]"
        part = _part(wanted, named, own, argument)
        _require_ordinary(part, argument)
        if id(part) in parts:
            fix = "Give each submodule once."
            raise explain(ArgumentValueError, argument, expected="another submodule than before", found="the same one again", fix=fix)
        parts[id(part)] = part
    if not parts:
        fix = 'Write submodules=model.layers, or submodules=["layers.0"].'
        raise explain(ArgumentValueError, "submodules", expected="at least one submodule", found="none", fix=fix)
    return list(parts.values())


def _part(wanted: object, named: dict[str, nn.Module], own: dict[int, nn.Module], argument: str) -> nn.Module:
    if isinstance(wanted, str):
        if wanted not in named:
            fix = f"Its submodules are {', '.join(repr(name) for name in named if name)}."
            raise explain(ArgumentValueError, argument, expected="the name of a submodule", got=wanted, fix=fix)
        return named[wanted]
    if not isinstance(wanted, nn.Module):
        fix = "Write the name of the submodule, or the submodule itself."
        raise explain(ArgumentTypeError, argument, expected="a name or a torch.nn.Module", got=wanted, fix=fix)
    if id(wanted) not in own:
        found = f"a {type(wanted).__name__} that is no part of the {type(named['']).__name__}"
        fix = "Give the module that it is a part of."
        raise explain(ArgumentValueError, argument, expected="a submodule of the module", found=found, fix=fix)
    return wanted
