"""The open window of one optimizer. It counts micro-batches, and applies the update
when the window is full.

`gradaccum.kit` decides when a window ends, what number the gradient sum is divided by,
and whether the update is applied. This module adds up the gradients, computes the norm
of the sum, divides the sum and runs the inner optimizer. If a call raises an error,
either nothing has changed, or `Update.is_broken` remains set. While this flag is set,
the window accepts no micro-batch and cannot be closed or saved. ``discard`` and
``load_state_dict`` clear the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from gradaccum import StepResult, UsageError, kit
from gradaccum.kit import Decision, Options, ScaleRule, State, select
from gradaccum_torch import checks
from gradaccum_torch.arithmetic import (
    complete,
    fits,
    gradient_dtype,
    measure,
    sum_dtype,
)
from gradaccum_torch.checks import Size, known_window_size, window_size
from gradaccum_torch.extensions import (
    WEIGHED_TWICE,
    ChangedRateWarning,
    DividedLossWarning,
    Extension,
    LeftoverLoopWarning,
    MicroBatch,
    NonFiniteLossWarning,
    Warnings,
    WindowLoss,
    as_number,
)
from gradaccum_torch.grad_scaler import ScalerLink, scaler_rule
from gradaccum_torch.gradient_sum import Gradients, GradientSum, make_gradient_sum
from gradaccum_torch.gradient_watch import FACTORS, PASSES, GradientWatch
from gradaccum_torch.master_weights import MasterWeights
from gradaccum_torch.torch_private.names import is_scaled_by
from gradaccum_torch.update import Update
from gradaccum_torch.workers.interface import Workers

NO_EVENT = (False, False, False)
"""The `applied`, `skipped` and `overflow` flags of a call that has closed no window."""


class Scheduler(Protocol):
    """A learning-rate scheduler that steps once per update."""

    def is_called_each_time(self) -> bool:
        """True if the scheduler was called after the last micro-batch and after the
        micro-batch before it.
        """

    def is_called_at_updates(self) -> bool:
        """True if the scheduler was called after each micro-batch or after each
        update.
        """

    def follow(self) -> None:
        """Step the scheduler if the optimizer has applied an update since the
        scheduler's last step.
        """

    def optimizer_loaded(self) -> None:
        """Called after the optimizer has loaded a state. If the scheduler has just
        loaded its own state too, continue from the number of updates in that state.
        Otherwise, step only for updates that are applied from now on.
        """


class Window:
    """The open window of one wrapped optimizer: its count of micro-batches, its weight,
    its loss scale and its sum of gradients.

    The counters are Python numbers, so that counting a micro-batch does not wait for
    the device.
    """

    def __init__(
        self,
        masters: MasterWeights,
        options: Options,
        update: Update,
        scaler: ScalerLink | None,
        workers: Workers,
    ) -> None:
        self.masters = masters
        self.options = options
        self.update = update
        self.scaler = scaler
        self.workers = workers
        self.watch = GradientWatch(self)
        self.listeners = kit.Listeners()
        self.schedulers: WeakSet[Scheduler] = WeakSet()
        """The learning-rate schedulers that step once per update."""
        self.sizes = kit.Sizes(options.reduction)
        self.warn = Warnings()
        self.window_loss = WindowLoss(options)
        self.changed_rate_warning = ChangedRateWarning(masters.inner, self.warn)
        self.divided_loss_warning = DividedLossWarning(options, self.warn)
        self.extensions: list[Extension] = [
            self.window_loss,
            self.changed_rate_warning,
            LeftoverLoopWarning(self.warn),
            self.divided_loss_warning,
        ]
        if workers.is_shared:
            self.extensions.append(
                NonFiniteLossWarning(self.window_loss, workers.place, self.warn)
            )
        self.use_of_weights = kit.use_of_weights(options)
        self.measures = kit.measures(options)
        """Whether closing a window requires the norm of its gradient."""
        self.has_scale = options.scale_rule != ScaleRule()
        self.size: Size = None
        """The number of micro-batches, or the weight, at which the open window ends. It
        is determined when the window begins.
        """
        self.micro_batch = MicroBatch()
        self.passes_before = PASSES[0]
        """The value of the counter `PASSES` when this optimizer last counted a
        micro-batch. `PASSES` counts the backward passes of all wrapped optimizers. If
        the counter is higher now, a backward pass has begun since then.
        """
        self.expects_one_pass = False
        """Whether the next micro-batch is expected to have a single backward pass,
        because the last micro-batch with a backward pass had only one.
        """
        self.last_event = NO_EVENT
        """The `applied`, `skipped` and `overflow` flags of the last ``step``, ``flush``
        or ``discard``.
        """
        self.grad_norm = 0.0
        """The gradient norm of the last window."""
        self.is_reduced = False
        """Whether the workers have already reduced the open window's gradients, so that
        the update only has to be applied or skipped.
        """
        self.has_just_loaded = False
        """Whether a state has been loaded and no micro-batch has been counted since
        then.
        """
        self.gradient_sum = GradientSum(masters.parameters, self.watch)
        self.state = kit.initial_state(options.scale_rule.init_scale)
        self.parameters_changed()
        self.state = self.at_rest(self.state)

    @property
    def result(self) -> StepResult:
        state = self.state
        return StepResult(
            *self.last_event,
            self.grad_norm,
            state.loss_scale,
            state.micro_step,
            state.optimizer_step,
            self.window_loss.value,
        )

    @property
    def updates(self) -> int:
        return int(self.state.optimizer_step)

    def is_under_way(self) -> bool:
        """True if a window is open, or if the first micro-batch of the next window has
        begun.
        """
        return bool(self.state.micro_step or self.micro_batch.has_loss) or (
            self.has_new_gradient and not self.options.separate_sums
        )

    @property
    def has_new_gradient(self) -> bool:
        """True if a backward pass has added a gradient since the last step."""
        return bool(self.watch.factors)

    @property
    def holds_sum_in_grad(self) -> bool:
        """True if ``.grad`` contains at least a part of the open window's sum."""
        return self.state.micro_step > 0 and not self.gradient_sum.is_beside_grad

    def current_state(self) -> State:
        """Return the window's state. If no window is open and the loss scale comes from
        a `torch.amp.GradScaler`, this method reads the scale from the scaler, and waits
        for the device.
        """
        if self.scaler is not None and not self.state.micro_step:
            self.state = self.at_rest(self.scaler.with_scale(self.state))
        return self.state

    def current_size(self) -> Size:
        if self.state.micro_step:
            return self.size
        return known_window_size(self.options, self.updates)

    def at_rest(self, state: Any) -> State:
        return kit.at_rest(state, float64_weight=self.has_float64)

    def parameters_changed(self) -> None:
        """Called after the parameters have changed. Decide again whether the gradients
        are summed in ``.grad`` or in separate buffers. The sum keeps its value.
        """
        self.masters.groups_changed()
        parameters = self.masters.parameters()
        self.parameter_marks = parameter_marks(parameters)
        accumulate_dtype = self.options.accumulate_dtype
        self.sum_dtypes = [
            sum_dtype(parameter, accumulate_dtype) for parameter in parameters
        ]
        self.has_float64 = torch.float64 in self.sum_dtypes
        self.largest_number = kit.largest_number(float64_weight=self.has_float64)
        self.changed_rate_warning.allow_change()
        self.watch.follow(parameters)
        if type(self.gradient_sum) is GradientSum:
            make = self.workers.make_gradient_sum or make_gradient_sum
            gradient_sum = make(self.masters.parameters, self.watch, self.options)
            if self.state.micro_step and type(gradient_sum) is not GradientSum:
                self._move_sum(gradient_sum)
            self.gradient_sum = gradient_sum
        self.expect_window()

    def _move_sum(self, new_sum: GradientSum) -> None:
        """Move the gradient sum from ``.grad`` into `new_sum`, including the gradients
        of an unfinished micro-batch.
        """
        factors = set(self.watch.factors)
        was_changed = not self.watch.is_intact()
        sums = self.gradient_sum.gradients()
        for parameter, total in sums.items():
            dtype = sum_dtype(parameter, self.options.accumulate_dtype)
            sums[parameter] = total.to(dtype)
        self.gradient_sum.clear()
        new_sum.replace(sums)
        self.watch.factors.update(factors)
        self.watch.was_changed = was_changed

    def expect_window(self) -> None:
        if self.gradient_sum.expects_windows:
            self.gradient_sum.expect_window(self.current_size())

    def weight(self) -> float:
        """Return the weight of the current micro-batch."""
        weight = self.micro_batch.weight
        if weight is not None:
            return weight
        return float(kit.given_weight(None, self.use_of_weights))

    def factor(self, weight: float) -> float:
        """Return the factor by which the gradients of a micro-batch with weight
        `weight` are multiplied. The factor is the loss scale or, with
        ``reduction="mean"``, the loss scale times `weight`. If `weight` is 0 and the
        micro-batch has a loss, the factor is 0.
        """
        if not weight and self.micro_batch.has_loss:
            return 0.0
        return float(kit.contribution(weight, self.options) * self.state.loss_scale)

    def weigh(self, weight: float) -> None:
        micro_batch = self.micro_batch
        micro_batch.set_weight(weight)
        if micro_batch.is_weighed and (micro_batch.has_loss or self.has_new_gradient):
            self.warn(WEIGHED_TWICE)
        micro_batch.is_weighed = True

    def backward(
        self, loss: Tensor, weight: float | None, arguments: Mapping[str, Any]
    ) -> None:
        """Run the backward pass of `loss`, a tensor of shape ``()``. The gradients are
        multiplied by the loss scale and, with ``reduction="mean"``, by the weight. With
        weight 0, run the backward pass only if other workers are waiting for it.
        """
        self._require_usable("backward()")
        if self.workers.is_reducing:
            raise checks.unfinished_error("backward()")
        micro_batch = self.micro_batch
        is_weighed = weight is not None
        weight = self.weight() if weight is None else weight
        micro_batch.require_same_weight(weight)
        if is_weighed and micro_batch.is_weighed and micro_batch.has_loss:
            self.warn(WEIGHED_TWICE)
        self._loss_given(loss)
        if weight:
            self.current_state()
            factor = self.factor(weight)
            with self._last_pass():
                self._run_backward(loss, factor, with_factor(loss, factor, arguments))
            gradient = arguments.get("gradient")
            shown_loss = loss if gradient is None else loss.detach() * gradient
            micro_batch.losses.append(as_number(shown_loss))
        else:
            weightless_pass = self.workers.weightless_pass()
            if weightless_pass is not None:
                with self._last_pass(), weightless_pass:
                    self._run_backward(loss, 0.0, arguments)
        micro_batch.weight = weight
        micro_batch.has_loss = True
        micro_batch.is_weighed = micro_batch.is_weighed or is_weighed

    def _loss_given(self, loss: Tensor) -> None:
        """Check a loss that the user has passed, before its backward pass."""
        if self.scaler is not None and is_scaled_by(self.scaler.scaler, loss):
            raise UsageError(
                "loss: expected an unscaled loss, because gradaccum itself scales the"
                " loss with the scaler that was passed as loss_scale=; got"
                " scaler.scale(loss). Pass the loss itself: opt.backward(loss)."
            )
        self.divided_loss_warning.loss_given(loss, self.micro_batch)

    def _last_pass(self) -> AbstractContextManager[object]:
        """Return a context for a backward pass. If the current micro-batch is known to
        be the last one of its window, the workers may begin to reduce gradients during
        this pass.
        """
        if (
            not self.workers.is_shared
            or self.state.micro_step + 1 != self.current_size()
        ):
            return nullcontext()
        is_only_pass = self.expects_one_pass and not self.has_new_gradient
        return self.workers.last_pass(self.gradient_sum, is_only_pass)

    def _run_backward(
        self, loss: Tensor, factor: float, arguments: Mapping[str, Any]
    ) -> None:
        FACTORS.append(factor)
        try:
            loss.backward(**arguments)  # type: ignore[no-untyped-call]
        except BaseException:
            if self.workers.is_reducing:
                # Mark the window as broken, because the sums of all workers already
                # include gradients that this worker computed before the error.
                self.update.is_broken = True
            elif self.has_new_gradient:
                # Set `is_running` again, because the inner pass of a reentrant
                # checkpoint may have cleared it before the outer pass raised the error.
                self.watch.is_running = True
            raise
        finally:
            FACTORS.pop()

    def scale(self, loss: Tensor) -> Tensor:
        micro_batch = self.micro_batch
        weight = self.weight()
        self._loss_given(loss)
        micro_batch.set_weight(weight)
        micro_batch.is_scaled_by_hand = True
        micro_batch.has_loss = True
        micro_batch.losses.append(as_number(loss))
        self.current_state()
        factor = self.factor(weight)
        if factor == 1:
            return loss
        # Enable gradients, because this method must work inside torch.no_grad(), as
        # loss.backward() does.
        with torch.enable_grad():
            return loss * factor

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run the `closure` that was passed to ``step``. Record the loss that `closure`
        returns, unless the micro-batch already had a loss or a gradient.
        """
        had_gradient = self.has_new_gradient
        # Enable gradients, because the user may call step() inside torch.no_grad().
        with torch.enable_grad():
            loss = closure()
        micro_batch = self.micro_batch
        if not micro_batch.has_loss:
            if loss is None and not self.has_new_gradient and not self._holds_users():
                # A trainer's closure may return None, which means that the micro-batch
                # is skipped.
                micro_batch.set_weight(0.0)
                micro_batch.is_weighed = True
                micro_batch.has_loss = True
            is_known = loss is not None and not had_gradient
            micro_batch.losses = [as_number(loss)] if is_known else []
        return loss

    def add_micro_batch(self) -> bool:
        """Count the micro-batch whose gradient is in ``.grad``. Return True if the
        window is full.

        Raises:
            UsageError: there was no backward pass, or other code has changed ``.grad``.
                The window is unchanged.
        """
        self._require_usable("step()")
        micro_batch = self.micro_batch
        watch = self.watch
        state = self.current_state()
        if not state.micro_step:
            self.size = window_size(self.options, state.optimizer_step)
        weight = self.weight()
        self._require_right_gradient(weight)
        if not state.micro_step:
            # Compare the parameters with an earlier record, because nothing notifies
            # this object when a parameter is cast, frozen or replaced.
            marks = parameter_marks(self.masters.parameters())
            if marks != self.parameter_marks:
                self.parameters_changed()
        is_own_pass_expected = (
            micro_batch.has_loss and not micro_batch.is_scaled_by_hand
        )
        if is_own_pass_expected and watch.has_plain_pass:
            micro_batch.losses = []  # The loss of the plain pass is not known.
        micro_batch.is_first = not state.micro_step
        micro_batch.passes = watch.passes
        micro_batch.window_size = self.size
        if watch.engine_passes:
            self.expects_one_pass = watch.engine_passes == 1
        is_finite = self.gradient_sum.add_micro_batch(self.update)
        self.update.is_broken = True
        added_weight = weight if kit.usable(state, weight, is_finite) else 0.0
        self.state = self.at_rest(kit.accumulate(state, weight, is_finite, select))
        self.last_event = (False, False, not is_finite)
        self.sizes.weighed = micro_batch.is_weighed
        self.sizes.weight = micro_batch.weight
        self.has_just_loaded = False
        self.passes_before = PASSES[0]
        self._forget_micro_batch()
        for extension in self.extensions:
            extension.micro_batch_added(micro_batch, added_weight)
        self.update.is_broken = False
        return bool(kit.ends(self.state, self.size, select))

    def _forget_micro_batch(self) -> None:
        self.micro_batch = MicroBatch()
        self.watch.micro_batch_ended()

    def _require_right_gradient(self, weight: float) -> None:
        """Raise if ``.grad`` contains anything other than what this window's backward
        passes have accumulated, or if a loss was multiplied by the wrong factor.
        """
        watch = self.watch
        if watch.is_running:
            raise checks.interrupted_error()
        factors = watch.factors
        if self.options.separate_sums:
            # Ignore factors of the loss other than 1, because they may come from
            # another wrapped optimizer's backward pass, whose gradients the user has
            # cleared.
            factors = factors & {1.0}
        if not (factors or self._has_begun()):
            raise checks.no_backward_error()
        if not self.micro_batch.is_scaled_by_hand:
            self._require_right_factors(factors, weight)
        if not (self.options.separate_sums or watch.is_intact()):
            # If the window has only one micro-batch, the user may modify ``.grad``, as
            # they could in a loop without gradaccum.
            is_unscaled = self.factor(weight) == 1
            is_users = self.size == 1 and is_unscaled and not self.workers.is_reducing
            if not is_users:
                raise checks.changed_gradients_error()
            # The changed values are now the window's sum. The user's loop changes .grad
            # after the backward pass, so the next window must not begin its reduction
            # during the backward pass.
            watch.reset()

    def _require_right_factors(self, factors: set[float], weight: float) -> None:
        """Raise if a gradient was not multiplied by the loss scale and, with
        ``reduction="mean"``, by `weight`.

        - `factors`: the factors by which the losses of the micro-batch's backward
          passes were multiplied. With ``separate_sums``, only the factor 1 is included,
          because a pass with another factor may belong to another wrapped optimizer.
        """
        has_loss = self.micro_batch.has_loss
        right_factors = {self.factor(weight)}
        if self.scaler is not None and self.scaler.stepping_optimizer is not None:
            # The loss of a plain backward pass was multiplied by scaler.scale, but not
            # by the weight.
            if kit.contribution(weight, self.options) == 1:
                right_factors.add(1.0)
            elif 1.0 in factors - right_factors:
                raise checks.not_weighed_error(weight)
        elif self.has_scale and not has_loss:
            raise checks.not_scaled_error()
        if factors - right_factors:
            raise checks.not_scaled_error()
        if has_loss or factors or not self.options.separate_sums:
            return
        # The micro-batch has no backward pass of its own. Its gradients come from
        # another wrapped optimizer's backward pass, or the user has computed them.
        other_factors = self.watch.factors
        if other_factors:
            if other_factors - right_factors and self._holds_users():
                raise checks.not_scaled_error()
        elif 1.0 not in right_factors and self._holds_users():
            raise checks.not_weighed_error(weight)

    def _has_begun(self) -> bool:
        """True if a micro-batch has begun, even if it has no gradient yet."""
        return (
            self.micro_batch.has_loss
            or self.micro_batch.is_weighed
            or PASSES[0] != self.passes_before
            or self.watch.was_changed
            or self._holds_users()
        )

    def _holds_users(self) -> bool:
        """True if the user has put a gradient into ``.grad``."""
        return self.watch.holds_other_gradients(
            self.masters.parameters(), is_separate=not self.holds_sum_in_grad
        )

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear ``.grad`` if it contains no part of the sum."""
        if self.workers.is_reducing:
            raise checks.unfinished_error("zero_grad()")
        if self.holds_sum_in_grad:
            if self.watch.is_running:
                raise checks.interrupted_error()
            if self.has_new_gradient:
                raise checks.unfinished_error("zero_grad()")
            return
        micro_batch = self.micro_batch
        parameters = self.masters.parameters()
        had_gradient = [
            parameter for parameter in parameters if parameter.grad is not None
        ]
        if had_gradient or self.watch.has_seen_anything:
            if self.state.micro_step:  # Keep the window's sum.
                for parameter in parameters:
                    parameter.grad = None
                self.watch.reset()
            else:
                self.gradient_sum.clear()
        self.micro_batch = MicroBatch()
        weight = micro_batch.weight
        if weight is not None and micro_batch.is_weighed and not micro_batch.has_loss:
            self.weigh(weight)
        if not set_to_none:
            # Leave zeros in ``.grad``, so that the next update still applies momentum
            # and weight decay.
            ids = set(map(id, [*had_gradient, *self.update.updated_parameters]))
            for parameter in parameters:
                if id(parameter) in ids:
                    dtype = gradient_dtype(parameter)
                    parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            self.watch.reset()

    def close(self, denominator: float | None = None) -> None:
        """Apply or skip the window's update, and begin the next window."""
        if self.scaler is not None and self.state.micro_step:
            self.scaler.require_unmoved(self.state)
        if self.workers.is_shared and not self.is_reduced and not self._reduce():
            return
        state: Any = self.state
        options = self.options
        if denominator is not None:
            state, options = kit.with_denominator(state, denominator, options, select)
        sums = self._complete_sums()
        decision = self._decide(sums, state, options)
        self.update.is_made = False
        self.update.is_broken = True
        try:
            if decision.apply:
                self._make_update(sums, decision.divisor)
        finally:
            if self.update.is_made or not decision.apply:
                self._finish(decision, state, options)

    def _complete_sums(self) -> Gradients:
        """Return the window's gradient sums. Sparse sums are coalesced, and `DTensor`
        sums with partial placements are reduced over the processes.
        """
        sums = self.gradient_sum.gradients()
        for parameter, total in sums.items():
            if type(total) is not Tensor or total.is_sparse:
                sums[parameter] = complete(total)
        return sums

    def _reduce(self, parameters: list[Tensor] | None = None) -> bool:
        """Add up the weights and gradient sums of all workers. If `parameters` is
        passed, include only the gradient sums of these parameters. Return False if no
        worker has an open window.
        """
        numbers = self._numbers()
        window = self.workers.all_reduce(
            self.state, self.gradient_sum, [*chain(*numbers)], self.update, parameters
        )
        self.gradient_sum.replace(window.gradients)
        if window.is_open:
            if parameters is None:
                added_numbers = iter(window.numbers)
                for extension, worker_numbers in zip(
                    self.extensions, numbers, strict=True
                ):
                    extension.reduced([next(added_numbers) for _ in worker_numbers])
            state = kit.joined(self.state, window.weight, window.overflow)
            self.state = self.at_rest(state)
            self.is_reduced = True
        self.update.is_broken = False
        return window.is_open

    def _numbers(self) -> list[list[float]]:
        return [extension.numbers() for extension in self.extensions]

    def _decide(self, sums: Gradients, state: Any, options: Options) -> Decision:
        norm = float("nan")
        is_finite = True
        if self.measures:
            divisor = kit.divisor(state, options, select)
            norm, is_finite = self.workers.norm(
                state, sums, lambda part: self._measure(part, divisor)
            )
        return Decision(
            *kit.decide(state, norm, is_finite, options, select, self.largest_number)
        )

    def _measure(self, sums: Gradients, divisor: float) -> tuple[float, bool]:
        """Return the norm of the gradient sums, and whether the sums divided by
        `divisor` are finite in the dtype of the inner optimizer's parameters.
        """
        norm, is_finite = measure(sums.values())
        return norm, is_finite and self._fits(sums, norm, divisor)

    def _fits(self, sums: Gradients, norm: float, divisor: float) -> bool:
        for parameter, total in sums.items():
            dtype = gradient_dtype(self.masters.worked_on(parameter))
            if total.dtype is dtype or norm / divisor <= torch.finfo(dtype).max:
                continue  # No element exceeds the norm.
            if not fits(total, divisor, dtype):
                return False
        return True

    def _make_update(self, sums: Gradients, divisor: float) -> None:
        self.gradient_sum.prepare_update(sums)
        self.update.make(sums, divisor)

    def _finish(self, decision: Decision, state: Any, divided_by: Options) -> None:
        """Store the result of the closed window, and begin the next window."""
        ended_state = self.state
        options = self.options
        if self.scaler is not None:
            options = options._replace(scale_rule=scaler_rule(self.scaler.scaler))
        closed_state = kit.close(
            ended_state, decision.apply, decision.overflow, options, select
        )
        self.state = self.at_rest(closed_state)
        self.last_event = (decision.apply, not decision.apply, decision.overflow)
        self.grad_norm = decision.grad_norm
        self._forget_sum()
        self.is_reduced = False
        self.workers.window_ended()
        self.watch.compares_norms = False
        self.expect_window()
        if self.scaler is not None:
            self.scaler.window_closed(self.state, decision.overflow)
        for extension in self.extensions:
            extension.window_closed(state, divided_by)
        self.extensions = [each for each in self.extensions if not each.is_finished]
        if self.listeners.added:
            self.listeners.note(
                self.result,
                weight=ended_state.weight,
                micro_batches=ended_state.micro_step,
            )
        self.update.is_broken = False

    def flush(self, schedulers: Sequence[Scheduler], denominator: float | None) -> None:
        """Close the open window. Then take part in the other workers' windows until all
        workers have called ``flush``. Step the `schedulers` between these windows.
        """
        if denominator is not None:
            kit.require_denominator(
                denominator, self.options, several=self.workers.is_shared
            )
        self.update.require_usable()
        micro_step = self.state.micro_step
        if self.watch.is_running and not self.options.separate_sums:
            raise checks.interrupted_error()
        if self.micro_batch.has_loss or self.workers.is_reducing:
            raise checks.unfinished_error("flush()")
        if micro_step and not self.options.separate_sums:
            self._require_counted("flush()")
        self.last_event = NO_EVENT
        self.workers.flush(
            partial(self.close, denominator),
            partial(self._between_windows, schedulers),
            is_open=micro_step > 0,
        )

    def _require_usable(self, call: str) -> None:
        self.update.require_usable()
        if self.is_reduced:
            raise kit.update_due_error(call)

    def _require_counted(self, call: str) -> None:
        """Raise if there was a backward pass, or a change of ``.grad``, since the last
        ``step``.
        """
        if self.micro_batch.has_loss or self.has_new_gradient:
            raise checks.unfinished_error(call)
        if not self.watch.is_intact():
            raise checks.changed_gradients_error()

    def _between_windows(self, schedulers: Sequence[Scheduler]) -> None:
        """Called between two windows that a single ``flush`` closes. Call the listeners
        and step the schedulers here, because this worker's training loop is waiting in
        ``flush`` and cannot do so itself.
        """
        self.listeners.tell()
        for scheduler in schedulers:
            scheduler.follow()

    def discard(self) -> None:
        """Discard the open window and the current micro-batch."""
        self.workers.abandon([*chain(*self._numbers())])
        self._forget_sum()
        self.state = self.at_rest(kit.discard(self.state))
        self.last_event = NO_EVENT
        self._start_anew()
        for extension in self.extensions:
            extension.window_discarded()

    def _forget_sum(self) -> None:
        self.gradient_sum.clear()
        for master in self.masters.masters.values():
            master.grad = None

    def _start_anew(self) -> None:
        self._forget_micro_batch()
        self.is_reduced = False
        self.update.is_broken = False
        self.workers.window_ended()

    def close_part(self, belongs: Callable[[Tensor], bool]) -> None:
        """Update the parameters for which ``belongs(parameter)`` is true. The window
        stays open for all other parameters. All workers must update the same parameters
        in the same order.

        This method is allowed only if no option needs the gradient norm. Clipping and
        the decision to skip an update need the norm over all parameters, but the
        gradients of the other parameters may still be incomplete.
        """
        state = self.state
        sums = self.gradient_sum.gradients()
        part = {key: total for key, total in sums.items() if belongs(key)}
        later = {key: total for key, total in sums.items() if key not in part}
        self.gradient_sum.replace(part)
        parameters = list(filter(belongs, self.masters.parameters()))
        if self.workers.is_shared:
            self._reduce(parameters)
        with self.masters.only(parameters):
            part_sums = self._complete_sums()
            decision = self._decide(part_sums, self.state, self.options)
            if decision.apply:
                self._make_update(part_sums, decision.divisor)
            for parameter in parameters:
                self.masters.worked_on(parameter).grad = None
        self.is_reduced = False
        self.state = state
        self.gradient_sum.replace(later)

    def require_savable(self) -> None:
        self._require_usable("state_dict()")
        if self.watch.is_running and not self.gradient_sum.is_beside_grad:
            raise checks.interrupted_error()
        if self.holds_sum_in_grad:
            self._require_counted("state_dict()")

    def saved_sums(self) -> dict[int, Tensor]:
        """Return the open window's gradient sums, keyed by parameter index. The tensors
        are not copied.
        """
        if not self.state.micro_step:
            return {}
        sums = self.gradient_sum.gradients()
        return {
            index: sums[parameter].detach()
            for index, parameter in enumerate(self.masters.parameters())
            if parameter in sums
        }

    def restore(
        self, state: State, sums: Mapping[int, Tensor], entries: dict[str, Any]
    ) -> None:
        """Restore a saved window. The gradient sums are copied."""
        self.gradient_sum.clear()
        parameters = self.masters.parameters()
        copies = {
            parameters[index]: total.detach().to(parameters[index].device, copy=True)
            for index, total in sums.items()
        }
        self.gradient_sum.replace(copies)
        self.state = self.at_rest(state)
        self.last_event = NO_EVENT
        self.grad_norm = float(entries.get("grad_norm", 0.0))
        self.has_just_loaded = True
        if state.micro_step:
            self.size = window_size(self.options, state.optimizer_step)
        self._start_anew()
        self.expect_window()
        for extension in self.extensions:
            extension.window_discarded()
            extension.load_state_dict(entries)
        if self.scaler is not None:
            self.scaler.write(self.state)


def with_factor(
    loss: Tensor, factor: float, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the keyword arguments that make ``loss.backward`` multiply all gradients
    by `factor`.

    This gives the same bits as ``(loss * factor).backward()``, without the
    multiplication and its backward pass.
    """
    if factor == 1:
        return arguments
    gradient = arguments.get("gradient")
    if gradient is None and factor <= torch.finfo(torch.float16).max:
        return {**arguments, "gradient": torch.full_like(loss, factor)}
    if gradient is None:
        # `torch.full_like` raises an error if the factor is too large for the dtype.
        gradient = torch.ones_like(loss)
    return {**arguments, "gradient": gradient * factor}


def parameter_marks(parameters: list[Tensor]) -> list[tuple[int, torch.dtype, bool]]:
    """Return the id, the dtype and the ``requires_grad`` flag of each parameter. The
    lists from two calls differ if a parameter was replaced, cast, frozen or unfrozen
    between the calls.
    """
    return [
        (id(parameter), parameter.dtype, parameter.requires_grad)
        for parameter in parameters
    ]
