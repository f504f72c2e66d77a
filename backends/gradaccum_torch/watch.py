"""The watch over ``.grad``: it notices when something other than autograd changed a gradient, without a pass over the gradients.

`MicroBatch` is what is known of the micro-batch under way, `seen` moves it with each event, and `MicroBatch.require_scaled` raises if it
must not be counted: an arrived gradient is counted once, with its weight and loss scale, or refused. `GradWatch` is the device's part.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, IntEnum
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradaccum_torch.checks import interrupted_error, multiplied_error, not_scaled_error, other_weight_error
from gradaccum_torch.private import at_the_end_of_backward, foreach_norm, keep_own, local, untraced, version
from gradaccum_torch.statistics import Told
from gradaccum_torch.sums import dense_parts, side_by_side


class Event(IntEnum):
    """An event that a micro-batch may meet. The first three are the first gradient of a backward pass, by who runs the pass."""

    OWN_PASS = 1
    """The wrapper's own, of a loss times its weight and loss scale."""
    PLAIN_PASS = 2
    """The user's ``loss.backward()``, or another wrapper's of a loss that nothing multiplied."""
    MULTIPLIED_PASS = 3
    """Another wrapper's, of a loss times the other's weight or loss scale."""
    PASS_ENDED = 4
    CHANGED = 5
    """Autograd has added to a gradient that something else had changed."""
    TAKEN = 6
    """The micro-batch was counted or cleared."""


class Given(IntEnum):
    """The way in which the user passed the losses of a micro-batch; of several ways the last in this list."""

    NOT = 0
    TO_BACKWARD = 1
    SCALED = 2
    """To ``opt.scale`` or ``scaler.scale``, so that a plain ``backward()`` is expected."""


class MicroBatch(NamedTuple):
    """The facts known about the micro-batch under way."""

    arrived: int = 0
    """The backward pass that delivered gradients; of several the last in the list of events. 0: none did."""
    under_way: bool = False
    """A pass has delivered something and has not ended. Outside of a backward pass: the pass raised."""
    changed: bool = False
    given: Given = Given.NOT
    weight: float = 1.0
    losses: tuple[Told, ...] = ()
    """The losses as the user gave them, not scaled; empty if the user gave none."""

    @property
    def is_plain(self) -> bool:
        return self.given is Given.TO_BACKWARD and self.arrived >= Event.PLAIN_PASS

    def told(self, weight: float, given: Given, *losses: Told) -> MicroBatch:
        """Return what is known after the user passed a loss of this weight.

        Raises:
            UsageError: an earlier loss of the same micro-batch has another weight.
        """
        if self.given and self.weight != weight:
            raise other_weight_error(weight, self.weight)
        return self._replace(weight=weight, given=max(self.given, given), losses=self.losses + losses)

    def require_scaled(self, factor: float, *, scales: bool, watched: bool = True) -> None:
        """Raise unless each gradient that arrived is that of a loss times `factor`, weight times loss scale.

        `scales`: a loss scale is in use; `watched`: the user clears no ``.grad`` unseen, as under ``separate_sums``.
        """
        if watched and self.under_way:
            raise interrupted_error()
        # Where the user has replaced .grad since, as netD.zero_grad() of a GAN does, what was multiplied is gone.
        if watched and self.arrived == Event.MULTIPLIED_PASS and not self.changed:
            raise multiplied_error()
        if (scales and not self.given) or (self.is_plain and (factor != 1 or self.weight == 0)):
            raise not_scaled_error(self.arrived > 0)


NOTHING_SEEN = MicroBatch()


def seen(known: MicroBatch, event: Event) -> MicroBatch:
    if event is Event.TAKEN:
        return NOTHING_SEEN
    if event is Event.CHANGED:
        return known._replace(changed=True)
    if event is Event.PASS_ENDED:
        return known._replace(under_way=False)
    return known._replace(arrived=max(known.arrived, event), under_way=True)


# The device's part. Right after autograd has accumulated, `Watched` notes which tensor ``.grad`` is and its version, and `intact` compares;
# both take less than a microsecond together. A version tells that something wrote, not what: ``clip_grad_norm_(parameters, inf)`` writes
# and changes nothing, ``p.grad.data.clamp_()``, NumPy, a collective or a clip of sharded gradients changes and is not counted. Two norms of
# each gradient tell both, for two passes over the gradients and a wait for the device. A training loop does to every window what it did to
# its first. So norms are compared in the first window, and after it only if a call was seen that writes what was there. The squares of
# small elements vanish and those of large ones overflow, and so the largest magnitude is kept beside the 2-norm.


class Allowed(Enum):
    """The writes into ``.grad`` that are not refused."""

    NONE = 0
    """Most gradients are elsewhere, and a norm taken here is not theirs."""
    SAME_VALUES = 1
    ALL = 2
    """Every change is the user's to make."""


class Compared(Enum):
    """The windows in which norms are compared."""

    FIRST = 0
    ALL = 1
    NONE = 2


OWN_PASSES: list[tuple[GradWatch, bool]] = []
"""The backward passes of wrappers that are running; True: of a multiplied loss, so that what reaches other wrappers is multiplied."""


class GradWatch:
    """The ``.grad`` of all parameters as autograd left it, and what is known of the micro-batch under way."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        """Keyed by id(): the same identity as hash(tensor), ten times faster."""
        self.known = NOTHING_SEEN
        self.allowed = Allowed.SAME_VALUES
        self._compared = Compared.FIRST
        self._norms: Tensor | None = None
        """The norms to compare with, shape ``(2, number)``; None: no comparison is to be made."""

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these parameters and no others; what is known of the former stays."""
        known = self._watched
        self._watched = {id(each): known.get(id(each)) or Watched(each, self) for each in parameters}

    def of(self, parameter: Tensor) -> Watched:
        return self._watched[id(parameter)]

    @property
    def holds(self) -> bool:
        return any(watched.gradient is not None for watched in self._watched.values())

    def begin(self) -> None:
        event = Event.PLAIN_PASS
        for watch, multiplied in OWN_PASSES:
            if watch is self:
                event = Event.OWN_PASS
                break
            if multiplied:
                event = Event.MULTIPLIED_PASS
        self.known, self._norms = seen(self.known, event), None
        if not at_the_end_of_backward(self._end):
            self.known = seen(self.known, Event.PASS_ENDED)

    def _end(self) -> None:
        self.known = seen(self.known, Event.PASS_ENDED)
        if self._compared is not Compared.NONE and self.allowed is not Allowed.ALL:
            self._norms = self._norms_now()

    def intact(self) -> bool:
        """True if every ``.grad`` is what autograd left there; waits for the device where values are compared."""
        if self.allowed is Allowed.ALL:
            return True
        if self.known.changed:
            return False
        touched, noted = [], self._norms
        for watched in self._watched.values():
            gradient = watched.parameter.grad
            if gradient is not watched.gradient or (gradient is not None and gradient._version != watched.version):
                touched.append(watched)
        if noted is None or (touched and self.allowed is Allowed.NONE):
            return not touched
        if any(watched.parameter.grad is not watched.gradient for watched in touched):
            return False
        now = self._norms_now()
        if now is None or now.shape != noted.shape:
            return False
        before, after = noted.tolist(), now.tolist()
        # A clip multiplies all by what an inf or NaN in one of them makes of its factor. So where one is, nothing is compared.
        if before != after and all(map(math.isfinite, (*before[1], *after[1]))):
            return False
        for watched in touched:  # The user's loop writes the values that were there: compare in all windows.
            watched.note()
            self._compared = Compared.ALL
        return True

    def window_ended(self) -> None:
        self._norms = None
        if self._compared is Compared.FIRST:
            self._compared = Compared.NONE

    def reset(self, known: MicroBatch = NOTHING_SEEN) -> None:
        self.known, self._norms = known, None
        for watched in self._watched.values():
            gradient = watched.gradient = watched.parameter.grad
            watched.version = -1 if gradient is None else gradient._version

    @torch.no_grad()
    def _norms_now(self) -> Tensor | None:
        """Return 2-norm and largest magnitude of each gradient in this process, shape ``(2, number)``; None without any."""
        gradients = [gradient for watched in self._watched.values() if (gradient := watched.parameter.grad) is not None]
        parts = dense_parts([local(gradient) for gradient in gradients])
        if not parts:
            return None
        tensors = [part for part in parts if part.numel()] or [torch.zeros(1)]
        # Inside the backward pass autocast is as it was in the forward pass, and would give the norm another dtype than outside.
        with torch.autocast(tensors[0].device.type, enabled=False):
            return torch.stack([side_by_side(foreach_norm(tensors)), side_by_side(foreach_norm(tensors, math.inf))])


class Watched:
    """One parameter, and its ``.grad`` as autograd left it."""

    __slots__ = ("gradient", "parameter", "version", "watch")

    def __init__(self, parameter: Tensor, watch: GradWatch) -> None:
        self.parameter, self.watch = parameter, watch
        self.note()

    def note(self) -> None:
        self.gradient = gradient = self.parameter.grad
        self.version = -1 if gradient is None else version(gradient)

    def arrive(self, parameter: Tensor) -> None:
        before, expected = self.gradient, self.version + 1
        if before is not None and before._version == expected:
            self.version = expected  # One addition in place, as nearly always. `GradWatch.intact` sees whether it is still the parameter's.
        else:
            self._look(before, expected, parameter)
        if not self.watch.known.under_way:
            self.watch.begin()

    def _look(self, before: Tensor | None, expected: int, parameter: Tensor) -> None:
        if parameter.grad is not before:
            keep_own(parameter)
        self.note()
        gradient = self.gradient
        if before is not None and (gradient is not before or self.version != expected) and not _by_autograd(before, gradient):
            self.watch.known = seen(self.watch.known, Event.CHANGED)


def _by_autograd(before: Tensor, gradient: Tensor | None) -> bool:
    """True if autograd may have turned `before` into `gradient` otherwise than by one addition in place.

    It adds out of place where it records the addition (``create_graph=True``) and where a dense gradient meets a sparse one. FSDP adds to
    the local part of a DTensor, whose own version does not count that.
    """
    if gradient is before:
        return type(gradient) is not Tensor or (not gradient.is_sparse and gradient.untyped_storage().nbytes() > gradient.nbytes)
    return gradient is None or torch.is_grad_enabled() or (before.is_sparse and not gradient.is_sparse)


for _called in (Watched.arrive, Watched._look, GradWatch.begin, GradWatch._end):
    untraced(_called)


# Hooks: a look at ``.grad`` right after autograd has accumulated into it, for as long as the owner lives.
#
# torch keeps a hook on its parameter, and the hook keeps what it refers to. So the hooks are taken off when their owner is freed.


Hook = Callable[[Tensor], None]
"""Called with a parameter into which autograd has accumulated."""


def can_be_hooked(parameter: Tensor) -> bool:
    return parameter.is_leaf and parameter.requires_grad


class Hooks:
    """The hooks of one owner. They must not refer to it, or it would not be freed when dropped."""

    def __init__(self, *, watching: bool = False) -> None:
        if watching:
            _WATCHING.add(self)
        self._handles: dict[int, RemovableHandle] = {}
        self._finalizer: weakref.finalize[..., Hooks] | None = None

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._handles

    def add(self, parameter: Tensor, hook: Hook) -> None:
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, _remove_all, self._handles)
            self._finalizer.atexit = False
        self._handles[id(parameter)] = cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self, parameter: Tensor) -> None:
        self._handles.pop(id(parameter)).remove()

    def keep(self, parameters: dict[int, Tensor]) -> None:
        for number in self._handles.keys() - parameters.keys():
            self._handles.pop(number).remove()


_WATCHING: weakref.WeakSet[Hooks] = weakref.WeakSet()


def is_watched(parameter: Tensor) -> bool:
    """True if a wrapped optimizer watches `parameter`: it would take other gradients for its own micro-batches', or for tampering."""
    return any(parameter in hooks for hooks in _WATCHING)


@contextmanager
def delivering_zeros(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Turn whatever a backward pass brings to `leaves` inside the block into zeros, NaN too."""
    handles = {id(leaf): leaf.register_hook(torch.zeros_like) for leaf in leaves if can_be_hooked(leaf)}  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _remove_all(handles)


def _remove_all(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
