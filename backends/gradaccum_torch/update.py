"""One update at the end of a window. It is made, or the window is as it was. If neither is possible, the next call raises."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain, half_made_error
from gradaccum_torch.attempt import Attempt, StepReturn
from gradaccum_torch.closure import Skipped
from gradaccum_torch.fused import Dividing, can_divide
from gradaccum_torch.hooks import step_post_hooks, step_pre_hooks
from gradaccum_torch.masters import Parameters
from gradaccum_torch.norm import same_norms
from gradaccum_torch.strategy import Strategy


class Update:
    """The updates of one wrapped optimizer, one after the other.

    Args:
        wrapper: the wrapped optimizer, whose step hooks run around each update. It is not kept alive: it owns this object.
        inner: the optimizer that makes the updates.
        parameters: what it works on.
    """

    def __init__(self, wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer, parameters: Parameters) -> None:
        self._wrapper, self._inner, self._parameters = weakref.ref(wrapper), inner, parameters
        self.made = False
        """The last one was made, even if something raised after it."""
        self.half_made = False
        """The last one raised when it had written a part, so that parameters and state are neither the old ones nor the new ones."""

    def make(self, strategy: Strategy, divisor: float, unclipped: float, norms: list[Tensor], strayed: bool) -> None:
        """Run the inner optimizer once on the sum divided by `divisor`.

        If something raises, either `made` is True, or the sum is as it was, or `half_made` is True.

        Args:
            strategy: has the sum.
            divisor: of the sum.
            unclipped: the divisor without clipping.
            norms: of the sum; empty if it was not measured.
            strayed: something else may have written into the model, and the masters must take that over first.
        """
        self.made = False
        if strayed:
            self._parameters.take_over()
        with self._parameters.masters_in_place():
            if self._kernel_can_divide(strategy, divisor):
                # Without norms nothing can show that the kernel has not run.
                idle = _unknown if divisor == 1 or not norms else partial(_undivided, norms, strategy)
                with Dividing(self._inner, divisor):
                    self._attempt(strategy, 1.0, 1.0, idle)
            else:
                self._attempt(strategy, divisor, unclipped, _unknown)

    def make_with(self, closure: Callable[[], Any]) -> StepReturn:
        """Run the inner optimizer with a closure, which puts the gradient into ``.grad`` itself; see `made`.

        If the closure raises `Skipped`, either nothing was written, or `half_made` is True.
        """
        self.made = False
        attempt = Attempt(self._inner)
        try:
            return self._run(attempt, closure)
        except Skipped:
            self.half_made = attempt.moved()
            raise
        finally:
            self.made = attempt.made

    def require_whole(self) -> None:
        """No update was made by half.

        Raises:
            UsageError: the last one was.
        """
        if self.half_made:
            raise half_made_error()

    def _kernel_can_divide(self, strategy: Strategy, divisor: float) -> bool:
        """Whether a fused kernel can divide the sum as it reads it: nothing else reads the sum before."""
        return can_divide(self._inner, divisor) and strategy.hands_over_whole() and not step_pre_hooks(self._owner())

    def _attempt(self, strategy: Strategy, divisor: float, unclipped: float, idle: Callable[[], bool]) -> None:
        attempt = Attempt(self._inner, idle)
        try:
            strategy.hand_over(divisor, unclipped)
            attempt.handed_over()
            self._run(attempt)
            self.made = True
        except BaseException:
            self._settle(attempt, strategy, divisor)
            raise

    def _settle(self, attempt: Attempt, strategy: Strategy, divisor: float) -> None:
        """Something raised. If the update was made, the window ends. If it had not begun, the window is as it was."""
        if attempt.made:
            self._parameters.round()
            self.made = True
        elif attempt.begun():
            self.half_made = True
        else:
            strategy.take_back(divisor, spoiled=attempt.gradients_changed())

    def _run(self, attempt: Attempt, *closure: Callable[[], Any]) -> StepReturn:
        """The inner optimizer's step, between the hooks that were registered on the wrapper; its own hooks it runs itself."""
        wrapper = self._owner()
        args, kwargs = _run_pre_hooks(wrapper, (wrapper, *closure))
        returned = attempt.run(args[1:], kwargs)
        if self._parameters.has_masters:
            self._parameters.round()
        for after in tuple(step_post_hooks(wrapper).values()):
            after(wrapper, args, kwargs)
        return returned

    def _owner(self) -> torch.optim.Optimizer:
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper


def through(action: Callable[[], None]) -> None:
    """Run `action`, which can be run twice; an interrupt is raised when it has been run whole."""
    try:
        action()
    except BaseException:
        action()
        raise


def _run_pre_hooks(wrapper: torch.optim.Optimizer, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the step. As in torch, a hook may return other ones, or None; anything else raises."""
    kwargs: dict[str, Any] = {}
    for before in tuple(step_pre_hooks(wrapper).values()):
        result = before(wrapper, args, kwargs)
        if isinstance(result, tuple) and len(result) == 2:
            args, kwargs = result
        elif result is not None:
            expected, fix = "None, or a tuple of new positional and new keyword arguments", "Return nothing."
            raise explain(UsageError, "step pre-hook", expected=f"to return {expected}", got=result, fix=fix)
    return args, kwargs


def _unknown() -> bool:
    return False


def _undivided(norms: list[Tensor], strategy: Strategy) -> bool:
    """Whether the sums still have these norms, so that no kernel has divided them."""
    return same_norms(norms, strategy.measure().norms)
