"""Hooks: a look at ``.grad`` right after autograd has accumulated into it, for as long as the owner lives; and those of optimizers.

torch keeps a hook on its parameter, and the hook keeps what it refers to. So the hooks are taken off when their owner is freed. An
optimizer keeps its hooks in tables, and torch shows the table to whoever registers a hook.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
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


Table = OrderedDict[int, Callable[..., Any]]
"""The hooks of an optimizer by number."""
NO_HOOKS: Table = OrderedDict()


def hook_tables() -> dict[str, Table]:
    """Empty tables of hooks under the names by which an optimizer keeps them."""
    fresh = torch.optim.SGD([torch.empty(0, device="cpu")])
    return {name: table for name, table in vars(fresh).items() if isinstance(table, OrderedDict)}


def _table_of(register: Callable[[Callable[..., None]], RemovableHandle]) -> Table:
    """Where `register` puts hooks."""
    handle = register(lambda *_: None)
    handle.remove()
    return cast(Table, handle.hooks_dict_ref())


def _table(register: str) -> Callable[[torch.optim.Optimizer], Table]:
    """An optimizer that never calls ``Optimizer.__init__``, as torch_optimizer's Lookahead, has no table: it runs no hook."""

    def table(optimizer: torch.optim.Optimizer) -> Table:
        try:
            return _table_of(getattr(optimizer, register))
        except AttributeError:
            return NO_HOOKS

    return table


step_pre_hooks, step_post_hooks = map(_table, ("register_step_pre_hook", "register_step_post_hook"))
save_pre_hooks, save_post_hooks = map(_table, ("register_state_dict_pre_hook", "register_state_dict_post_hook"))
load_pre_hooks, load_post_hooks = map(_table, ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"))
"""One optimizer's hooks by number."""

all_step_pre_hooks = _table_of(register_optimizer_step_pre_hook)
"""The hooks before each step of any optimizer: a fused kernel must not divide a gradient that such a hook reads undivided."""
all_step_post_hooks = _table_of(register_optimizer_step_post_hook)
"""The hooks after each step of any optimizer: where such a hook raises, the update was made all the same."""
