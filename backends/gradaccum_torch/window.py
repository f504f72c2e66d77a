"""The open window of one optimizer: it counts micro-batches, and makes the update when
it is full.

`gradaccum.kit` decides: when a window ends, by what its sum is divided, whether an
update is made. This module adds, measures, divides and runs the inner optimizer. A call
raises before anything has changed, or leaves `Update.is_broken` behind, and then every
later call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from gradaccum import StepResult, kit
from gradaccum.kit import Decision, Options, ScaleRule, State, select
from gradaccum_torch import checks
from gradaccum_torch.arithmetic import (
    complete,
    fits,
    gradient_dtype,
    measure,
    sum_dtype,
)
from gradaccum_torch.checks import Size, window_size
from gradaccum_torch.extensions import (
    NON_FINITE_LOSS,
    WEIGHED_TWICE,
    ChangedParametersWarning,
    ChangedRateWarning,
    DividedLossWarning,
    Extension,
    LeftoverLoopWarning,
    MicroBatch,
    NonFiniteLosses,
    Warnings,
    WindowLoss,
    as_number,
    handlers,
)
from gradaccum_torch.grad_scaler import ScalerLink
from gradaccum_torch.gradient_sum import (
    Gradients,
    GradientSum,
    SumInBuffers,
    SumOnArrival,
    make_gradient_sum,
)
from gradaccum_torch.gradient_watch import FACTORS, PASSES, GradientWatch
from gradaccum_torch.master_weights import MasterWeights
from gradaccum_torch.update import Update
from gradaccum_torch.workers.interface import Workers


class Scheduler(Protocol):
    """A scheduler that moves once per update."""

    def follow(self) -> None:
        """Move if an update was applied since the last move."""


class Window:
    """Everything between two updates.

    The state is in Python numbers, so that counting a micro-batch does not wait for the
    device.
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
        self.watch = GradientWatch()
        self.watch.end_with(self, clears=not options.separate_sums)
        self.listeners = kit.Listeners()
        self.schedulers: WeakSet[Scheduler] = WeakSet()
        """Those that follow the updates."""
        self.sizes = kit.Sizes(options.reduction)
        self.warn = Warnings()
        self.window_loss = WindowLoss(options)
        self.non_finite_losses = NonFiniteLosses()
        self.changed_rate_warning = ChangedRateWarning(masters.inner, self.warn)
        changed_parameters_warning = ChangedParametersWarning(
            masters.parameters, self.warn
        )
        self.changed_parameters_warning = changed_parameters_warning
        self.extensions: list[Extension] = [
            self.window_loss,
            self.changed_rate_warning,
            LeftoverLoopWarning(self.warn),
            DividedLossWarning(options, self.warn),
            changed_parameters_warning,
        ]
        if workers.several:
            self.extensions.append(self.non_finite_losses)
        self.loss_handlers = handlers(self.extensions, "loss_given")
        self.micro_batch_handlers = handlers(self.extensions, "micro_batch_added")
        self.use_of_weights = kit.use_of_weights(options)
        self.measures = kit.measures(options)
        """The norm of a window's sum is needed."""
        self.has_scale = options.scale_rule != ScaleRule()
        self.size: Size = None
        """The size of the open window, looked up once."""
        self.micro_batch = MicroBatch()
        self.passes_before = PASSES[0]
        """The backward passes of all wrappers when a micro-batch was last counted."""
        self.last_event = (False, False, False, 0.0)
        """Of the last call: applied, skipped, overflow; and the last window's norm."""
        self.is_reduced = False
        """The sum is that of all workers, whose update is due."""
        self.has_just_loaded = False
        """Nothing was counted since a state was loaded."""
        self.gradient_sum = GradientSum(masters.parameters, self.watch)
        self.state = kit.initial_state(options.scale_rule.init_scale)
        self.parameters_changed()
        self.state = self.at_rest(self.state)

    # What the window knows.

    @property
    def result(self) -> StepResult:
        state = self.state
        return StepResult(
            *self.last_event,
            state.loss_scale,
            state.micro_step,
            state.optimizer_step,
            self.window_loss.value,
        )

    @property
    def updates(self) -> int:
        return int(self.state.optimizer_step)

    def is_under_way(self) -> bool:
        """True if a window is open, or the micro-batch that opens one has begun."""
        return bool(self.state.micro_step or self.micro_batch.has_loss) or (
            self.has_new_gradient and not self.options.separate_sums
        )

    @property
    def has_new_gradient(self) -> bool:
        """True if a backward pass has delivered something since the last step."""
        return bool(self.watch.factors)

    def current_state(self) -> State:
        """Return the state; between two windows with a `torch.amp.GradScaler`'s own
        scale, for which this waits.
        """
        if self.scaler is not None and not self.state.micro_step:
            self.state = self.at_rest(self.scaler.with_scale(self.state))
        return self.state

    def at_rest(self, state: Any) -> State:
        return kit.at_rest(state, float64_weight=self.has_float64)

    # The parameters, and where their sum is.

    def parameters_changed(self) -> None:
        """Choose the place of the sum anew, and keep the sum."""
        self.masters.groups_changed()
        parameters = self.masters.parameters()
        self.parameter_marks = parameter_marks(parameters)
        accumulate_dtype = self.options.accumulate_dtype
        self.sum_dtypes = [
            sum_dtype(parameter, accumulate_dtype) for parameter in parameters
        ]
        self.has_float64 = torch.float64 in self.sum_dtypes
        self.largest_number = kit.largest_number(float64_weight=self.has_float64)
        self.workers.parameters_changed()
        self.changed_rate_warning.allow_change()
        self.changed_parameters_warning.parameters_changed()
        self.watch.follow(parameters)
        make = self.workers.make_gradient_sum or make_gradient_sum
        gradient_sum = make(self.masters.parameters, self.watch, self.options)
        self._carry_over(self.gradient_sum, gradient_sum)
        self.gradient_sum = gradient_sum
        self.expect_window()
        if self.workers.several:
            self.expect_micro_batch()

    def _carry_over(self, old_sum: GradientSum, new_sum: GradientSum) -> None:
        """Move the sum, and what has arrived of a micro-batch, to a new place."""
        if type(old_sum) is type(new_sum) and not isinstance(old_sum, SumInBuffers):
            return  # It is in ``.grad``.
        factors = set(self.watch.factors)
        passes = self.watch.passes
        if isinstance(old_sum, SumOnArrival):
            old_sum.add_micro_batch(self.update)
            self.update.is_broken = False
        elif not self.state.micro_step:
            return
        sums = old_sum.gradients()
        for parameter, dtype in zip(
            self.masters.parameters(), self.sum_dtypes, strict=True
        ):
            if parameter in sums:
                sums[parameter] = sums[parameter].to(dtype)
        if type(old_sum) is not type(new_sum):
            old_sum.clear()
        new_sum.replace(sums)
        self.watch.factors.update(factors)
        self.watch.passes = passes

    def expect_window(self) -> None:
        if not self.gradient_sum.expects_windows:
            return
        size = self.size
        if not self.state.micro_step:
            size = checks.known_window_size(self.options, self.updates)
        self.gradient_sum.expect_window(size)

    def expect_micro_batch(self) -> None:
        """Say to the workers whether the next micro-batch is known to end the window.

        In a window of one micro-batch only `backward` says that a pass is for this
        optimizer: the pass of a GAN's generator brings gradients to the discriminator
        too, which are cleared again.
        """
        micro_step = self.state.micro_step
        size = self.size
        if not micro_step:
            size = checks.known_window_size(self.options, self.updates)
        is_last = isinstance(size, int) and micro_step == size - 1
        is_announced = micro_step > 0 or self.micro_batch.has_loss
        self.workers.expect_micro_batch(self.gradient_sum, is_last and is_announced)

    # A micro-batch.

    def weight(self) -> float:
        """Return the weight of the micro-batch under way."""
        weight = self.micro_batch.weight
        if weight is not None:
            return weight
        return float(kit.given_weight(None, self.use_of_weights))

    def factor(self, weight: float) -> float:
        """Return by what a loss of this weight is multiplied."""
        if not weight and self.micro_batch.has_loss:
            return 0.0
        return float(kit.contribution(weight, self.options) * self.state.loss_scale)

    def weigh(self, weight: float) -> None:
        micro_batch = self.micro_batch
        has_begun = micro_batch.has_loss or self.has_new_gradient
        was_weighed = micro_batch.is_weighed
        micro_batch.set_weight(weight)
        micro_batch.is_weighed = True
        if was_weighed and has_begun:
            micro_batch.is_weighed_twice = True

    def backward(
        self, loss: Tensor, weight: float | None, arguments: Mapping[str, Any]
    ) -> None:
        """Differentiate `loss`, shape ``()``, times weight and loss scale; with weight
        0 only if other workers wait.
        """
        self.update.require_usable()
        self.require_own_sum("backward()")
        micro_batch = self.micro_batch
        weighs_again = weight is not None and micro_batch.is_weighed
        if weighs_again and micro_batch.has_loss:
            micro_batch.is_weighed_twice = True
        before = (micro_batch.weight, micro_batch.has_loss)
        micro_batch.set_weight(self.weight() if weight is None else weight)
        micro_batch.has_loss = True
        if micro_batch.is_weighed_twice:
            self.warn(WEIGHED_TWICE)
        for loss_given in self.loss_handlers:
            loss_given(loss)
        try:
            self._differentiate(loss, arguments)
        except BaseException:
            if not self.has_new_gradient:
                micro_batch.weight, micro_batch.has_loss = before
            raise
        micro_batch.is_weighed = micro_batch.is_weighed or weight is not None
        if micro_batch.weight:
            gradient = arguments.get("gradient")
            shown = loss if gradient is None else loss.detach() * gradient
            micro_batch.losses.append(as_number(shown))

    def _differentiate(self, loss: Tensor, arguments: Mapping[str, Any]) -> None:
        weight = self.micro_batch.weight
        if weight:
            self.current_state()
            factor = self.factor(weight)
            self._run_backward(loss, self._multiplied(loss, factor, arguments), factor)
        elif (taking_part := self.workers.taking_part()) is not None:
            with taking_part:
                self._run_backward(self.workers.require_graph(loss), arguments, 0.0)
        else:
            self.workers.require_no_collective(loss)

    def _multiplied(
        self, loss: Tensor, factor: float, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return `arguments` with a gradient of `loss` that is multiplied by
        `factor`.

        The same bits as the gradient of ``loss * factor``, without that operation and
        its backward pass.
        """
        if factor == 1:
            return arguments
        self._require_float16_holds(loss)
        gradient = arguments.get("gradient")
        if gradient is None:
            gradient = torch.ones_like(loss)
        return {**arguments, "gradient": gradient * factor}

    def _require_float16_holds(self, loss: Tensor) -> None:
        """Raise unless the gradient of a float16 loss, its factor, can be finite."""
        if loss.dtype is not torch.float16:
            return
        rule = self.options.scale_rule
        scale = rule.init_scale if rule.backoff_factor == 1 else rule.min_scale
        least_factor = kit.contribution(self.weight(), self.options) * scale
        if least_factor > 65504:
            raise checks.beyond_float16_error(least_factor)

    def _run_backward(
        self, loss: Tensor, arguments: Mapping[str, Any], factor: float
    ) -> None:
        """Run ``loss.backward(**arguments)``. If it raises, remove what arrived, if it
        is not a part of the sum.
        """
        is_first = not self.state.micro_step or self.gradient_sum.is_beside_grad
        is_undoable = (
            is_first and not self.has_new_gradient and not self.watch.holds_gradients()
        )
        passes = PASSES[0]
        is_announced = not self.state.micro_step and factor != 0
        if self.workers.reduces_single_micro_batches and is_announced:
            self.expect_micro_batch()
        try:
            FACTORS.append(factor)
            try:
                loss.backward(**arguments)  # type: ignore[no-untyped-call]
            finally:
                FACTORS.pop()
        except BaseException:
            if self.workers.is_reducing:
                # The others add up what came before it.
                self.update.is_broken = True
            elif is_undoable:
                self._clear_gradients()
                PASSES[0] = passes
            elif self.has_new_gradient:
                # A reentrant checkpoint's own passes may have ended.
                self.watch.is_running = True
            raise

    def _clear_gradients(self) -> None:
        """Clear the micro-batch under way, which is apart from the sum."""
        if self.state.micro_step or self.gradient_sum.is_beside_grad:
            for parameter in self.masters.parameters():
                parameter.grad = None
            self.watch.reset()
        else:
            self.gradient_sum.clear()

    def multiplied(self, loss: Tensor) -> Tensor:
        """Return `loss`, of any shape, times its factor."""
        self.current_state()
        factor = self.factor(self.weight())
        if factor == 1:
            return loss
        self._require_float16_holds(loss)
        # backward() works inside torch.no_grad(), and so must this.
        with torch.enable_grad():
            return loss * factor

    def scale(self, loss: Tensor) -> Tensor:
        micro_batch = self.micro_batch
        micro_batch.set_weight(self.weight())
        micro_batch.has_loss = True
        micro_batch.is_scaled_by_hand = True
        if micro_batch.is_weighed_twice:
            self.warn(WEIGHED_TWICE)
        for loss_given in self.loss_handlers:
            loss_given(loss)
        micro_batch.losses.append(as_number(loss))
        return self.multiplied(loss)

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run `closure`, and count its loss unless it was passed already, or a gradient
        had arrived before.
        """
        had_gradient = self.has_new_gradient
        # The user may have switched gradients off around step().
        with torch.enable_grad():
            loss = closure()
        micro_batch = self.micro_batch
        if not micro_batch.has_loss:
            if loss is None and not self.has_new_gradient and not self._holds_users():
                # A trainer's way to leave a micro-batch out.
                micro_batch.set_weight(0.0)
                micro_batch.is_weighed = True
                micro_batch.has_loss = True
            micro_batch.losses = [] if had_gradient else [as_number(loss)]
        return loss

    def add_micro_batch(self) -> bool:
        """Count the micro-batch whose gradient is in ``.grad``; return True if the
        window is full.

        Raises:
            UsageError: there was no backward pass, or something changed ``.grad``. The
                window is as it was before the call.
        """
        self.update.require_usable()
        self.require_own_sum("step()")
        micro_batch = self.micro_batch
        state = self.current_state()
        if not state.micro_step:
            self.size = window_size(self.options, state.optimizer_step)
        weight = self.weight()
        self._require_right_gradient(weight)
        if not state.micro_step and self._were_parameters_changed():
            self.parameters_changed()
        is_own_pass_expected = (
            micro_batch.has_loss and not micro_batch.is_scaled_by_hand
        )
        if is_own_pass_expected and self.watch.has_plain_pass:
            micro_batch.losses = []  # That of the plain pass is not known.
        micro_batch.passes = self.watch.passes
        micro_batch.window_size = self.size
        if micro_batch.is_weighed_twice and not micro_batch.has_loss:
            self.warn(WEIGHED_TWICE)
        is_finite = self.gradient_sum.add_micro_batch(self.update)
        self.update.is_broken = True
        added_weight = weight if kit.usable(state, weight, is_finite) else 0.0
        self.state = self.at_rest(kit.accumulate(state, weight, is_finite, select))
        self.last_event = (False, False, not is_finite, self.last_event[3])
        self.sizes.weighed = micro_batch.is_weighed
        self.has_just_loaded = False
        self.passes_before = PASSES[0]
        self._forget_micro_batch()
        for micro_batch_added in self.micro_batch_handlers:
            micro_batch_added(micro_batch, added_weight)
        self.update.is_broken = False
        is_full = bool(kit.ends(self.state, self.size, select))
        if self.workers.several and not is_full:
            self.expect_micro_batch()
        return is_full

    def _forget_micro_batch(self) -> None:
        self.micro_batch = MicroBatch()
        self.watch.micro_batch_ended()

    def _require_right_gradient(self, weight: float) -> None:
        """Raise unless ``.grad`` holds this window's gradients, as backward passes of
        losses times the right factor left them.
        """
        watch = self.watch
        factor = self.factor(weight)
        arrived = watch.factors
        is_unscaled = self.has_scale and not self.micro_batch.has_loss
        if arrived != {factor} or is_unscaled:
            self._require_factor(weight, factor, arrived)
        if watch.has_graph and self.workers.several:
            raise checks.graph_error("create_graph")
        if isinstance(self.gradient_sum, SumInBuffers):
            self._require_not_taken()
        if self.options.separate_sums:
            self._require_separate_gradient()
        elif watch.is_running:
            raise checks.interrupted_error()
        elif not watch.is_intact():
            after = State(*kit.accumulate(self.state, weight, True, select))
            is_full = kit.ends(after, self.size, select)
            is_first = after.micro_step == 1
            if not (is_full and self._may_be_changed(after, is_first)):
                raise checks.changed_gradients_error(watch.likely_change())
            watch.reset()

    def _may_be_changed(self, after: State, is_first: bool) -> bool:
        """True if ``.grad`` holds the complete gradient of the window that ends with
        `after`, which is the user's to change.
        """
        is_in_buffers = isinstance(self.gradient_sum, SumInBuffers)
        if is_in_buffers and not (is_first and self.gradient_sum.is_beside_grad):
            return False
        is_complete = kit.divisor(after, self.options, select) == 1
        return is_complete and (is_first or self.watch.change is None)

    def _require_factor(
        self, weight: float, factor: float, arrived: set[float]
    ) -> None:
        micro_batch = self.micro_batch
        if self.options.separate_sums:
            # The user may have cleared what another wrapper's pass has left there.
            arrived = arrived & {1.0}
        has_begun = bool(arrived) or micro_batch.has_loss or micro_batch.is_weighed
        has_begun = has_begun or PASSES[0] != self.passes_before
        has_begun = has_begun or self.watch.change is not None
        if not has_begun and not self._holds_users():
            raise checks.no_backward_error()
        if micro_batch.is_scaled_by_hand:
            return
        if self.has_scale and not micro_batch.has_loss:
            raise checks.not_scaled_error(bool(arrived))
        if arrived - {1.0, factor}:
            raise checks.multiplied_error()
        if arrived - {factor}:
            if micro_batch.has_loss:
                raise checks.not_scaled_error(True)
            raise checks.not_weighed_error(weight)

    def _require_not_taken(self) -> None:
        """Raise if another wrapped optimizer of these parameters has moved the gradient
        into a sum of its own.
        """
        if not self.has_new_gradient:
            return
        parameters = self.masters.parameters()
        has_gradient = any(each.grad is not None for each in parameters)
        if not has_gradient and self.watch.is_shared():
            raise checks.taken_gradients_error()

    def _require_separate_gradient(self) -> None:
        """Raise if ``.grad``, which the user may have cleared or written since, is no
        micro-batch's gradient.
        """
        parameters = self.masters.parameters()
        gradients = [each.grad for each in parameters if each.grad is not None]
        if not gradients:
            return
        # What a backward pass that raised has delivered was added to.
        if self.watch.is_running and any(each._version > 0 for each in gradients):
            raise checks.interrupted_error(is_separate=True)
        if self.watch.has_graph:
            raise checks.graph_error("separate_sums")
        if self.size != 1 and hasattr(parameters[0], "summed_grad"):
            raise checks.added_noise_error()

    def _holds_users(self) -> bool:
        """True if the user has put a gradient into ``.grad``."""
        is_separate = not self.state.micro_step or self.gradient_sum.is_beside_grad
        return self.watch.holds_other_gradients(
            self.masters.parameters(), is_separate=is_separate
        )

    def _were_parameters_changed(self) -> bool:
        """True if some were cast, frozen or replaced, which calls nothing here."""
        return parameter_marks(self.masters.parameters()) != self.parameter_marks

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear ``.grad`` where it holds no part of the sum."""
        if self.workers.is_reducing:
            raise checks.unfinished_error("zero_grad()")
        if self.state.micro_step and not self.gradient_sum.is_beside_grad:
            if self.has_new_gradient:
                raise checks.unfinished_error("zero_grad()")
            return
        micro_batch = self.micro_batch
        parameters = self.masters.parameters()
        had_gradient = [
            parameter for parameter in parameters if parameter.grad is not None
        ]
        if had_gradient or self.watch.has_seen_anything:
            self._clear_gradients()
        self.micro_batch = MicroBatch()
        weight = micro_batch.weight
        if weight is not None and micro_batch.is_weighed and not micro_batch.has_loss:
            self.weigh(weight)
        if not set_to_none:
            # Zeros, so that momentum and weight decay still move the parameters.
            ids = {
                id(each) for each in (*had_gradient, *self.update.updated_parameters)
            }
            for parameter in parameters:
                if id(parameter) in ids:
                    dtype = gradient_dtype(parameter)
                    parameter.grad = torch.zeros_like(parameter, dtype=dtype)
            self.watch.reset()

    # The end of a window.

    def close(self, denominator: float | None = None) -> None:
        """Make the update from the window's sum, or skip it, and begin the next
        window.
        """
        if self._were_parameters_cast():
            raise checks.cast_in_window_error()
        if self.scaler is not None and self.state.micro_step:
            self.scaler.require_unmoved(self.state)
        for extension in self.extensions:
            extension.window_ending()
        if self.workers.several and not self.is_reduced and not self._reduce():
            return
        state: Any = self.state
        options = self.options
        if denominator is not None:
            state, options = kit.with_denominator(state, denominator, options, select)
        sums = self._complete_sums()
        decision = self._decide(sums, state, options)
        ranks: list[int] = []
        if decision.overflow and not decision.apply and self.workers.several:
            ranks = self.workers.ranks_with(self.non_finite_losses.found())
        self.update.is_made = False
        try:
            if decision.apply:
                self._make_update(sums, decision.divisor)
        finally:
            if self.update.is_made or not decision.apply:
                self._finish(decision, state, options)
        if ranks:
            self.warn(NON_FINITE_LOSS.format(ranks=", ".join(map(str, ranks))))

    def _were_parameters_cast(self) -> bool:
        dtypes = [parameter.dtype for parameter in self.masters.parameters()]
        return dtypes != [dtype for _, dtype, _ in self.parameter_marks]

    def _complete_sums(self) -> Gradients:
        """Return the sums with each element once."""
        sums = self.gradient_sum.gradients()
        unusual = [
            total
            for total in sums.values()
            if type(total) is not Tensor or total.is_sparse
        ]
        if not unusual:
            return sums
        complete_sums = {
            parameter: complete(total) for parameter, total in sums.items()
        }
        if any(complete_sums[each] is not total for each, total in sums.items()):
            self.gradient_sum.replace(complete_sums)
        return complete_sums

    def _reduce(self, part: int | None = None) -> bool:
        """Make this the window of all workers; return False if none of them has one."""
        numbers = [extension.numbers() for extension in self.extensions]
        own_numbers = [number for each in numbers for number in each]
        reduced = self.workers.all_reduce(
            self.state,
            self.gradient_sum.gradients(),
            own_numbers,
            self.update,
            part,
        )
        if not reduced.is_open:
            return False
        self.gradient_sum.replace(reduced.gradients)
        if part is None:
            remaining = iter(reduced.numbers)
            for extension, given in zip(self.extensions, numbers, strict=True):
                if given:
                    extension.reduced([next(remaining) for _ in given])
        self.state = self.at_rest(
            kit.joined(self.state, reduced.weight, reduced.overflow)
        )
        self.is_reduced = True
        self.update.is_broken = False
        return True

    def _decide(self, sums: Gradients, state: Any, options: Options) -> Decision:
        norm = float("nan")
        is_finite = True
        if self.measures:
            norm, is_finite = measure(list(sums.values()))
            divisor = kit.divisor(state, options, select)
            is_finite = is_finite and self._fits(sums, norm, divisor)
            norm, is_finite = self.workers.stage_norm(state, norm, is_finite)
        return Decision(
            *kit.decide(state, norm, is_finite, options, select, self.largest_number)
        )

    def _fits(self, sums: Gradients, norm: float, divisor: float) -> bool:
        """True if the inner optimizer's dtype holds the divided sum."""
        for parameter, total in sums.items():
            dtype = gradient_dtype(self.masters.worked_on(parameter))
            if total.dtype is dtype or norm / divisor <= torch.finfo(dtype).max:
                continue  # No element exceeds the norm.
            if not fits(total, divisor, dtype):
                return False
        return True

    def _make_update(self, sums: Gradients, divisor: float) -> None:
        self.update.is_broken = True
        self.gradient_sum.prepare_update(sums)
        try:
            self.update.make(self.gradient_sum, sums, divisor)
        finally:
            self.gradient_sum.end_update()

    def _finish(self, decision: Decision, state: Any, divided_by: Options) -> None:
        """Begin the next window."""
        self.update.is_broken = True
        ended = self.state
        options = self.options
        if self.scaler is not None:
            options = options._replace(scale_rule=self.scaler.rule)
        closed = kit.close(ended, decision.apply, decision.overflow, options, select)
        self.state = self.at_rest(closed)
        applied = decision.apply
        self.last_event = (
            applied,
            not applied,
            decision.overflow,
            decision.grad_norm,
        )
        self.gradient_sum.clear_window()
        for master in self.masters.masters.values():
            master.grad = None
        self.is_reduced = False
        self.workers.window_ended()
        self.watch.compares_norms = False
        self.expect_window()
        if self.workers.several:
            self.expect_micro_batch()
        if self.scaler is not None:
            self.scaler.window_closed(self.state, decision.overflow)
        for extension in self.extensions:
            extension.window_closed(state, divided_by)
        if self.listeners.added:
            self.listeners.note(
                self.result, weight=ended.weight, micro_batches=ended.micro_step
            )
        self.update.is_broken = False

    def reported(self, close: Callable[[], None]) -> None:
        """Call `close`, and then the listeners with each window that it closed."""
        if not self.listeners.added:
            return close()
        with self.listeners.settled():
            close()

    def flush(self, denominator: float | None = None) -> None:
        """Close the open window, and as many as other workers have."""
        if denominator is not None:
            several = self.workers.several
            kit.require_denominator(denominator, self.options, several=several)
        self.update.require_usable()
        micro_step = self.state.micro_step
        if self.watch.is_running and not self.options.separate_sums:
            raise checks.interrupted_error()
        if self.micro_batch.has_loss or self.workers.is_reducing:
            raise checks.unfinished_error("flush()")
        if micro_step and not self.options.separate_sums:
            self._require_counted("flush()", is_flush=True)
        self.last_event = (False, False, False, self.last_event[3])
        self.workers.flush(
            partial(self.close, denominator),
            self._between_windows,
            is_open=micro_step > 0,
        )

    def _require_counted(self, call: str, is_flush: bool = False) -> None:
        """Raise unless ``.grad`` is as it was after the last ``step``."""
        if self.watch.is_running:
            raise checks.interrupted_error()
        if self.has_new_gradient:
            raise checks.unfinished_error(call)
        if self.watch.is_intact():
            return
        change = self.watch.likely_change()
        is_cleared = change is checks.Change.CLEARED
        may_be_changed = is_flush and not self.gradient_sum.is_beside_grad
        if is_cleared or not (
            may_be_changed and self._may_be_changed(self.state, False)
        ):
            raise checks.changed_gradients_error(change)
        self.watch.reset()

    def _between_windows(self) -> None:
        """Repeat between two windows of one call what the user's loop does on the other
        workers.
        """
        self.listeners.tell()
        for scheduler in list(self.schedulers):
            scheduler.follow()

    def discard(self) -> None:
        """Forget the open window and the micro-batch under way."""
        self.gradient_sum.clear()
        for master in self.masters.masters.values():
            master.grad = None
        self.state = self.at_rest(kit.discard(self.state))
        self.last_event = (False, False, False, self.last_event[3])
        self._start_anew()
        for extension in self.extensions:
            extension.window_discarded()

    def _start_anew(self) -> None:
        self._forget_micro_batch()
        self.is_reduced = False
        self.update.is_broken = False
        self.workers.window_ended()

    def require_own_sum(self, call: str) -> None:
        if self.is_reduced:
            raise kit.update_due_error(call)

    # Layer by layer.

    def close_part(self, number: int, belongs: Callable[[Tensor], bool]) -> None:
        """Make the update of the parameters that `belongs` is true of; the window stays
        open for the others.

        Where the decision needs no norm, it is the same for each part. All workers give
        a part the same `number`.
        """
        self.changed_parameters_warning.window_discarded()
        state = self.state
        sums = self.gradient_sum.gradients()
        self.gradient_sum.clear()
        part = {each: total for each, total in sums.items() if belongs(each)}
        later = {each: total for each, total in sums.items() if each not in part}
        self.gradient_sum.replace(part)
        if self.workers.several:
            self._reduce(number)
        parameters = [each for each in self.masters.parameters() if belongs(each)]
        with self.masters.only(parameters):
            part_sums = self._complete_sums()
            decision = self._decide(part_sums, self.state, self.options)
            if decision.apply:
                self._make_update(part_sums, decision.divisor)
            self.gradient_sum.clear()
            for parameter in parameters:
                self.masters.worked_on(parameter).grad = None
        self.is_reduced = False
        self.update.is_broken = False
        self.state = state
        self.gradient_sum.replace(later)

    # Saving and resuming.

    def require_savable(self) -> None:
        self.update.require_usable()
        self.require_own_sum("state_dict()")
        if self.watch.is_running and not self.gradient_sum.is_beside_grad:
            raise checks.interrupted_error()
        if self.workers.is_reducing:
            raise checks.unfinished_error("state_dict()")
        if self.state.micro_step and not self.gradient_sum.is_beside_grad:
            if self.micro_batch.has_loss:
                raise checks.unfinished_error("state_dict()")
            self._require_counted("state_dict()")

    def saved_sums(self) -> dict[int, Tensor]:
        """Return the open window's sum by the index of its parameter; the tensors
        themselves.
        """
        if not self.state.micro_step:
            return {}
        sums = self.gradient_sum.gradients()
        return {
            index: sums[parameter].detach()
            for index, parameter in enumerate(self.masters.parameters())
            if parameter in sums
        }

    def pickled(self) -> dict[str, Any]:
        """Return the micro-batch under way: torch may pickle a parameter without its
        ``.grad``.
        """
        change = None if self.watch.is_intact() else self.watch.likely_change()
        return {
            "gradients": [
                None if each.grad is None else each.grad.detach()
                for each in self.masters.parameters()
            ],
            "micro_batch": self.micro_batch,
            "factors": self.watch.factors,
            "change": change,
        }

    def unpickle(self, pickled: Mapping[str, Any]) -> None:
        for parameter, gradient in zip(
            self.masters.parameters(), pickled["gradients"], strict=True
        ):
            parameter.grad = gradient
        self.watch.reset()
        self.micro_batch = pickled["micro_batch"]
        self.watch.factors.update(pickled["factors"])
        self.watch.change = pickled["change"]

    def restore(
        self, state: State, sums: Mapping[int, Tensor], entries: dict[str, Any]
    ) -> None:
        """Resume with a saved window; the sums are copied."""
        self.gradient_sum.clear()
        parameters = self.masters.parameters()
        copies = {
            parameters[index]: total.detach().to(parameters[index].device, copy=True)
            for index, total in sums.items()
        }
        self.gradient_sum.replace(copies)
        self.state = self.at_rest(state)
        self.last_event = (False, False, False, float(entries.get("grad_norm", 0.0)))
        self.has_just_loaded = True
        self.size = None
        if state.micro_step:
            self.size = window_size(self.options, state.optimizer_step)
        self._start_anew()
        self.expect_window()
        for extension in self.extensions:
            extension.window_discarded()
            extension.load_state_dict(entries)
        if self.scaler is not None:
            self.scaler.write(self.state)


def parameter_marks(
    parameters: list[Tensor],
) -> list[tuple[int, torch.dtype, bool]]:
    """Return what differs once parameters were replaced, cast or frozen."""
    return [(id(each), each.dtype, each.requires_grad) for each in parameters]
