"""`Watch`: listeners for a loop that reads its `gradaccum.StepResult` itself, as JAX's
loops do.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, SupportsFloat

from gradaccum.errors import ArgumentTypeError, explain, require_weight
from gradaccum.options import make_options
from gradaccum.state import StepResult, initial_state
from gradaccum.statistics import add_loss, window_loss
from gradaccum.transitions import select

# What a listener hears of a window: Python numbers, so that it needs no framework. What
# nobody told is NaN.


class ClosedWindow(NamedTuple):
    """One window, after its end. The flags and the norm are those of its
    `gradaccum.StepResult`.
    """

    optimizer_step: int
    """Updates applied since the start, this window's included: the same number again if
    the window was skipped.
    """
    applied: bool
    """It closed with an update."""
    skipped: bool
    """It closed without one (overflow, norm above `skip_norm`, or no weight)."""
    overflow: bool
    """It held a non-finite gradient."""
    grad_norm: float
    """Global 2-norm of its true gradient, before clipping; inf if it overflowed, NaN if
    not measured.
    """
    loss_scale: float
    """The scale for the losses of the next window; 1 when unused."""
    weight: float
    """Sum of the weights in it, of all workers where the optimizer knows them."""
    micro_batches: float
    """This worker's micro-batches in it, an int."""
    seconds: float
    """Time on the clock since the window before it closed; for the first one, since
    listening began.
    """
    loss: float = math.nan
    """Its loss as one large batch, if all losses were told: to the optimizer, of all
    workers; to a `Watch`, of this one.
    """


Listener = Callable[[ClosedWindow], object]
"""Called with each closed window; what it returns is dropped."""


# The listeners of one optimizer. A window that closes is only noted (`note`). The
# listeners are told when all about it is settled (`tell`), at the latest as the last
# act of the call that closed it (`settled`), which raises what they raised. So a
# listener that raises cannot lose an update, the scale's move or another worker's part
# in a collective.


_AFTER = (
    "gradaccum: a listener raised this after the window had closed; the update, if one"
    " was due, is made."
)


class Handle:
    """The handle of an added listener; ``remove()`` removes it, as with torch's
    hooks.
    """

    def __init__(self, listeners: dict[int, Listener], key: int) -> None:
        self._listeners, self._key = listeners, key

    def remove(self) -> None:
        """Remove the listener; more than once is harmless."""
        self._listeners.pop(self._key, None)


class Listeners:
    """The listeners in order, and the windows not yet reported. A copy or a pickle has
    none.
    """

    def __init__(self) -> None:
        self.added: dict[int, Listener] = {}
        """The listeners by key; empty, the window need not report."""
        self._keys = itertools.count()
        self._untold: list[ClosedWindow] = []
        self._failures: list[Exception] = []
        self._last_end = 0.0

    def __reduce__(self) -> tuple[type[Listeners], tuple[()]]:
        return Listeners, ()

    def add(self, listener: Listener) -> Handle:
        """Call `listener` with each window that closes from now on.

        Raises:
            ArgumentTypeError: it cannot be called.
        """
        _require_callable(
            "listener",
            listener,
            "a function of one ClosedWindow",
            "Write for example opt.add_listener(print).",
        )
        if not self.added:
            self._last_end = time.perf_counter()
        key = next(self._keys)
        self.added[key] = listener
        return Handle(self.added, key)

    def on_update(self, function: Callable[[], object]) -> Handle:
        """Call `function`, without arguments, after each window that closes with an
        update.

        Raises:
            ArgumentTypeError: it cannot be called.
        """
        fix = "Write for example opt.on_update(lambda: ema.update_parameters(model))."
        _require_callable("function", function, "a function without arguments", fix)

        def call_if_applied(window: ClosedWindow) -> None:
            if window.applied:
                function()

        return self.add(call_if_applied)

    def note(
        self,
        result: StepResult,
        *,
        weight: float = math.nan,
        micro_batches: float = math.nan,
        loss: float | None = None,
    ) -> ClosedWindow:
        """Record a closed window from its `result`, in Python numbers; `loss` replaces
        the result's if given.
        """
        now = time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        loss = float(result.loss) if loss is None else loss
        said = (
            result.optimizer_step,
            result.applied,
            result.skipped,
            result.overflow,
            result.grad_norm,
            result.loss_scale,
        )
        window = ClosedWindow(*said, weight, micro_batches, seconds, loss)
        self._untold.append(window)
        return window

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Report the windows that closed inside the block at its end. An error of the
        block comes before a listener's.
        """
        try:
            yield
        except BaseException as error:
            for failure in self._told():
                error.add_note(f"gradaccum: a listener raised as well: {failure!r}")
            raise
        _raise(self._told())

    def tell(self) -> None:
        """Call every listener with every window not yet reported; `settled` raises what
        they raise.

        A call that closes several windows reports each before the next, as a listener
        may move a schedule.
        """
        untold, self._untold = self._untold, []
        calls = [
            (listener, window) for window in untold for listener in self.added.values()
        ]
        self._failures += [
            failure
            for listener, window in calls
            if (failure := _failure(listener, window)) is not None
        ]

    def _told(self) -> list[Exception]:
        self.tell()
        failures, self._failures = self._failures, []
        return failures


def _require_callable(argument: str, function: object, expected: str, fix: str) -> None:
    if not callable(function):
        raise explain(
            ArgumentTypeError, argument, expected=expected, got=function, fix=fix
        )


def _failure(listener: Listener, window: ClosedWindow) -> Exception | None:
    try:
        listener(window)
    except Exception as failure:
        return failure
    return None


def _raise(failures: list[Exception]) -> None:
    if failures:
        first, *others = failures
        first.add_note(_AFTER)
        for other in others:
            first.add_note(f"gradaccum: another listener raised {other!r}")
        raise first


class Watch:
    """Call it with the result of every micro-batch, flush and discard; it calls
    `listeners` after each closed window.

        watch = gradaccum.Watch(gradaccum.watching.JsonLines("windows.jsonl"))
        ...
        # After each step; in JAX gradaccum_jax.result(state).
        watch(opt.result, loss=loss)

    Args:
        listeners: functions of one `gradaccum.watching.ClosedWindow`.
        reduction: as that of `gradaccum.wrap`; combines the losses of a window.

    Raises:
        ArgumentTypeError, ArgumentValueError: a listener cannot be called; no such
            reduction.
    """

    def __init__(self, *listeners: Listener, reduction: str = "mean") -> None:
        self._options = make_options(None, reduction=reduction)
        self._told, self._weight, self._loss = 0, 0.0, 0.0
        self._complete = False
        """All micro-batches of the open window were told. Before the first result it
        may be open already.
        """
        self._listeners = Listeners()
        for listener in listeners:
            self._listeners.add(listener)

    def __call__(
        self,
        result: StepResult,
        *,
        loss: SupportsFloat | None = None,
        weight: SupportsFloat | None = None,
    ) -> ClosedWindow | None:
        """Take in the result of one event, and call the listeners if it closed a
        window.

        Pass `loss` or `weight` with each micro-batch, and neither with a flush or
        discard; the window then has its count, weight and loss. These are NaN if some
        micro-batch passed neither, and in a first window that closes with the first
        result, since it may have been resumed. After an overflow the weight is NaN. A
        loss that was passed to the optimizer is in the result already.

        Args:
            result: of the event, in Python numbers or scalars of the framework.
            loss: the micro-batch's, not scaled; a number or a scalar of the framework.
            weight: the weight passed to the optimizer, default 1.

        Returns:
            The window that closed; None if none did.

        Raises:
            ArgumentTypeError, ArgumentValueError: an argument is not as above.
            Exception: what a listener raised, after all of them were called.
        """
        known = _in_numbers(result)
        counted = (
            None if weight is None else require_weight(float(_number("weight", weight)))
        )
        value = None if loss is None else _number("loss", loss)
        if loss is not None or weight is not None:
            self._take(value, 1.0 if counted is None else counted)
        with self._listeners.settled():
            if known.closed:
                return self._end(known)
        self._go_on(known)
        return None

    def _take(self, loss: float | None, weight: float) -> None:
        self._told += 1
        self._weight += weight
        self._loss = add_loss(
            self._loss,
            math.nan if loss is None else loss,
            weight,
            weight > 0,
            self._options,
            select,
        )

    def _go_on(self, result: StepResult) -> None:
        if not result.micro_step:
            self._begin()
        elif self._told != result.micro_step:
            self._complete = False
        elif self._told == 1:
            self._complete = True

    def _end(self, result: StepResult) -> ClosedWindow:
        complete, told, weight = (
            self._complete and self._told > 0,
            self._told,
            self._weight,
        )
        loss = window_loss(
            self._loss, initial_state()._replace(weight=weight), self._options, select
        )
        self._begin()
        if not complete:
            return self._listeners.note(result)
        if result.overflow:
            return self._listeners.note(result, micro_batches=told)
        known = None if math.isnan(loss) else loss
        return self._listeners.note(
            result, weight=weight, micro_batches=told, loss=known
        )

    def _begin(self) -> None:
        self._told, self._weight, self._loss, self._complete = 0, 0.0, 0.0, True


def _in_numbers(result: object) -> StepResult:
    if not isinstance(result, StepResult):
        fix = "Write watch(opt.result), or in JAX watch(gradaccum_jax.result(state))."
        raise explain(
            ArgumentTypeError,
            "result",
            expected="a StepResult",
            found=f"a {type(result).__name__}",
            fix=fix,
        )
    (
        applied,
        skipped,
        overflow,
        grad_norm,
        loss_scale,
        micro_step,
        optimizer_step,
        loss,
    ) = result
    try:
        flags, floats = (
            (bool(applied), bool(skipped), bool(overflow)),
            (float(grad_norm), float(loss_scale)),
        )
        return StepResult(
            *flags,
            *floats,
            int(micro_step),
            int(optimizer_step),
            float(loss),
        )
    except (TypeError, ValueError) as error:
        expected, found = "scalars whose values are known on the host", "others"
        fix = (
            "Call it after the compiled step, with what that returned; inside one, hand"
            " it to a host callback such as jax.debug.callback. Of several models side"
            " by side, watch each one's result."
        )
        raise explain(
            ArgumentTypeError, "result", expected=expected, found=found, fix=fix
        ) from error


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        fix = "Give one number per micro-batch, such as the mean over its items."
        found = f"a {type(value).__name__}"
        raise explain(
            ArgumentTypeError,
            name,
            expected="a number, or an array of one",
            found=found,
            fix=fix,
        ) from error
