"""The open window: its state, the micro-batch under way and the sum, moved by the transitions of the core.

The state is `gradaccum.kit.State` in Python numbers, so that a micro-batch costs one transition and a few comparisons: no pass over
the gradients and no wait for the device. Nothing here knows who calls: how to run the update is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from gradaccum import StepResult
from gradaccum.kit import (
    Decision,
    Options,
    ScaleRule,
    State,
    accumulate,
    at_rest,
    close,
    contribution,
    decide,
    discard,
    divisor,
    ends,
    initial_state,
    select,
)
from gradaccum_torch.checks import require_in_range, window_size
from gradaccum_torch.grad_scaler import link_scaler
from gradaccum_torch.masters import Parameters
from gradaccum_torch.micro_batch import MicroBatch, cast_in_window, changed_gradients, interrupted, unfinished
from gradaccum_torch.plan import Planned
from gradaccum_torch.update import Update, half_made, through

_NOTHING_CLOSED = (False, False, False)
_DROPPED = (False, False, True)


class Window(Planned):
    """What is between two updates.

    Args:
        inner: the optimizer whose parameters are summed over.
        options: those of `gradaccum.wrap`, with ``accumulate_dtype`` as a torch dtype or None.
        masters: the master weights by position, where `inner` is a copy that has worked on them already.
    """

    def __init__(self, inner: torch.optim.Optimizer, options: Options, masters: Mapping[int, torch.Tensor] | None = None) -> None:
        self.options = options
        self._scaled = options.scale_rule != ScaleRule()
        self._inner = inner
        self.parameters = Parameters(inner, options.master_weights, masters)
        self.scaler = link_scaler(options, self._device())
        self.micro_batch = MicroBatch()
        self.use_strategy()
        self.size: int | None = None
        self.fields: State
        self.grad_norm = 0.0
        self.loads = 0, 0
        """How often a saved state was loaded, and the updates that the last one had."""
        self.update = Update(inner, self.parameters)
        self._set(initial_state(options.scale_rule.init_scale))
        self._expect()

    @property
    def result(self) -> StepResult:
        """What the last event did."""
        fields = self.fields
        return StepResult(*self._event, self.grad_norm, fields.loss_scale, fields.micro_step, fields.optimizer_step)

    def start_with(self, fields: State) -> None:
        """Make `fields` the state; the sum is the caller's to provide."""
        self.size = window_size(self.options, fields.optimizer_step) if fields.micro_step else None
        self.update.half_made = False
        self._set(fields)
        self._expect()
        if self.scaler is not None:
            self.scaler.write(fields)

    def factor(self, weight: float) -> float:
        """What a loss of that weight is multiplied by: contribution times loss scale."""
        factor: float = contribution(weight, self.options) * self.fields.loss_scale
        return factor

    def scaled(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """`loss` times its `factor`; a `torch.amp.GradScaler` scales it on the device, where its scale is.

        Raises:
            UsageError: its dtype cannot hold the factor, however far the loss scale backs off.
        """
        factor, rule = float(contribution(weight, self.options)), self.options.scale_rule
        if factor == 1 and not self._scaled:
            return loss
        require_in_range(loss, factor * (rule.init_scale if rule.backoff_factor == 1 else rule.min_scale))
        with torch.enable_grad():  # Where backward() itself works, with torch.no_grad() around it.
            if self.scaler is not None:
                loss = self.scaler.scaler.scale(loss)
            else:
                factor *= self.fields.loss_scale
            return loss if factor == 1 else loss * factor

    def fields_to_save(self) -> State:
        """The state, with a `torch.amp.GradScaler`'s scale and tracker as they are now; may wait for the device."""
        return self.fields if self.scaler is None else self.scaler.current(self.fields)

    def open(self) -> State:
        """The state; at the start of a window its size is looked up, once, so that a schedule cannot change it under way."""
        if self.fields.micro_step == 0:
            self.size = window_size(self.options, self.fields.optimizer_step)
        return self.fields

    def count(self) -> bool:
        """End the micro-batch under way; whether the window is full now, and must be closed."""
        fields, micro_batch, sentinels = self.open(), self.micro_batch, self.strategy.sentinels
        if self.update.half_made or sentinels.arrivals.under_way:
            self.require_whole()
        weight = micro_batch.weight
        if self._scaled or micro_batch.noted:
            micro_batch.require_scaled(sentinels, self.factor(weight), self._scaled)
        if not sentinels.intact():
            self._require_still_right(State(*accumulate(fields, weight, True, select)))
        if fields.micro_step == 0 and self._seen() != self._planned:
            self.groups_changed()
        finite = self.strategy.take()
        micro_batch.clear()
        if self.scaler is not None:
            self.scaler.count(first=fields.micro_step == 0)
        self._set(accumulate(fields, weight, finite, select), _NOTHING_CLOSED if finite else _DROPPED)
        return self._ends(self.fields)

    def flush(self, update: Callable[[], Any], observed: bool) -> None:
        """Close the window with what it holds; the arguments are those of `close`."""
        self.require_whole()
        if self.micro_batch.noted or (self.fields.micro_step and self.strategy.sentinels.arrived):
            raise unfinished("flush()")
        self._event = _NOTHING_CLOSED
        if self.fields.micro_step:
            if not self.strategy.sentinels.intact():
                self._require_still_right(self.fields, flushing=True)
            self.close(update, observed)

    def discard(self) -> None:
        """Forget it, and the micro-batch under way."""
        self.strategy.clear()
        self.micro_batch.clear()
        self.update.half_made = False
        self._set(discard(self.fields))

    def counting_applied(self) -> AbstractContextManager[None]:
        """Where an update of one micro-batch runs that a closure fills; it is counted once it is made."""
        return self.update.counting(self._count_applied)

    def _count_applied(self) -> None:
        self.micro_batch.clear()
        self._set(accumulate(self.fields, 1.0, True, select))
        norm = self.strategy.measure().norm
        self._end(Decision(True, False, 1.0, norm))

    def is_under_way(self) -> bool:
        """Whether a window is open, or the micro-batch that opens one has begun."""
        return bool(self.fields.micro_step) or self.micro_batch.noted or self.strategy.sentinels.arrived

    def require_at_rest(self, call: str) -> None:
        """The sum is that of the micro-batches counted.

        Raises:
            UsageError: a micro-batch is under way in it, or something changed ``.grad``.
        """
        self.require_whole()
        if self.fields.micro_step == 0 or self.strategy.keeps_micro_batch_apart:
            return
        if self.micro_batch.noted or self.strategy.sentinels.arrived:
            raise unfinished(call)
        if not self.strategy.sentinels.intact():
            raise changed_gradients()

    def require_whole(self) -> None:
        """Neither a backward pass nor an update was made by half.

        Raises:
            UsageError: one raised in its midst.
        """
        if self.update.half_made:
            raise half_made()
        if self.strategy.sentinels.arrivals.under_way:
            raise interrupted()

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """What arrives in this context comes from the wrapper's own backward pass; where it raises and can be undone, it is."""
        self.require_whole()
        strategy, sentinels = self.strategy, self.strategy.sentinels
        apart = strategy.keeps_micro_batch_apart or self.fields.micro_step == 0
        undoable = apart and not sentinels.arrived and not sentinels.holds
        try:
            with sentinels.own_backward():
                yield
        except BaseException:
            if undoable:
                self.parameters.free_gradients()
                strategy.forget_micro_batch()
            raise

    def close(self, update: Callable[[], Any], observed: bool) -> None:
        """End the window, which holds a micro-batch at least.

        Args:
            update: runs the inner optimizer.
            observed: whether something that `update` calls looks at ``.grad`` before the inner optimizer does.
        """
        if self._seen()[1] != self._planned[1]:
            raise cast_in_window()
        strayed, scale = self.parameters.strayed(), () if self.scaler is None else self.scaler.notes()
        norm, finite, notes, norms = self.strategy.measure((*scale, *strayed))
        if self.scaler is not None:
            self.fields = self.scaler.used(self.fields, notes[: len(scale)])
        # Clipping comes after: what leaves the range before it is an overflow, as it would be in a large batch.
        whole, unclipped = self.strategy.hands_over_whole, divisor(self.fields, self.options, select)
        finite = finite and (whole or self.strategy.fits(norm, unclipped))
        decision = Decision(*decide(self.fields, norm, finite, self.options, select, self._largest))
        end = partial(self._end, decision)
        if not decision.apply:
            return end()
        if any(notes[len(scale) :]):
            self.parameters.take_over()
        unseen = norms if whole and not observed else None
        self.update.make(update, self.strategy, decision.divisor, unclipped, unseen, end)

    def _end(self, decision: Decision) -> None:
        options = self.options if self.scaler is None else self.options._replace(scale_rule=self.scaler.rule)
        fields = close(self.fields, decision.apply, decision.overflow, options, select)
        self.grad_norm = decision.grad_norm
        self._set(fields, (decision.apply, not decision.apply, decision.overflow))
        through(self.strategy.clear)
        self.strategy.sentinels.arrivals.values.window_ended()
        self._expect()
        if self.scaler is not None and not self.scaler.update_follows:
            self.scaler.write(self.fields)

    def _set(self, fields: tuple[Any, ...], event: tuple[bool, bool, bool] = _NOTHING_CLOSED) -> None:
        self.fields, self._event = at_rest(fields, float64_weight=self._float64_weight), event

    def _ends(self, fields: State) -> bool:
        return bool(ends(fields, self.size, select))

    def _require_still_right(self, after: State, flushing: bool = False) -> None:
        """A changed ``.grad`` is right only where it is the window's true gradient: the last moment of a window divided by 1."""
        undivided = divisor(after, self.options, select) == 1
        first, strategy = after.micro_step == 1, self.strategy
        all_there = strategy.sum_in_grad or (first and strategy.keeps_micro_batch_apart and not flushing)
        true_gradient = undivided and (flushing or self._ends(after)) and all_there
        if not true_gradient or (strategy.sentinels.arrivals.disturbed and not first):
            raise changed_gradients()

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.parameters.positions()), torch.device("cpu"))
