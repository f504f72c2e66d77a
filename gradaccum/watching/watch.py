"""`Watch`: listeners in a loop that reads its `gradaccum.StepResult` itself; one object for every framework.

JAX's state is a value, which can call nobody. The loop hands over the result instead, after each step on the host.
"""

from __future__ import annotations

import math
from typing import SupportsFloat

from gradaccum._validation import require_weight
from gradaccum.errors import ArgumentTypeError, explain
from gradaccum.options import make_options
from gradaccum.result import StepResult
from gradaccum.state import initial_state
from gradaccum.transitions import select
from gradaccum.watching.listeners import Listeners
from gradaccum.watching.window import ClosedWindow, Listener
from gradaccum.window_loss import add_loss, window_loss


class Watch:
    """Call it with the result of every micro-batch, flush and discard; it calls `listeners` when one has closed a window.

        watch = gradaccum.Watch(gradaccum.watching.JsonLines("windows.jsonl"))
        ...
        watch(opt.result, loss=loss)  # after each step; in JAX gradaccum_jax.result(state)

    Reading a result waits for the device that computes it, as any look at a number does.

    Args:
        listeners: functions of one `gradaccum.watching.ClosedWindow`.
        reduction: as that of `gradaccum.wrap`; the window's loss is combined by it.

    Raises:
        ArgumentTypeError, ArgumentValueError: a listener cannot be called; no such reduction.
    """

    def __init__(self, *listeners: Listener, reduction: str = "mean") -> None:
        self._options = make_options(None, reduction=reduction)
        self._told, self._weight, self._loss = 0, 0.0, 0.0
        self._told_last: str | None = None
        """The last window's result, if nothing has come since: the flush of an empty window leaves it."""
        self._complete = False
        """All micro-batches of the open window were told. Before the first result is seen, it may be open already."""
        self._listeners = Listeners()
        for listener in listeners:
            self._listeners.add(listener)

    def __call__(
        self, result: StepResult, *, loss: SupportsFloat | None = None, weight: SupportsFloat | None = None
    ) -> ClosedWindow | None:
        """Take in what one event did, and tell the listeners if it closed a window.

        A `StepResult` does not say how many micro-batches a window held, nor what they weighed. So give `loss` or `weight` with each
        micro-batch, and neither with a flush or discard; the window then has its count, weight and loss. Else these are NaN, never a
        guess: if some micro-batch was not told, and in the first window if it closes with the first result, as it may have been resumed.
        With neither, a result that equals the last window's is the flush of an empty window, which closes none. After an overflow the
        weight is NaN, as the result does not say which micro-batches were dropped. A loss that the optimizer was told itself is in the
        result, and need not be given here.

        Args:
            result: of the event, in Python numbers or scalars of the framework.
            loss: the micro-batch's, not scaled; a number or a scalar of the framework.
            weight: as the optimizer was given it, 1 if it was not.

        Returns:
            The window that closed; None if none did.

        Raises:
            ArgumentTypeError, ArgumentValueError: `result` is no such result of scalars, or `loss` or `weight` is no such number.
            Exception: what a listener raised, after all of them were called.
        """
        known = _in_numbers(result)
        counted = None if weight is None else require_weight(float(_number("weight", weight)))
        value = None if loss is None else _number("loss", loss)
        if loss is not None or weight is not None:
            self._take(value, 1.0 if counted is None else counted)
        with self._listeners.settled():
            if known.closed and (self._told or repr(known) != self._told_last):
                self._told_last = repr(known)  # as NaN differs from NaN
                return self._end(known)
        self._go_on(known)
        return None

    def _take(self, loss: float | None, weight: float) -> None:
        self._told += 1
        self._weight += weight
        self._loss = add_loss(self._loss, math.nan if loss is None else loss, weight, weight > 0, self._options, select)

    def _go_on(self, result: StepResult) -> None:
        """No window has closed. What was told must be all that the open one holds; an empty one begins anew."""
        self._told_last = self._told_last if result.closed else None
        if not result.micro_step:
            self._begin()
        elif self._told != result.micro_step:
            self._complete = False
        elif self._told == 1:
            self._complete = True

    def _end(self, result: StepResult) -> ClosedWindow:
        complete, told, weight = self._complete and self._told > 0, self._told, self._weight
        loss = window_loss(self._loss, initial_state()._replace(weight=weight), self._options, select)
        self._begin()
        if not complete:
            return self._listeners.note(result)
        if result.overflow:
            return self._listeners.note(result, micro_batches=told)
        known = None if math.isnan(loss) else loss
        return self._listeners.note(result, weight=weight, micro_batches=told, loss=known)

    def _begin(self) -> None:
        self._told, self._weight, self._loss, self._complete = 0, 0.0, 0.0, True


def _in_numbers(result: object) -> StepResult:
    """`result` in Python numbers."""
    if not isinstance(result, StepResult):
        fix = "Write watch(opt.result), or in JAX watch(gradaccum_jax.result(state))."
        raise explain(ArgumentTypeError, "result", expected="a StepResult", found=f"a {type(result).__name__}", fix=fix)
    applied, skipped, overflow, grad_norm, loss_scale, micro_step, optimizer_step, loss, noise_scale = result
    try:
        flags, floats = (bool(applied), bool(skipped), bool(overflow)), (float(grad_norm), float(loss_scale))
        return StepResult(*flags, *floats, int(micro_step), int(optimizer_step), float(loss), float(noise_scale))
    except (TypeError, ValueError) as error:
        expected, found = "scalars whose values are known on the host", "others"
        fix = (
            "Call it after the compiled step, with what that returned; inside one, hand it to a host callback such as jax.debug.callback. "
            "Of several models side by side, watch each one's result."
        )
        raise explain(ArgumentTypeError, "result", expected=expected, found=found, fix=fix) from error


def _number(name: str, value: SupportsFloat) -> float:
    """`value` as a float; NaN is one."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        fix = "Give one number per micro-batch, such as the mean over its items."
        raise explain(
            ArgumentTypeError, name, expected="a number, or an array of one", found=f"a {type(value).__name__}", fix=fix
        ) from error
