"""The watch over ``.grad``: it notices when something other than autograd changed a gradient, without a pass over the gradients.

While ``.grad`` holds the undivided sum of a window, ``clip_grad_norm_``, ``scaler.unscale_``, ``model.zero_grad()`` or an assignment
would make the result silently wrong. So every parameter is watched: right after autograd has accumulated, `Watched` notes which tensor
``.grad`` is and its version, and `intact` compares; both take less than a microsecond together. A version tells that something wrote,
not what: `Values` lets a call pass that writes the values that are there. torch does not count writes through ``p.grad.data`` or NumPy,
a collective of ``torch.distributed`` or a clip of sharded gradients. Only the values show these, and they are compared in the first
window, or where a call rewrites them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradaccum_torch.private import at_the_end_of_backward, foreach_norm, keep_own, local, untraced, version
from gradaccum_torch.sums import dense_parts, side_by_side


class Sentinels:
    """What autograd left in the ``.grad`` of all parameters."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        """Keyed by id(): the same identity as hash(tensor), ten times faster."""
        self.arrivals = Arrivals()
        self.strict = False
        """A write counts even if it changes nothing: most gradients are elsewhere, and a norm taken here is not theirs."""
        self.holds = False
        """There was something in a ``.grad`` at the last `reset`."""
        self.watching = True
        """A change of a ``.grad`` is refused; False: every change is the user's to make."""

    def leave_all_changes(self) -> None:
        """Every change of a ``.grad`` is the user's to make."""
        self.watching = self.arrivals.values.wanted = False

    @property
    def arrived(self) -> bool:
        """Autograd has delivered something since `next_micro_batch`."""
        return self.arrivals.arrived

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these and no others; what is known of one that is watched already stays."""
        known, arrivals = self._watched, self.arrivals
        self._watched = {id(each): known.get(id(each)) or Watched(each, arrivals) for each in parameters}
        arrivals.gradients[:] = self._watched.values()

    def of(self, parameter: Tensor) -> Watched:
        """One watched parameter."""
        return self._watched[id(parameter)]

    def note(self, parameter: Tensor) -> None:
        """Take its ``.grad`` as it is now for what autograd left there, if it is watched."""
        watched = self._watched.get(id(parameter))
        if watched is not None:
            watched.note()

    def intact(self) -> bool:
        """True if every ``.grad`` is what autograd left there; waits for the device where values are compared."""
        if not self.watching:
            return True
        touched = []
        for watched in self._watched.values():
            gradient = watched.parameter.grad
            if gradient is not watched.gradient or (gradient is not None and gradient._version != watched.version):
                touched.append(watched)
        if self.arrivals.disturbed or (touched and self.strict):
            return False
        if self.arrivals.values.noted is not None:
            return self._same_values(touched)
        return not touched or not any(map(Watched.is_touched, touched))

    def next_micro_batch(self) -> None:
        """What arrives from now on belongs to another micro-batch."""
        self.arrivals.arrived = self.arrivals.outside = self.arrivals.multiplied = self.arrivals.disturbed = False

    def window_ended(self) -> None:
        """The window was closed: its values are no longer compared."""
        self.arrivals.values.window_ended()

    def flags(self) -> tuple[bool, bool, bool]:
        """What `reset` needs to go on elsewhere, where the gradients are copies."""
        return self.arrivals.arrived, self.arrivals.outside, not self.intact()

    def reset(self, arrived: bool = False, outside: bool = False, disturbed: bool = False) -> None:
        """Take ``.grad`` as it is now for what autograd left there."""
        arrivals = self.arrivals
        arrivals.arrived, arrivals.outside, arrivals.disturbed, arrivals.under_way = arrived, outside, disturbed, False
        arrivals.multiplied = False
        arrivals.values.forget()
        holds = False
        for watched in self._watched.values():
            gradient = watched.gradient = watched.parameter.grad
            if gradient is None:
                watched.version = -1
            else:
                watched.version, holds = gradient._version, True
        self.holds = holds

    def _same_values(self, touched: list[Watched]) -> bool:
        """True if nothing was replaced and all values are what they were; a gradient that was written into is noted anew."""
        values, gradients = self.arrivals.values, [watched.parameter.grad for watched in self._watched.values()]
        if any(watched.parameter.grad is not watched.gradient for watched in touched):
            return False
        if not values.same(gradient for gradient in gradients if gradient is not None):
            return False
        for watched in filter(Watched.is_touched, touched):
            watched.note()
            values.rewritten()
        return True


# One parameter under watch: which tensor its ``.grad`` is, and of which version, as autograd left it.


_MULTIPLIED: list[Arrivals] = []
"""Of the wrapper whose own backward pass is running, if it multiplied the loss: then what reaches other wrappers is multiplied too."""


class Arrivals:
    """What the backward passes since the last micro-batch have delivered, for all parameters together."""

    def __init__(self) -> None:
        self.values = Values()
        self.gradients: list[Watched] = []
        """The parameters whose values are noted when a backward pass ends."""
        self.under_way = False
        """A backward pass has delivered something and has not ended. Outside of a backward pass it means that one raised."""
        self.inside = False
        """The backward pass is the wrapper's own."""
        self.arrived = False
        """Autograd has delivered something since the last micro-batch."""
        self.outside = False
        """Something arrived from a backward pass that is not the wrapper's own."""
        self.multiplied = False
        """Something arrived from another wrapper's own pass, of a loss that was multiplied by its weight or its loss scale."""
        self.disturbed = False
        """Something else changed a gradient before another accumulation, so that only this flag remembers the change."""

    @contextmanager
    def own_pass(self, multiplied: bool) -> Iterator[None]:
        """Inside, the wrapper's own backward pass runs; `multiplied`: of a loss that was."""
        self.inside = True
        if multiplied:
            _MULTIPLIED.append(self)
        try:
            yield
        finally:
            self.inside = False
            if multiplied:
                _MULTIPLIED.remove(self)

    def begin(self) -> None:
        """A backward pass has delivered its first gradient."""
        self.arrived = True
        if not self.inside:
            self.outside = True
            self.multiplied |= bool(_MULTIPLIED)
        self.values.noted = None
        self.under_way = at_the_end_of_backward(self._end)

    def _end(self) -> None:
        self.under_way = False
        if self.values.wanted:
            self.values.note(gradient for watched in self.gradients if (gradient := watched.parameter.grad) is not None)


class Watched:
    """One parameter, and what autograd left in its ``.grad``."""

    __slots__ = ("arrivals", "gradient", "parameter", "version")

    def __init__(self, parameter: Tensor, arrivals: Arrivals) -> None:
        self.parameter, self.arrivals = parameter, arrivals
        self.note()

    def note(self) -> None:
        """Take ``.grad`` as it is now for what autograd left there."""
        self.gradient = gradient = self.parameter.grad
        self.version = -1 if gradient is None else version(gradient)

    def arrive(self, parameter: Tensor) -> None:
        """Autograd has accumulated into the parameter: note what is there, and whether that alone turned what was noted into it."""
        before, expected = self.gradient, self.version + 1
        if before is not None and before._version == expected:
            self.version = expected  # One addition in place, as nearly always. `Sentinels.intact` sees whether it is still the parameter's.
        else:
            self._look(before, expected, parameter)
        if not self.arrivals.under_way:
            self.arrivals.begin()

    def _look(self, before: Tensor | None, expected: int, parameter: Tensor) -> None:
        if parameter.grad is not before:
            keep_own(parameter)
        self.gradient = gradient = parameter.grad
        self.version = now = -1 if gradient is None else gradient._version
        if before is not None and (gradient is not before or now != expected) and not _by_autograd(before, gradient):
            self.arrivals.disturbed = True

    def is_touched(self) -> bool:
        """True if something other than autograd wrote into ``.grad``, or replaced it."""
        gradient = self.parameter.grad
        return gradient is not self.gradient or (gradient is not None and version(gradient) != self.version)


def _by_autograd(before: Tensor, gradient: Tensor | None) -> bool:
    """True if autograd may have turned `before` into `gradient` otherwise than by one addition in place.

    It adds out of place where it records the addition (``create_graph=True``) and where a dense gradient meets a sparse one.
    """
    if gradient is before:
        # FSDP adds to the local part of a DTensor, whose own version does not count that.
        return type(gradient) is not Tensor or _shares_memory(gradient)
    return gradient is None or torch.is_grad_enabled() or (before.is_sparse and not gradient.is_sparse)


def _shares_memory(gradient: Tensor) -> bool:
    """True if it is a part of something larger."""
    return type(gradient) is Tensor and not gradient.is_sparse and gradient.untyped_storage().nbytes() > gradient.nbytes


untraced(Watched.arrive)
untraced(Watched._look)
untraced(Arrivals._end)


# Comparison of the values in ``.grad`` with what autograd left there, by two norms of each gradient.
#
# A version tells that something wrote, not what: ``clip_grad_norm_(parameters, inf)`` writes and changes nothing, ``p.grad.data.clamp_()``
# changes and is not counted. Norms tell both, for two passes over the gradients and a wait for the device. A training loop does to every
# window what it did to its first. So norms are kept in the first window, and after it only if a call was seen that writes what was there.
# The squares of small elements vanish and those of large ones overflow, and so the largest magnitude is kept beside the 2-norm. Neither
# sees a change of signs or places.


class Values:
    """The norms of the gradients as autograd left them."""

    def __init__(self) -> None:
        self._rewritten = False
        self.wanted = True
        """Norms are to be noted at the end of each backward pass."""
        self.noted: Tensor | None = None
        """The norms to compare with, shape ``(2, number)``; None: no comparison is to be made."""

    def note(self, gradients: Iterable[Tensor]) -> None:
        """Take the values of `gradients` for what autograd left there."""
        self.noted = _norms(gradients)

    def forget(self) -> None:
        """The notes are out of date: ``.grad`` should hold something else now."""
        self.noted = None

    def window_ended(self) -> None:
        """The first window is over."""
        self.wanted, self.noted = self._rewritten, None

    def rewritten(self) -> None:
        """A call wrote the values that were there: go on comparing."""
        self._rewritten = self.wanted = True

    def same(self, gradients: Iterable[Tensor]) -> bool:
        """True if `gradients` have the values noted; waits for the device.

        A clip multiplies all by what an inf or NaN in one of them makes of its factor. So where one is, nothing is compared.
        """
        now, noted = _norms(gradients), self.noted
        if now is None or noted is None or now.shape != noted.shape:
            return False
        before, after = noted.tolist(), now.tolist()
        return bool(before == after) or not all(map(math.isfinite, (*before[1], *after[1])))


@torch.no_grad()
def _norms(gradients: Iterable[Tensor]) -> Tensor | None:
    """The 2-norm of each and its largest magnitude, of what is in this process, shape ``(2, number)``; None where there are none."""
    parts = dense_parts([local(gradient) for gradient in gradients])
    if not parts:
        return None
    tensors = [part for part in parts if part.numel()] or [torch.zeros(1)]
    # Inside the backward pass autocast is as it was in the forward pass, and would give the norm another dtype than outside.
    with torch.autocast(tensors[0].device.type, enabled=False):
        return torch.stack([side_by_side(foreach_norm(tensors)), side_by_side(foreach_norm(tensors, math.inf))])


# Hooks: a look at ``.grad`` right after autograd has accumulated into it, for as long as the owner lives.
#
# torch keeps a hook on its parameter, and the hook keeps what it refers to. So the hooks are taken off when their owner is freed.


Hook = Callable[[Tensor], None]
"""Called with a parameter into which autograd has accumulated."""


def can_be_hooked(parameter: Tensor) -> bool:
    """True if torch lets us hook the accumulation into `parameter`, which it does only where a gradient can arrive."""
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
