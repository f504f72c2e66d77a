"""A look at ``.grad`` right after autograd has accumulated into it, for as long as the owner of the hooks lives.

torch keeps a hook on its parameter, and the hook keeps what it refers to. So the hooks are taken off when their owner is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Tensor], None]
"""Called with a parameter into which autograd has accumulated."""


def can_be_hooked(parameter: Tensor) -> bool:
    """Whether torch lets us hook the accumulation into `parameter`, which it does only where a gradient can arrive."""
    return parameter.is_leaf and parameter.requires_grad


class Hooks:
    """The hooks of one owner. They must not refer to it, or it would not be freed as it is dropped.

    Args:
        watching: the owner is a wrapped optimizer's, for `is_watched`.
    """

    def __init__(self, *, watching: bool = False) -> None:
        if watching:
            _WATCHING.add(self)
        self._handles: dict[int, RemovableHandle] = {}
        self._finalizer: weakref.finalize[..., Hooks] | None = None

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._handles

    def add(self, parameter: Tensor, hook: Hook) -> None:
        """Call ``hook(parameter)`` after each accumulation into `parameter`, which the hook must keep alive."""
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, _remove_all, self._handles)
            self._finalizer.atexit = False
        self._handles[id(parameter)] = cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self, parameter: Tensor) -> None:
        """Take the hook off `parameter`."""
        self._handles.pop(id(parameter)).remove()

    def keep(self, parameters: dict[int, Tensor]) -> None:
        """Take the hooks off all but these, by id."""
        for number in self._handles.keys() - parameters.keys():
            self._handles.pop(number).remove()


_WATCHING: weakref.WeakSet[Hooks] = weakref.WeakSet()


def is_watched(parameter: Tensor) -> bool:
    """True if a wrapped optimizer watches `parameter`: it would take other gradients for its own micro-batches', or for tampering."""
    return any(parameter in hooks for hooks in _WATCHING)


@contextmanager
def delivering_zeros(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, whatever a backward pass brings to `leaves` arrives as zeros, NaN too."""
    handles = {id(leaf): leaf.register_hook(torch.zeros_like) for leaf in leaves if can_be_hooked(leaf)}  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _remove_all(handles)


def _remove_all(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
