"""What happens to an open window: a micro-batch is added, the window closes or is forgotten. The transitions of the core move it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gradaccum.kit import Decision, State, accumulate, at_rest, discard, ends, select
from gradaccum_torch.attempt import StepReturn
from gradaccum_torch.closure import Evaluations, Loss, Skipped, evaluated_once, require_plain
from gradaccum_torch.knowledge import as_told
from gradaccum_torch.loss import factor, require_graph, scaled
from gradaccum_torch.micro_batch import NOTHING_SAID, MicroBatch
from gradaccum_torch.misuse import cast_in_window_error, unfinished_error
from gradaccum_torch.state import NOTHING_CLOSED, WindowState
from gradaccum_torch.update import through

_DROPPED = (False, False, True)
_NOT_EVALUATED = Decision(True, False, 1.0, math.nan)
"""Of an inner optimizer that has made its update without a look at the closure it was given."""


class Window(WindowState):
    """Everything that happens between two updates."""

    def backward(self, loss: Tensor, weight: float, arguments: Mapping[str, Any]) -> None:
        """Differentiate `loss`, shape ``()``, times weight and loss scale; with weight 0 only note it, unless other workers wait for it."""
        micro_batch = self._micro_batch
        micro_batch.require_same(weight)
        losses = micro_batch.losses
        if weight:
            self._differentiate(loss, weight, arguments)
            gradient = arguments.get("gradient")
            losses = *losses, as_told(loss if gradient is None else loss.detach() * gradient)
        elif (taking_part := self._workers.taking_part()) is not None:
            with taking_part:
                self._differentiate(require_graph(loss), weight, arguments)
        self._micro_batch = MicroBatch(weight, True, micro_batch.scaled_by_user, losses)

    def begin_weightless(self) -> None:
        """The user is about to differentiate a loss, scaled already, that adds no weight."""
        self._micro_batch.require_same(0.0)
        self._micro_batch = MicroBatch(0.0, True, True, self._micro_batch.losses)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss`, of any shape, times the loss scale, for the user to differentiate."""
        self._micro_batch.require_same(1.0)
        self._micro_batch = MicroBatch(1.0, True, True, (*self._micro_batch.losses, as_told(loss)))
        return scaled(loss, 1.0, self._fields, self._options, self._scaler)

    def note_scaled(self) -> None:
        """The user has scaled the loss of the micro-batch under way, with the `torch.amp.GradScaler` itself."""
        self._micro_batch = self._micro_batch._replace(scaled_by_user=True)

    def evaluate(self, closure: Callable[[], Loss]) -> Loss:
        """Run `closure`, which returns the micro-batch's loss, unless it told the loss itself, or a gradient had arrived before."""
        arrived = self.strategy.sentinels.arrived
        loss = evaluated_once(closure)
        if not self._micro_batch.noted:
            self._micro_batch = self._micro_batch._replace(losses=() if arrived else (as_told(loss),))
        return loss

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear ``.grad`` between two windows; in mid-window keep the partial sum."""
        if self.strategy.zero_grad(set_to_none, first=self._fields.micro_step == 0):
            self._micro_batch = NOTHING_SAID

    def add(self) -> bool:
        """End the micro-batch under way: check it, add it to the sum, count it. Returns whether the window is full, and must be closed."""
        if first := self._fields.micro_step == 0:
            self._size = self.size  # Looked up once, so that a schedule cannot change it under way.
            if self._size != 1 and self.strategy.expects:  # A callable may have said 1 when the last window ended.
                self.strategy.expect(self._size)
        fields, micro_batch, weight, sentinels = self._fields, self._micro_batch, self._micro_batch.weight, self.strategy.sentinels
        if self._update.half_made or sentinels.arrivals.under_way or self._workers.not_own:
            self._require_whole("step()")
        if self._scale_in_use or micro_batch.noted or sentinels.arrivals.multiplied:
            micro_batch.require_scaled(sentinels, factor(weight, fields, self._options), self._scale_in_use)
        if not sentinels.intact():
            self._closing.require_true_gradient(State(*accumulate(fields, weight, True, select)), self._size, self.strategy)
        if first and not self._plan.holds():
            self.groups_changed()
        losses = micro_batch.losses and micro_batch.all_losses(sentinels)
        finite = self.strategy.take()
        self._micro_batch = NOTHING_SAID
        if self._scaler is not None:
            self._scaler.count(first=first)
        self._fields = at_rest(accumulate(fields, weight, finite, select), float64_weight=self._plan.float64_weight)
        self._event = NOTHING_CLOSED if finite else _DROPPED
        self._knowledge.counted(fields, weight, finite, losses)
        if self._knowledge.measures_noise and self._knowledge.is_first(self._fields):
            self._knowledge.first_seen(self.fields_to_save(), self.strategy.norm_so_far())
        return bool(ends(self._fields, self._size, select))

    def close(self) -> None:
        """End the window, which holds a micro-batch at least: measure, decide, make the update, finish."""
        if not self._plan.holds_dtypes():
            raise cast_in_window_error()
        if self._workers.several:
            self._set(self._closing.join(self._workers, self._fields, self.strategy, self._plan.zeros), self._event)
            if not self._workers.joined:
                return
        else:
            self._workers.require_one_weight(self._fields)
        self._fields, decision, *_ = verdict = self._closing.verdict(self._fields, self.strategy, self._plan)
        try:
            if decision.apply:
                self._update.make(self.strategy, decision.divisor, verdict.unclipped, verdict.norms, verdict.strayed)
        finally:
            if self._update.made or not decision.apply:
                self._finish(decision)

    def step_with(self, closure: Callable[[], Loss]) -> StepReturn:
        """An update of one micro-batch, whose gradient the closure puts into ``.grad``; it counts once it is made."""
        require_plain(self._options, self.size, self._parameters)
        self._workers.require_no_closure()
        evaluations = Evaluations(closure)
        try:
            return self._update.make_with(lambda: self._evaluated(evaluations))
        except Skipped as skipped:
            self._update.require_whole()
            return skipped.loss
        finally:
            fields, decision = evaluations.ended or (accumulate(self._fields, 1.0, True, select), _NOT_EVALUATED)
            if self._update.made or not (decision.apply or self._update.half_made):
                self._knowledge.counted(self._fields, evaluations.weight, True, evaluations.losses)
                self._micro_batch = NOTHING_SAID
                self._set(fields)
                self._finish(decision)

    def flush(self) -> None:
        """Close the window with what it holds."""
        self._require_whole()
        if self._micro_batch.noted or (self._fields.micro_step and self.strategy.begun):
            raise unfinished_error("flush()")
        if self._fields.micro_step and not self.strategy.sentinels.intact():
            self._closing.require_true_gradient(self._fields, self._size, self.strategy, flushing=True)
        self._workers.flush(self.close, self._between_windows, is_open=self._fields.micro_step > 0)

    def discard(self) -> None:
        """Forget it, and the micro-batch under way."""
        self.strategy.clear()
        self._micro_batch, self._update.half_made = NOTHING_SAID, False
        self._workers.window_ended()
        self._set(discard(self._fields))
        self._knowledge.discard()

    def _between_windows(self) -> None:
        """The call closes another window. What the user's loop does after each window on the other workers is done here."""
        self.listening.tell()
        for scheduler in self.schedulers:
            scheduler.follow()

    def _differentiate(self, loss: Tensor, weight: float, arguments: Mapping[str, Any]) -> None:
        self._require_whole()
        factored = scaled(loss, weight, self._fields, self._options, self._scaler)
        self.strategy.backward(factored, arguments, first=self._fields.micro_step == 0, multiplied=factored is not loss)

    def _evaluated(self, evaluations: Evaluations) -> Loss:
        """What the closure returns; the first evaluation decides on the window."""
        self._micro_batch = self._micro_batch._replace(losses=())
        loss = self.evaluate(evaluations.closure)
        if evaluations.ended is not None:
            evaluations.require_same(self._micro_batch.weight)
            return loss
        told = self._micro_batch
        after = at_rest(accumulate(self._fields, told.weight, True, select), float64_weight=self._plan.float64_weight)
        evaluations.decided(self._closing.verdict(after, self.strategy, self._plan), told.losses, told.weight, loss)
        return loss

    def _finish(self, decision: Decision) -> None:
        """Count the window, free its sum, move the loss scale."""
        ended, self._grad_norm = self._fields, decision.grad_norm
        self._knowledge.window_ended(ended, decision.grad_norm)
        self._set(self._closing.closed(ended, decision), (decision.apply, not decision.apply, decision.overflow))
        through(self.strategy.window_ended)
        self._workers.window_ended()
        self.strategy.sentinels.window_ended()
        self._expect()
        if self._scaler is not None:
            self._scaler.window_ended(self._fields, decision.overflow)
        self.listening.window_ended(ended, self)
