"""The watch over ``.grad``: it notices when something other than autograd changed a
gradient, without a pass over the gradients.

`MicroBatch` is what is known of the micro-batch under way, `seen` moves it; `GradWatch`
is the device's part.
"""

from __future__ import annotations

import dis
import gc
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, IntEnum
from itertools import repeat, takewhile
from operator import attrgetter, eq, is_not
from types import CodeType, FrameType
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch import checks
from gradaccum_torch.checks import Change
from gradaccum_torch.private.names import (
    at_the_end_of_backward,
    foreach_norm,
    holds_numbers,
    keep_own,
    local,
    may_be_static,
    owns_memory,
    untraced,
    version,
)
from gradaccum_torch.statistics import Told
from gradaccum_torch.sums.arithmetic import dense_parts, side_by_side


class Event(IntEnum):
    """An event that a micro-batch may meet; the first three are the first gradient of a
    backward pass.
    """

    OWN_PASS = 1
    """The wrapper's own, of a loss times its weight and loss scale."""
    PLAIN_PASS = 2
    """The user's ``loss.backward()``, or another wrapper's of a loss that nothing
    multiplied.
    """
    MULTIPLIED_PASS = 3
    """Another wrapper's, of a loss times the other's weight or loss scale."""
    PASS_ENDED = 4
    CHANGED = 5
    """Autograd has added to a gradient that something else had changed."""
    TAKEN = 6
    """The micro-batch was counted or cleared."""


class Given(IntEnum):
    """The way in which the user passed the losses of a micro-batch; of several the last
    in this list.
    """

    NOT = 0
    TO_BACKWARD = 1
    SCALED = 2
    """To ``opt.scale`` or ``scaler.scale``, so that a plain ``backward()`` is expected.
    """


class MicroBatch(NamedTuple):
    """The facts known about the micro-batch under way."""

    arrived: int = 0
    """The backward pass that delivered gradients; of several the last in the list of
    events. 0: none did.
    """
    under_way: bool = False
    """A pass has delivered something and has not ended. Outside of a backward pass: the
    pass raised.
    """
    changed: Change | None = None
    """The change of a gradient that autograd has added to."""
    given: Given = Given.NOT
    weight: float = 1.0
    weighed: bool = False
    """The user has named the weight."""
    losses: tuple[Told, ...] = ()
    """The losses as the user gave them, not scaled; empty if the user gave none."""
    weighed_again: bool = False
    """The user has named the weight before a loss and after it."""

    @property
    def is_plain(self) -> bool:
        return self.given is Given.TO_BACKWARD and self.arrived >= Event.PLAIN_PASS

    def told(
        self, weight: float, given: Given, *losses: Told, weighed: bool = False
    ) -> MicroBatch:
        """Return what is known after the user passed a loss of this weight; `weighed`:
        the user named it.

        Raises:
            UsageError: the micro-batch was given another weight before.
        """
        if (self.given or self.weighed) and self.weight != weight:
            raise checks.other_weight_error(weight, self.weight)
        weighed = weighed or self.weighed
        return self._replace(
            weight=weight,
            weighed=weighed,
            given=max(self.given, given),
            losses=self.losses + losses,
        )

    def cleared(self) -> MicroBatch:
        """Return what is known after the user cleared ``.grad``: a weight named before
        any loss.
        """
        return (
            NOTHING_SEEN
            if self.given
            else NOTHING_SEEN._replace(weight=self.weight, weighed=self.weighed)
        )

    def require_scaled(
        self, factor: float, *, scales: bool, watched: bool = True
    ) -> None:
        """Raise unless each gradient that arrived is that of a loss times `factor`.

        `scales`: a loss scale is in use; `watched`: the user clears no ``.grad``
        unseen, as under ``separate_sums``.
        """
        if watched and self.under_way:
            raise checks.interrupted_error()
        # Where the user has replaced .grad since, as netD.zero_grad() of a GAN does,
        # what was multiplied is gone.
        if watched and self.arrived == Event.MULTIPLIED_PASS and not self.changed:
            raise checks.multiplied_error()
        if (scales and not self.given) or (
            self.is_plain and (factor != 1 or self.weight == 0)
        ):
            raise checks.not_scaled_error(self.arrived > 0)
        if not self.given and self.arrived and factor != 1:
            raise checks.not_weighed_error(self.weight)


NOTHING_SEEN = MicroBatch()
_FIRST_PASS = {
    event: MicroBatch(event, under_way=True)
    for event in (Event.OWN_PASS, Event.PLAIN_PASS, Event.MULTIPLIED_PASS)
}
_FIRST_ENDED = {
    id(known): known._replace(under_way=False) for known in _FIRST_PASS.values()
}
"""Made once: nearly every micro-batch has a first pass alone."""


def seen(
    known: MicroBatch, event: Event, change: Change = Change.WRITTEN
) -> MicroBatch:
    if event is Event.TAKEN:
        return NOTHING_SEEN
    if event is Event.CHANGED:
        return known._replace(changed=known.changed or change)
    if event is Event.PASS_ENDED:
        return _FIRST_ENDED.get(id(known)) or known._replace(under_way=False)
    return (
        _FIRST_PASS[event]
        if known is NOTHING_SEEN
        else known._replace(arrived=max(known.arrived, event), under_way=True)
    )


# The device's part. Right after autograd has accumulated, `Watched` notes which tensor
# ``.grad`` is and its version, and `intact` compares; both take less than a microsecond
# together. A version tells that something wrote, not what:
# ``clip_grad_norm_(parameters, inf)`` writes and changes nothing,
# ``p.grad.data.clamp_()``, NumPy, a collective or a clip of sharded gradients changes
# and is not counted. Two norms of each gradient tell both, for two passes over the
# gradients and a wait for the device. A training loop does to every window what it did
# to its first. So norms are compared in the first window, and after it only if a call
# was seen that writes what was there. The squares of small elements vanish and those of
# large ones overflow, and so the largest magnitude is kept beside the 2-norm.


class Allowed(Enum):
    """The writes into ``.grad`` that are not refused."""

    NONE = 0
    """Most gradients are elsewhere, and a norm taken here is not theirs."""
    SAME_VALUES = 1
    ALL = 2
    """Every change is the user's to make."""


class Compared(Enum):
    """The windows in which norms are compared, or, where every change is allowed, the
    memory of gradients is looked at.
    """

    FIRST = 0
    ALL = 1
    NONE = 2


_GRADIENT = attrgetter("gradient")
PASSES = [0]
"""The number of backward passes that any wrapper has seen."""
OWN_PASSES: list[tuple[GradWatch, bool]] = []
"""The backward passes of wrappers that are running; True: of a multiplied loss, so that
what reaches other wrappers is multiplied.
"""


class GradWatch:
    """The ``.grad`` of all parameters as autograd left it, and the micro-batch under
    way.
    """

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        """Keyed by id(): the same identity as hash(tensor), ten times faster."""
        self.known = NOTHING_SEEN
        self.allowed = Allowed.SAME_VALUES
        self._compared = Compared.FIRST
        self._norms: Tensor | None = None
        """The norms to compare with, shape ``(2, number)``; None: no comparison is to
        be made.
        """
        self.fresh: list[Watched] = []
        """The parameters whose gradient was None before the pass under way: the memory
        of a new one is looked at as it ends.
        """
        self.places: list[list[Place]] | None = [[]]
        """By micro-batch, the place of each backward pass in the user's program; None:
        nobody asks any more.
        """
        self._opener = 0
        """The id of the parameter with which the micro-batch's first pass began."""

    def watch(self, parameters: Iterable[Tensor]) -> None:
        known = dict(self._watched)
        self._watched.clear()
        self._watched.update(
            (id(each), known.get(id(each)) or Watched(each, self))
            for each in parameters
        )

    def of(self, parameter: Tensor) -> Watched:
        return self._watched[id(parameter)]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Allow every change inside the block, where no code of the user's runs."""
        before = self.allowed, self._compared
        self.allowed, self._compared = Allowed.ALL, Compared.NONE
        try:
            yield
        finally:
            self.allowed, self._compared = before

    @property
    def holds(self) -> bool:
        return any(map(is_not, map(_GRADIENT, self._watched.values()), repeat(None)))

    def begin(self, opener: int = 0) -> bool:
        """Note that a backward pass has begun, at the parameter with the id `opener`;
        return False if its end will not be seen.
        """
        event = Event.PLAIN_PASS
        for watch, multiplied in OWN_PASSES:
            if watch is self:
                event = Event.OWN_PASS
                break
            if multiplied:
                event = Event.MULTIPLIED_PASS
        self.known, self._norms = seen(self.known, event), None
        PASSES[0] += 1
        if self.places is not None:
            self._note_place(self.places[-1], opener)
        if at_the_end_of_backward(self._end):
            return True
        # Then each gradient looks like a pass.
        self.known, self.places = (
            seen(self.known, Event.PASS_ENDED),
            None,
        )
        self._keep_fresh()
        return False

    def _note_place(self, places: list[Place], opener: int) -> None:
        place, is_nested = _place_of_pass()
        if not places:
            self._opener = opener
        # A reentrant checkpoint runs a pass for each of its segments inside the user's,
        # which is over when its first parameter comes again.
        if not places or not is_nested or opener == self._opener:
            places.append(place)

    def ask_no_more(self) -> None:
        self.places = None

    def _end(self) -> None:
        self.known = seen(self.known, Event.PASS_ENDED)
        if self.fresh:
            self._keep_fresh()
        if self._compared is Compared.NONE:
            return
        if self.allowed is not Allowed.ALL:
            # By the user's hook: its values are those of the norms.
            if any(watched.is_written() for watched in self._watched.values()):
                self.known = seen(self.known, Event.CHANGED)
            self._norms = self._norms_now()
            return
        for (
            watched
        ) in self._watched.values():  # Another pass of this micro-batch may come.
            gradient = watched.parameter.grad
            if gradient is not None and gradient._version == 0:
                keep_own(watched.parameter)

    def _keep_fresh(self) -> None:
        """Copy each new gradient into whose memory somebody else may write; here, as a
        look from each hook takes twice the time.
        """
        for watched in self.fresh:
            gradient = watched.parameter.grad
            if (
                gradient is not None
                and gradient is watched.gradient
                and not owns_memory(gradient)
            ):
                watched.parameter.grad = gradient.clone()
                watched.note()
        self.fresh.clear()

    def expect_passes(self, arrived: Tensor) -> None:
        """Look at the memory of gradients in all windows, since this micro-batch has a
        second pass, which has `arrived` at one parameter.

        Raises:
            UsageError: no micro-batch of the first window had a second pass, and memory
                that was not looked at may be somebody else's.
        """
        before, self._compared = self._compared, Compared.ALL
        for watched in self._watched.values() if before is Compared.NONE else ():
            parameter = watched.parameter
            if (
                parameter.grad is not None
                and parameter.grad._version == (parameter is arrived)
                and may_be_static(parameter.grad)
            ):
                raise checks.second_pass_error()

    def intact(self) -> bool:
        """True if every ``.grad`` is as autograd left it; may wait for the device."""
        if self.allowed is Allowed.ALL:
            return True
        if self.known.changed:
            return False
        touched, noted = [], self._norms
        for watched in self._watched.values():
            gradient = watched.parameter.grad
            if gradient is not watched.gradient or (
                gradient is not None and gradient._version != watched.version
            ):
                touched.append(watched)
        if noted is None or (touched and self.allowed is Allowed.NONE):
            return not touched
        if any(watched.parameter.grad is not watched.gradient for watched in touched):
            return False
        now = self._norms_now()
        if now is None or now.shape != noted.shape:
            return False
        before, after = noted.tolist(), now.tolist()
        # A clip multiplies all by what an inf or NaN in one of them makes of its
        # factor. So where one is, nothing is compared.
        if before != after and all(map(math.isfinite, (*before[1], *after[1]))):
            return False
        # The user's loop writes the values that were there: compare in all windows.
        for watched in touched:
            watched.note()
            self._compared = Compared.ALL
        return True

    def window_ended(self) -> None:
        self._norms = None
        if self._compared is Compared.FIRST:
            self._compared = Compared.NONE

    def holds_users(self, parameters: Iterable[Tensor], *, apart: bool) -> bool:
        """True if ``.grad`` holds what no backward pass brought; `apart`: it holds no
        part of the sum. May wait for the device.
        """
        for parameter in parameters:
            gradient, watched = parameter.grad, self._watched.get(id(parameter))
            if gradient is None:
                continue
            if (
                watched is None
                or gradient is not watched.gradient
                or gradient._version != watched.version
            ):
                return True
            if apart and holds_numbers(gradient):
                return True
        return False

    def found_change(self) -> Change:
        """Return what was done to ``.grad``, as far as the gradients tell; waits for
        the device.
        """
        if self.known.changed:
            return self.known.changed
        pairs = [
            (watched.gradient, watched.parameter.grad)
            for watched in self._watched.values()
        ]
        if any(gradient is None for before, gradient in pairs if before is not None):
            return Change.CLEARED
        if any(gradient is not before for before, gradient in pairs):
            return Change.REPLACED
        return (
            Change.WRITTEN
            if any(holds_numbers(each) for _, each in pairs if each is not None)
            else Change.CLEARED
        )

    def drop(self, hooks: Hooks) -> None:
        """Clear what the owner of `hooks`, which is being freed, has left in ``.grad``
        of parameters that no other wrapped optimizer has.
        """
        if self.allowed is Allowed.ALL:
            return
        others = [each for each in _WATCHING if each is not hooks]
        for watched in self._watched.values():
            parameter = watched.parameter
            is_left = parameter.grad is not None and parameter.grad is watched.gradient
            if is_left and not any(parameter in other for other in others):
                parameter.grad = None

    def reset(self, known: MicroBatch = NOTHING_SEEN) -> None:
        self.known, self._norms = known, None
        self.fresh.clear()
        if self.places:
            self.places[-1].clear()
        for watched in self._watched.values():
            gradient = watched.gradient = watched.parameter.grad
            watched.version = -1 if gradient is None else gradient._version

    @torch.no_grad()
    def _norms_now(self) -> Tensor | None:
        """Return 2-norm and largest magnitude of each gradient here, shape
        ``(2, number)``; None without any.
        """
        gradients = [
            gradient
            for watched in self._watched.values()
            if (gradient := watched.parameter.grad) is not None
        ]
        parts = dense_parts([local(gradient) for gradient in gradients])
        if not parts:
            return None
        tensors = [part for part in parts if part.numel()] or [torch.zeros(1)]
        # Inside the backward pass autocast is as it was in the forward pass, and would
        # give the norm another dtype than outside.
        with torch.autocast(tensors[0].device.type, enabled=False):
            return torch.stack(
                [
                    side_by_side(foreach_norm(tensors)),
                    side_by_side(foreach_norm(tensors, math.inf)),
                ]
            )


class Watched:
    """One parameter, and its ``.grad`` as autograd left it."""

    __slots__ = ("gradient", "parameter", "version", "watch")

    def __init__(self, parameter: Tensor, watch: GradWatch) -> None:
        self.parameter, self.watch = parameter, watch
        self.note()

    def note(self) -> None:
        self.gradient = gradient = self.parameter.grad
        self.version = -1 if gradient is None else version(gradient)

    def is_written(self) -> bool:
        """True if something wrote into ``.grad`` since autograd left it; another tensor
        there does not count.
        """
        gradient = self.gradient
        return (
            gradient is not None
            and self.parameter.grad is gradient
            and gradient._version != self.version
        )

    def arrive(self, parameter: Tensor) -> None:
        before, expected = self.gradient, self.version + 1
        if before is not None and before._version == expected:
            # One addition in place, as nearly always. `GradWatch.intact` sees whether
            # it is still the parameter's.
            self.version = expected
        elif before is None:
            self.note()
            self.watch.fresh.append(self)
        else:
            self._look(before, expected, parameter)
        if not self.watch.known.under_way:
            self.watch.begin(id(parameter))

    def _look(self, before: Tensor, expected: int, parameter: Tensor) -> None:
        change = Change.WRITTEN
        if parameter.grad is not before:
            # What autograd has just made is unwritten; it has added to what somebody
            # assigned.
            change = (
                Change.CLEARED
                if parameter.grad is not None and parameter.grad._version == 0
                else Change.REPLACED
            )
            keep_own(parameter)
        self.note()
        gradient = self.gradient
        if (gradient is not before or self.version != expected) and not _by_autograd(
            before, gradient
        ):
            self.watch.known = seen(self.watch.known, Event.CHANGED, change)


def _by_autograd(before: Tensor, gradient: Tensor | None) -> bool:
    """True if autograd may have turned `before` into `gradient` otherwise than by one
    addition in place.

    It does under ``create_graph=True`` and where dense meets sparse; FSDP adds to the
    local part of a DTensor, which its version does not count.
    """
    if gradient is before:
        return type(gradient) is not Tensor or (
            not gradient.is_sparse
            and gradient.untyped_storage().nbytes() > gradient.nbytes
        )
    return (
        gradient is None
        or torch.is_grad_enabled()
        or (before.is_sparse and not gradient.is_sparse)
    )


for _called in (Watched.arrive, Watched._look, GradWatch.begin, GradWatch._end):
    untraced(_called)


# Places in the user's program: a loop that still steps every so many backward passes,
# as it did before it was wrapped, is seen by them.


Place = tuple[tuple[CodeType, int], ...]
"""The functions that are running, the outermost first, and how far each has come."""
_BACKWARD = torch.autograd.backward.__code__


def place_of(frame: FrameType | None) -> Place:
    place: list[tuple[CodeType, int]] = []
    while frame is not None:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(place))


def _place_of_pass() -> tuple[Place, bool]:
    """Return the place that runs the backward pass, and whether that runs inside of
    another; an accelerator's pass is in another thread.
    """
    for frame in (
        sys._getframe(2),
        sys._current_frames().get(threading.main_thread().ident or 0),
    ):
        place = place_of(frame)
        passes = [index for index, (code, _) in enumerate(place) if code is _BACKWARD]
        if passes:
            return place[: passes[0]], len(passes) > 1
    return (), False


def share_loop(passes: Place, step: Place) -> bool:
    """True if the innermost loop around the backward passes is around the step, too."""
    common = sum(1 for _ in takewhile(bool, map(eq, passes, step)))
    if (
        common >= min(len(passes), len(step))
        or passes[common][0] is not step[common][0]
    ):
        return False
    (code, at), (_, then), inside = passes[common], step[common], passes[common + 1 :]
    if any(_loops(*each) for each in inside):
        return False
    around = min(_loops(code, at), key=len, default=None)
    return (
        any(_loops(*each) for each in passes[:common])
        if around is None
        else then in around
    )


def _loops(code: CodeType, at: int) -> list[range]:
    """Return the loops around an instruction, each as a range of instructions."""
    jumps = (each for each in dis.get_instructions(code) if each.opcode in _JUMPS)
    loops: list[range] = []
    for start, end in sorted(
        (jump.argval, jump.offset + 1) for jump in jumps if jump.argval < jump.offset
    ):
        # Beside a loop's last jump there is one of each ``continue``, which begins at
        # the same place or a little before.
        same = [
            loop
            for loop in loops
            if loop.start == start or loop.start < start < loop.stop < end
        ]
        loops = [loop for loop in loops if loop not in same] + [
            range(min([start, *(loop.start for loop in same)]), end)
        ]
    return [loop for loop in loops if at in loop]


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


# Hooks: a look at ``.grad`` right after autograd has accumulated into it, for as long
# as the owner lives.
#
# torch keeps a hook on its parameter, and the hook keeps what it refers to. So the
# hooks are taken off when their owner is freed.


Hook = Callable[[Tensor], None]
"""Called with a parameter into which autograd has accumulated."""


def can_be_hooked(parameter: Tensor) -> bool:
    return parameter.is_leaf and parameter.requires_grad


class Hooks:
    """The hooks of one owner, to which they must not refer, so that it can be freed."""

    def __init__(self, *, watching: bool = False) -> None:
        if watching:
            _WATCHING.add(self)
        self._handles: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove_all, self._handles).atexit = False

    def __bool__(self) -> bool:
        return bool(self._handles)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._handles

    def add(self, parameter: Tensor, hook: Hook) -> None:
        self._handles[id(parameter)] = cast(
            RemovableHandle,
            parameter.register_post_accumulate_grad_hook(hook),  # type: ignore[no-untyped-call]
        )

    def shared(self) -> bool:
        return any(
            self._handles.keys() & other._handles.keys()
            for other in _WATCHING
            if other is not self
        )

    def keep(self, parameters: dict[int, Tensor]) -> None:
        for number in self._handles.keys() - parameters.keys():
            self._handles.pop(number).remove()


_WATCHING: weakref.WeakSet[Hooks] = weakref.WeakSet()


def is_watched(parameter: Tensor) -> bool:
    return any(parameter in hooks for hooks in _WATCHING)


def require_no_gradients(parameters: Sequence[Tensor]) -> None:
    """Raise unless ``.grad`` is free of what would be a part of the next update."""
    if not _filled(parameters):
        return
    gc.collect()  # An error that was caught may keep another wrapper in a cycle.
    filled = _filled(parameters)
    if not filled:
        return
    found = "gradients of earlier backward passes"
    fix = "Set .grad to None first, as optimizer.zero_grad() does."
    if any(map(is_watched, filled)):
        found = "those of another wrapped optimizer, whose window is open"
        fix = "Call discard() of that one first, or model.zero_grad()."
    raise explain(
        UsageError,
        ".grad",
        expected="no gradients in parameters that are new to a wrapped optimizer",
        found=found,
        fix=fix,
    )


def _filled(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [
        parameter
        for parameter in parameters
        if parameter.grad is not None and holds_numbers(parameter.grad)
    ]


@contextmanager
def delivering_zeros(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Turn whatever a backward pass brings to `leaves` inside the block into zeros, NaN
    too.
    """
    handles = {
        id(leaf): leaf.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        for leaf in leaves
        if can_be_hooked(leaf)
    }
    try:
        yield
    finally:
        _remove_all(handles)


def _remove_all(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
