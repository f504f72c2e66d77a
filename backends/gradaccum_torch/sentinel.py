"""Notices when something other than autograd changed ``.grad``, without a pass over the gradients.

While ``.grad`` holds the undivided sum of a window, ``clip_grad_norm_``, ``scaler.unscale_``, ``model.zero_grad()`` or an assignment
would make the result silently wrong. A few small parameters are watched: a hook that autograd calls right after it has
accumulated notes which tensor ``.grad`` is and its version, and `intact` compares. Whoever changes gradients changes them
all, so a few will do. A watched parameter without a gradient (a branch not taken) proves nothing; when none has one, `adapt` finds another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

WATCHED_AT_MOST = 8
"""Hooks run in every backward pass, at about a microsecond each."""

Owner = TypeVar("Owner")


def can_be_hooked(parameter: Tensor) -> bool:
    """Whether torch lets us hook the accumulation into `parameter`, which it does only where a gradient can arrive."""
    return parameter.is_leaf and parameter.requires_grad


def hook_accumulation(parameter: Tensor, owner: Owner, action: Callable[[Owner, Tensor], None]) -> RemovableHandle:
    """Call ``action(owner, parameter)`` after each accumulation into `parameter`, for as long as `owner` lives."""
    alive = weakref.ref(owner)

    def hook(parameter: Tensor) -> None:
        living = alive()
        if living is not None:
            action(living, parameter)

    return cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


class Watched:
    """One watched parameter, and what autograd left in its ``.grad``."""

    __slots__ = ("gradient", "handle", "parameter", "version")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.handle: RemovableHandle
        self.note()

    def note(self) -> None:
        """Take ``.grad`` as it is now for what autograd left there."""
        self.gradient = gradient = self.parameter.grad
        self.version = None if gradient is None or _shares_memory(gradient) else gradient._version

    def follow(self) -> bool:
        """Note what is in ``.grad`` after an accumulation; whether that accumulation alone turned what was noted into it.

        Autograd adds in place, which is one more version of the same tensor, except when it records the addition itself
        (``create_graph=True``) and when a dense gradient meets a sparse one.
        """
        before, gradient = self.gradient, self.parameter.grad
        if gradient is before and gradient is not None:
            expected = None if self.version is None else self.version + 1
            self.version = None if expected is None else gradient._version
            return self.version == expected
        self.note()
        if before is None or gradient is None:
            return True
        return torch.is_grad_enabled() or (before.is_sparse and not gradient.is_sparse)


def _shares_memory(gradient: Tensor) -> bool:
    """Whether it is a part of something larger, as the gradients of parameters that ``torch.cat`` joined are.

    All parts count their versions together, so that one's says nothing of it alone.
    """
    return not gradient.is_sparse and gradient.untyped_storage().nbytes() > gradient.nbytes


class Sentinels:
    """The watched parameters, and what autograd left in their ``.grad``."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        """By the parameter's id, which a tensor hashes by too, at ten times the price."""
        self._inside = False
        self.arrived = False
        """Autograd has delivered something since `next_micro_batch`."""
        self.disturbed = False
        """A change by someone else was followed by another accumulation, so that only this remembers it."""
        self.outside = False
        """Something arrived since `next_micro_batch` from a backward pass that is not the wrapper's own."""

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._watched

    def watch_some(self, groups: Iterable[Iterable[Tensor]], *, small: bool) -> None:
        """Watch parameters of each group that has none watched, so that also a change to one group alone is noticed.

        They are the smallest trainable one, and the first and the last, which rarely all sit in a branch not taken; with `small` only
        the smallest, where a watched gradient costs memory.
        """
        for group in groups:
            trainable = [parameter for parameter in group if can_be_hooked(parameter)]
            if trainable and not any(parameter in self for parameter in trainable):
                smallest = min(trainable, key=Tensor.numel)
                for parameter in (smallest,) if small else (smallest, trainable[0], trainable[-1]):
                    if len(self._watched) < WATCHED_AT_MOST:
                        self._watch(parameter)

    def _adapt(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """If no watched parameter has a gradient, watch the first one that has."""
        if any(watched.gradient is not None for watched in self._watched.values()):
            return
        for parameter in parameters():
            if parameter.grad is not None and can_be_hooked(parameter):
                return self._watch(parameter)

    def intact(self) -> bool:
        """Whether every watched ``.grad`` is what autograd left there."""
        for watched in self._watched.values():
            gradient, version = watched.parameter.grad, watched.version
            if gradient is not watched.gradient or (gradient is not None and version is not None and gradient._version != version):
                return False
        return not self.disturbed

    def next_micro_batch(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """What arrives from now on belongs to another micro-batch; if nothing watched has come in this one, find what else has."""
        if not self.arrived:
            self._adapt(parameters)
        self.arrived = self.outside = False

    def flags(self) -> tuple[bool, bool, bool]:
        """What `reset` needs to go on elsewhere, where the gradients are copies."""
        return self.arrived, self.outside, not self.intact()

    def reset(self, arrived: bool = False, outside: bool = False, disturbed: bool = False) -> None:
        """Take ``.grad`` as it is now for what autograd left there."""
        self.arrived, self.outside, self.disturbed = arrived, outside, disturbed
        for watched in self._watched.values():
            watched.note()

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """What arrives in this context comes from the wrapper's own backward pass."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _watch(self, parameter: Tensor) -> None:
        if parameter in self:
            return self._watched[id(parameter)].note()
        if len(self._watched) >= WATCHED_AT_MOST:
            oldest = next(iter(self._watched))
            self._watched.pop(oldest).handle.remove()
        watched = self._watched[id(parameter)] = Watched(parameter)
        watched.handle = hook_accumulation(parameter, self, Sentinels._on_accumulation)

    def _on_accumulation(self, parameter: Tensor) -> None:
        if not self._watched[id(parameter)].follow():
            self.disturbed = True
        self.arrived = True
        if not self._inside:
            self.outside = True
