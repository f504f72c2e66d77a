"""One call under `torch.utils.checkpoint`, in its non-reentrant form: a first segment whose input needs no gradient trains too.

`torch.utils.checkpoint` itself replays random numbers and autocast. `Surroundings` adds what it leaves to its user: buffers, parameters and
modes of modules. All tensors among the arguments go through autograd, in keyword arguments and nests too, because autograd notices a change
of those that it has saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradaccum.kit import leaves_of, with_leaves
from gradaccum_torch.recomputation.checks import changed_argument_error
from gradaccum_torch.recomputation.policy import Policy, selective_contexts
from gradaccum_torch.recomputation.surroundings import Surroundings
from gradaccum_torch.torch_private import version

MOVES_TWICE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""The compiler moves the buffers of a recomputed part in both runs. Measured: torch 2.8 does, torch 2.11 does not."""


class Rules(NamedTuple):
    """How a part is recomputed: the options of `gradaccum_torch.recompute`."""

    policy: Policy | None
    preserve_rng_state: bool


def run(function: Callable[..., Any], modules: Iterable[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules) -> Any:
    """``function(*args, **kwargs)``, keeping of its activations only what `rules` say.

    Args:
        function: what to run.
        modules: the modules that it may call; others are noticed when it calls them.
        args: positional arguments, nests with tensors of any shape.
        kwargs: keyword arguments, likewise.
        rules: how it is recomputed.

    Raises:
        UsageError: `function` changed an argument in place, so that the second run would find another one.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        if MOVES_TWICE and any(len(list(module.buffers())) for module in modules):
            # Dynamo leaves this call out of its graph, and under fullgraph=True refuses it. It cannot trace how a UsageError is made.
            raise RuntimeError("before torch 2.11 the compiler moves the buffers of a recomputed part twice: leave fullgraph=True out")
        return _compiled(function, args, kwargs, rules)
    leaves = [leaf.value for leaf in leaves_of((args, kwargs))]
    surroundings = Surroundings(modules, rules.policy is not None)
    before = [version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]

    def of_leaves(*leaves: Any) -> Any:
        again: Any = with_leaves((args, kwargs), iter(leaves))
        return function(*again[0], **again[1])

    contexts = functools.partial(_contexts, surroundings, rules.policy)
    out = checkpoint(of_leaves, *leaves, use_reentrant=False, context_fn=contexts, preserve_rng_state=rules.preserve_rng_state)
    _require_unchanged(leaves, before)
    return out


def modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules that a function refers to, with its partial arguments and what its closure holds, or that are in a nest."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, functools.partial):
        yield from modules_in((value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from modules_in((value.__self__, value.__func__))
    elif isinstance(value, FunctionType):
        yield from (cell for cell in _cells(value) if isinstance(cell, nn.Module))
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from modules_in(each)


def _cells(function: FunctionType) -> Iterator[Any]:
    """What the closure of `function` holds, itself or as the ``__self__`` of a bound method."""
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
        yield getattr(held, "__self__", held) if isinstance(held, MethodType) else held


def _compiled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules) -> Any:
    """Under `torch.compile` the compiler recomputes, after it has made the changes of buffers a part of the graph."""
    own: dict[str, Any] = {} if rules.policy is None else {"context_fn": functools.partial(selective_contexts, rules.policy)}
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=rules.preserve_rng_state, **own, **kwargs)


def _contexts(surroundings: Surroundings, policy: Policy | None) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Those in which torch runs the function the first time, and each further time."""
    first, again = (None, None) if policy is None else selective_contexts(policy)
    return _Anew(lambda: _both(surroundings.noted(), first)), _Anew(lambda: _both(surroundings.replayed(), again))


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object] | None) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        if inner is not None:
            stack.enter_context(inner)
        yield


class _Anew:
    """A context made anew each time that it is entered: a graph that is retained has several backward passes."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _require_unchanged(leaves: Sequence[Any], before: Sequence[int]) -> None:
    for leaf, noted in zip(leaves, before, strict=True):
        if isinstance(leaf, Tensor) and version(leaf) != noted:
            raise changed_argument_error(leaf)
