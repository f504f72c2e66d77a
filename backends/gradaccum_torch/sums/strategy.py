"""The place of a window's sum: the interface that `Window` and `Update` use, and the
sum in ``.grad``, which autograd adds into anyway.

The window's `Plan` chooses between it and `gradaccum_torch.sums.buffers`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum_torch.checks import (
    Change,
    Size,
    changed_gradients_error,
    interrupted_error,
    unfinished_error,
)
from gradaccum_torch.parameters import Parameters
from gradaccum_torch.private.names import is_sharded, processes, version
from gradaccum_torch.sums.arithmetic import (
    GRAD,
    IS_SPARSE,
    NORM_BLOCK,
    REQUIRES_GRAD,
    added_up,
    divide,
    multiply,
    narrowed,
)
from gradaccum_torch.window.watch import (
    NOTHING_SEEN,
    OWN_PASSES,
    PASSES,
    Allowed,
    Event,
    GradWatch,
    Hook,
    Hooks,
    can_be_hooked,
    seen,
)


class Undivided(NamedTuple):
    """A window's sum before it is divided, in place where that can be."""

    parameters: list[Tensor]
    """Those that have a sum. Not the sums themselves: each may be freed as it is cast.
    """
    versions: list[int]
    graphs: list[Tensor]
    """The sums, if some have a graph: these are divided in it, out of place."""
    divided: list[Tensor]
    """What has been divided in place: a `DTensor` does not count what torch writes."""

    def is_divided(self, total: Tensor, before: int) -> bool:
        return version(total) != before or (
            is_sharded(total) and any(total is each for each in self.divided)
        )


class Strategy(ABC):
    """One window's sum, and the watch over ``.grad``."""

    keeps_micro_batch_apart: bool
    """Until `take`, ``.grad`` holds this micro-batch alone, and all of it."""
    expects = False
    """It wants to know how long the next window is, by `expect`."""

    def __init__(
        self,
        parameters: Parameters,
        accumulate_dtype: torch.dtype | None,
        drops: bool = False,
    ) -> None:
        # Nothing here refers to the wrapper: in a cycle with it, the hooks of a dropped
        # wrapper would run until it is collected.
        self._parameters, self._accumulate_dtype, self._drops = (
            parameters,
            accumulate_dtype,
            drops,
        )
        self._hooks = Hooks(watching=True)
        self.watch = GradWatch()
        self.groups_changed()
        self.watch.reset()
        # The sum of an open window must not become a part of a later optimizer's.
        weakref.finalize(self, self.watch.drop, self._hooks).atexit = False

    def expect(self, size: Size) -> None:  # noqa: B027
        """Prepare for a next window of this size."""

    def groups_changed(self) -> None:
        """React to parameters that were added, replaced, frozen or unfrozen."""
        self.pack()
        trainable = {
            id(parameter): parameter
            for parameter in self._parameters.unique()
            if can_be_hooked(parameter)
        }
        self._hooks.keep(trainable)
        self.watch.watch(trainable.values())
        for parameter in trainable.values():
            if parameter not in self._hooks:
                self._hooks.add(parameter, self._hook_for(parameter))

    def pack(self, packed: Tensor | None = None) -> None:  # noqa: B027
        """Note that the sums are parts of `packed`, which saves calls; None: no
        longer.
        """

    def _hook_for(self, parameter: Tensor) -> Hook:
        return self.watch.of(parameter).arrive

    def backward(
        self,
        loss: Tensor,
        arguments: Mapping[str, Any],
        *,
        first: bool,
        multiplied: bool,
    ) -> None:
        """Run ``loss.backward(**arguments)``. If it raises, remove what arrived, if it
        is apart from the sum.

        `first`: the micro-batch is its window's first; `multiplied`: the loss is the
        user's times a factor.
        """
        watch, before = self.watch, self.watch.known
        undoable = (
            (first or self.keeps_micro_batch_apart)
            and not before.arrived
            and not watch.holds
        )
        own = watch, multiplied
        passes = PASSES[0]
        OWN_PASSES.append(own)
        try:
            loss.backward(**arguments)  # type: ignore[no-untyped-call]
        except BaseException:
            if undoable:
                self._parameters.free_gradients()
                self.forget_micro_batch()
                watch.known = before
                PASSES[0] = passes
            elif watch.known.arrived:
                # A reentrant checkpoint's own passes may have ended.
                watch.known = watch.known._replace(under_way=True)
            raise
        finally:
            OWN_PASSES.remove(own)

    def zero_grad(self, set_to_none: bool, *, first: bool) -> None:
        """Clear ``.grad``, and the micro-batch under way with it, unless it is a part
        of the sum; then raise.
        """
        if first or self.keeps_micro_batch_apart:
            self._parameters.zero_grad(set_to_none)
            if (
                not set_to_none
                or self.watch.known is not NOTHING_SEEN
                or self.watch.holds
            ):
                self.forget_micro_batch()
        elif self.watch.known.arrived:
            raise unfinished_error("zero_grad()")

    @property
    def begun(self) -> bool:
        """True if autograd has delivered a part of a micro-batch that is not counted
        yet.
        """
        return self.watch.known.arrived > 0

    def require_whole(self) -> None:
        """Raise unless the last backward pass has ended."""
        if self.watch.known.under_way and self.watch.allowed is not Allowed.ALL:
            raise interrupted_error()

    def require_counted(self, call: str) -> None:
        if self.keeps_micro_batch_apart:
            return
        if self.watch.known.given or self.watch.known.arrived:
            raise unfinished_error(call)
        if not self.watch.intact():
            raise self.changed_error()

    def changed_error(self) -> UsageError:
        """Return the error for a changed ``.grad``, with its likeliest cause; may wait
        for the device.
        """
        if self._hooks.shared():
            return changed_gradients_error(Change.SHARED)
        change = self.watch.found_change()
        if change is Change.WRITTEN and processes() > 1:
            change = Change.REDUCED
        return changed_gradients_error(change)

    def require_true_gradient(self, *, first: bool, flushing: bool) -> None:
        """Raise unless a changed ``.grad`` was the whole gradient of the window, which
        the user may change, but not clear before a flush.

        `first`: the last micro-batch is the first of its window; `flushing`: none is
        under way.
        """
        self.pack()
        cleared = flushing and self.watch.found_change() is Change.CLEARED
        if (
            cleared
            or not self._is_all_in_grad(first, flushing)
            or (self.watch.known.changed and not first)
        ):
            raise self.changed_error()

    @abstractmethod
    def _is_all_in_grad(self, first: bool, flushing: bool) -> bool:
        """True if ``.grad`` holds the window's whole sum."""

    @abstractmethod
    def take(self, size: Size, begin: Callable[[], None]) -> bool:
        """Add the micro-batch in ``.grad`` to the sum of a window of this `size`;
        return False if it was dropped.

        It calls `begin` before it writes anything. The caller counts the micro-batch,
        and takes it off the watch.
        """

    @abstractmethod
    def settle(self) -> list[Tensor]:
        """Note which parameters have a gradient at the window's end, and return the sum
        as tensors, each element once.
        """

    def fits(self, norm: float, divisor: float) -> bool:
        """True if the sum, of that norm, divided by `divisor` is finite in the inner
        optimizer's dtype.
        """
        return True

    def hands_over_whole(self) -> bool:
        """True if the inner optimizer's dtype holds the sum undivided."""
        return True

    @abstractmethod
    def undivided(self) -> Undivided:
        """Return the record of the sum before `hand_over`."""

    @abstractmethod
    def hand_over(self, undivided: Undivided, divisor: float, unclipped: float) -> None:
        """Put the sum divided by `divisor` (`unclipped` without clipping) into
        ``.grad`` for the inner optimizer.
        """

    @abstractmethod
    def take_back(self, undivided: Undivided, divisor: float, spoiled: bool) -> None:
        """Undo `hand_over`, which may have raised anywhere; `spoiled`: something wrote
        into what was handed over.
        """

    @abstractmethod
    def sums(self) -> list[Tensor | None]:
        """Return the sum by position, None where nothing is held; the tensors
        themselves.
        """

    @abstractmethod
    def load(self, sums: Sequence[Tensor | None]) -> None:
        """Take these tensors over as the sum."""

    def release(self) -> list[Tensor | None]:
        """Give the sum away, and the micro-batch under way with it."""
        sums = self.sums()
        self.clear()
        return sums

    def pickled(self) -> dict[str, Any]:
        """Return the state with the gradients: torch pickles a parameter without its
        ``.grad``.
        """
        gradients = [
            None if parameter.grad is None else parameter.grad.detach()
            for parameter in self._parameters.positions()
        ]
        return {
            "gradients": gradients,
            "known": self.watch.known._replace(
                changed=None if self.watch.intact() else self.watch.found_change()
            ),
        }

    def unpickle(self, pickled: Mapping[str, Any]) -> None:
        for parameter, gradient in zip(
            self._parameters.positions(), pickled["gradients"], strict=True
        ):
            parameter.grad = gradient
        self.watch.reset(pickled["known"])

    def forget_micro_batch(self) -> None:
        """Note that the user cleared ``.grad``, which held the micro-batch alone."""
        self.watch.reset(self.watch.known.cleared())

    def window_ended(self) -> None:
        """Clear the sum of a window that is closed."""
        self.clear()
        self.watch.window_ended()

    def clear(self) -> None:
        self.pack()
        self._parameters.free_gradients()
        self.watch.reset()


# The sum of a window in ``.grad`` itself, which autograd adds into anyway: no second
# buffer, nothing to do per micro-batch.
#
# It is the default wherever the sum has the gradient's own dtype.


class GradStrategy(Strategy):
    """The sum is ``.grad``."""

    keeps_micro_batch_apart = False
    _packed: Tensor | None = None

    def pack(self, packed: Tensor | None = None) -> None:
        self._packed = packed

    def take(self, size: Size, begin: Callable[[], None]) -> bool:
        return True

    def settle(self) -> list[Tensor]:
        parameters = [
            parameter
            for parameter in self._parameters.unique()
            if parameter.grad is not None
        ]
        self._parameters.note_gradients(parameters)
        if self._packed is not None:
            return (
                [self._packed]
                if self._packed.numel() <= NORM_BLOCK
                else list(torch.split(self._packed, NORM_BLOCK))
            )
        gradients: list[Tensor] = list(map(GRAD, parameters))
        if set(map(type, gradients)) <= {Tensor} and not any(map(IS_SPARSE, gradients)):
            return gradients
        whole = list(map(added_up, gradients))
        if any(map(is_not, whole, gradients)):
            for parameter, total in zip(parameters, whole, strict=True):
                parameter.grad = total
            # The replaced .grad must not look like tampering if the inner optimizer
            # raises and flush() is called again.
            self.watch.reset()
        return whole

    def undivided(self) -> Undivided:
        parameters = self._parameters.had_gradients
        gradients: list[Tensor] = list(map(GRAD, parameters))
        graphs = list(gradients) if any(map(REQUIRES_GRAD, gradients)) else []
        return Undivided(parameters, list(map(version, gradients)), graphs, [])

    def hand_over(self, undivided: Undivided, divisor: float, unclipped: float) -> None:
        masters = self._parameters.masters
        if divisor == 1 and not masters:
            return
        parameters, graphs = undivided.parameters, undivided.graphs
        divided = (
            [parameter for parameter in parameters if not self._is_narrowed(parameter)]
            if masters
            else parameters
        )
        gradients: list[Tensor] = list(map(GRAD, divided))
        if graphs:
            self._divide_graphs(divided, unclipped)
            gradients = list(map(GRAD, divided))
        # The version of one part is that of all.
        packed = [self._packed] if self._packed is not None and not masters else []
        divide(
            packed
            or (
                [gradient for gradient in gradients if not gradient.requires_grad]
                if graphs
                else gradients
            ),
            divisor,
        )
        if graphs:
            divide(
                [gradient for gradient in gradients if gradient.requires_grad],
                divisor / unclipped,
            )
        undivided.divided.extend(gradients)
        if masters:
            self._give_masters(parameters, divisor)

    def take_back(self, undivided: Undivided, divisor: float, spoiled: bool) -> None:
        for parameter, before in zip(
            undivided.parameters, undivided.versions, strict=True
        ):
            gradient = parameter.grad
            if (
                gradient is not None
                and not gradient.requires_grad
                and undivided.is_divided(gradient, before)
            ):
                multiply([gradient], divisor)
        for parameter, graph in zip(
            undivided.parameters, undivided.graphs, strict=False
        ):
            if graph.requires_grad:
                parameter.grad = graph
        for parameter in self._parameters.unique():
            master = self._parameters.worked_on(parameter)
            if master is not parameter:
                master.grad = None
        self.watch.reset(seen(NOTHING_SEEN, Event.CHANGED) if spoiled else NOTHING_SEEN)

    def sums(self) -> list[Tensor | None]:
        gradients = map(GRAD, self._parameters.positions())
        return [
            each.detach() if each is not None and each.requires_grad else each
            for each in gradients
        ]

    def load(self, sums: Sequence[Tensor | None]) -> None:
        self.pack()
        for parameter, gradient in zip(self._parameters.positions(), sums, strict=True):
            parameter.grad = gradient
        self.watch.reset()

    def _is_all_in_grad(self, first: bool, flushing: bool) -> bool:
        return True

    def _divide_graphs(self, parameters: Sequence[Tensor], divisor: float) -> None:
        """Divide what will be differentiated again (``create_graph=True``) in its
        graph.
        """
        with torch.enable_grad():
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.requires_grad:
                    parameter.grad = parameter.grad / divisor

    def _give_masters(self, parameters: Sequence[Tensor], divisor: float) -> None:
        for parameter in parameters:
            master, gradient = self._parameters.worked_on(parameter), parameter.grad
            if master is not parameter and gradient is not None:
                gradient = gradient.detach()
                master.grad = (
                    narrowed(gradient, divisor, master.dtype)
                    if self._is_narrowed(parameter)
                    else gradient
                )

    def _is_narrowed(self, parameter: Tensor) -> bool:
        """True if the inner optimizer has a master of another dtype than the sum's in
        its place.
        """
        master = self._parameters.worked_on(parameter)
        return (
            master is not parameter
            and parameter.grad is not None
            and parameter.grad.dtype != master.dtype
        )
