"""One update at the end of a window: it is made, or the window is as it was, or what is between the two is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.attempt import Attempt
from gradaccum_torch.fused import can_divide, run_dividing
from gradaccum_torch.masters import Parameters
from gradaccum_torch.strategies import Strategy
from gradaccum_torch.sums import same


class Update:
    """The updates of one wrapped optimizer, one after the other.

    Args:
        inner: the optimizer that makes them.
        parameters: what it works on.
    """

    def __init__(self, inner: torch.optim.Optimizer, parameters: Parameters) -> None:
        self._inner, self._parameters = inner, parameters
        self._attempt: Attempt | None = None
        self.half_made = False
        """One raised when it had written a part: neither the old state nor the new one is there."""

    def make(
        self,
        run: Callable[[], Any],
        strategy: Strategy,
        divisor: float,
        unclipped: float,
        norms: list[torch.Tensor] | None,
        end: Callable[[], None],
    ) -> None:
        """Make the update, and then `end` the window.

        Args:
            run: runs the hooks and, through `run_inner`, the inner optimizer.
            strategy: has the sum.
            divisor: of the sum.
            unclipped: the divisor without clipping.
            norms: of the sum, if a kernel may divide it, unseen by anyone; else None.
            end: counts the window and frees the sum.
        """
        idle = _unknown
        with self._parameters.masters_in_place():
            if norms is not None and can_divide(self._inner, divisor):
                if divisor != 1:
                    idle = partial(_undivided, norms, strategy)
                run, divisor, unclipped = partial(run_dividing, self._inner, divisor, run), 1.0, 1.0
            with self._attempting(idle) as attempt:
                self._make(attempt, run, strategy, divisor, unclipped, end)

    @contextmanager
    def counting(self, count: Callable[[], None]) -> Iterator[None]:
        """An update with a closure runs in this context; it counts once it is made, whatever raises then."""
        with self._attempting(_unknown) as attempt:
            try:
                yield
            finally:
                if attempt.made:
                    count()

    def run_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inner optimizer's ``step``."""
        assert self._attempt is not None
        return self._attempt.run(args, kwargs)

    def _make(
        self,
        attempt: Attempt,
        run: Callable[[], Any],
        strategy: Strategy,
        divisor: float,
        unclipped: float,
        end: Callable[[], None],
    ) -> None:
        try:
            strategy.hand_over(divisor, unclipped)
            attempt.handed_over()
            run()
        except BaseException:
            self._settle(attempt, strategy, divisor, end)
            raise
        end()

    def _settle(self, attempt: Attempt, strategy: Strategy, divisor: float, end: Callable[[], None]) -> None:
        """Something raised: the window ends if the update was made, and is as it was if it was not begun."""
        if attempt.made:
            self._parameters.round()
            end()
        elif attempt.begun():
            self.half_made = True
        else:
            changed = attempt.gradients_changed()
            strategy.take_back(divisor)
            strategy.sentinels.arrivals.disturbed = changed

    @contextmanager
    def _attempting(self, idle: Callable[[], bool]) -> Iterator[Attempt]:
        self._attempt = attempt = Attempt(self._inner, idle)
        try:
            yield attempt
        finally:
            self._attempt = None


def through(action: Callable[[], None]) -> None:
    """Run `action`, which can be run twice; what interrupts it is raised when it has been run whole."""
    try:
        action()
    except BaseException:
        action()
        raise


def half_made() -> UsageError:
    """The error for going on after an inner optimizer that raised in the midst of its update."""
    return explain(
        UsageError,
        "optimizer",
        expected="an update that was made or was not",
        found="an inner optimizer whose step raised when it had written a part of its parameters or of its state",
        fix="Load the last checkpoint. To go on from what is there, which holds a part of the update, call opt.discard().",
    )


def _unknown() -> bool:
    return False


def _undivided(norms: list[torch.Tensor], strategy: Strategy) -> bool:
    """Whether the sums still have these norms, so that no kernel has divided them."""
    return same(norms, strategy.measure().norms)
