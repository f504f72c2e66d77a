"""What an open window holds: its state, the micro-batch under way and the sum; how it is saved, resumed and copied.

The state is in Python numbers, so that a micro-batch costs one transition and a few comparisons, and no wait for the device. What happens
to a window is in `window`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

import torch

from gradaccum import StepResult
from gradaccum.kit import Fields, Options, ScaleRule, State, at_rest, initial_state, terms_of
from gradaccum_torch.checks import Size, known_window_size, window_size
from gradaccum_torch.closing import Closing
from gradaccum_torch.entry import Saved, own_copy
from gradaccum_torch.grad_scaler import ScalerLink
from gradaccum_torch.knowledge import Knowledge, Known
from gradaccum_torch.listening import NOBODY
from gradaccum_torch.masters import Parameters
from gradaccum_torch.micro_batch import NOTHING_SAID
from gradaccum_torch.plan import Plan
from gradaccum_torch.update import Update
from gradaccum_torch.workers import Workers

NOTHING_CLOSED = (False, False, False)


class Follower(Protocol):
    """A scheduler that moves once per update."""

    def follow(self) -> None:
        """Move if an update was applied since the last move."""


class WindowState:
    """Everything that there is between two updates.

    Args:
        parameters: those that are summed over.
        options: those of `gradaccum.wrap`, with ``accumulate_dtype`` as a torch dtype or None.
        update: makes the updates.
        scaler: the user's `torch.amp.GradScaler`, if the loss scale is its.
        workers: those that the window is added up over.
    """

    def __init__(self, parameters: Parameters, options: Options, update: Update, scaler: ScalerLink | None, workers: Workers) -> None:
        self._parameters, self._options, self._update = parameters, options, update
        self._scaler, self._workers, self._scale_in_use = scaler, workers, options.scale_rule != ScaleRule()
        self._micro_batch, self._grad_norm, self.listening = NOTHING_SAID, 0.0, NOBODY
        self.schedulers: WeakSet[Follower] = WeakSet()
        """Those that follow the updates."""
        self._knowledge = Knowledge(options)
        self._closing = Closing(parameters, options, scaler, self._knowledge)
        self._plan = Plan(parameters, options, workers.deferred)
        self.strategy = self._plan.strategy()
        self._size: Size = None
        self._fields: State
        self._set(initial_state(options.scale_rule.init_scale))
        self._expect()

    @property
    def result(self) -> StepResult:
        """What the last event did; waits for the device where nothing else has and a loss is there."""
        fields, known = self._fields, self._knowledge
        counted = fields.loss_scale, fields.micro_step, fields.optimizer_step
        return StepResult(*self._event, self._grad_norm, *counted, known.loss, known.noise_scale)

    @property
    def updates(self) -> int:
        """The updates applied since the start."""
        return int(self._fields.optimizer_step)

    @property
    def size(self) -> Size:
        """How long it is. Between two windows the schedule is asked for the next one's."""
        return self._size if self._fields.micro_step else window_size(self._options, self._fields.optimizer_step)

    @property
    def sum_dtypes(self) -> list[torch.dtype]:
        """The dtype of each parameter's sum."""
        return self._plan.sum_dtypes

    def groups_changed(self) -> None:
        """Parameters were added, replaced, frozen or cast; if the sum must now live elsewhere, it moves there."""
        self._knowledge.groups_changed()
        self._parameters.groups_changed()
        self._plan, old = Plan(self._parameters, self._options, self._workers.deferred), self.strategy
        self.strategy = self._plan.carried_over(old)
        if self.strategy is not old:
            self._expect()

    def is_under_way(self) -> bool:
        """Whether a window is open, or the micro-batch that opens one has begun."""
        return bool(self._fields.micro_step) or self._micro_batch.noted or self.strategy.begun

    def saved(self) -> Saved:
        """The window as a checkpoint holds it, with the tensors themselves; may wait for the device."""
        self._require_whole("state_dict()")
        if self._fields.micro_step:
            self.strategy.require_counted("state_dict()", self._micro_batch.noted)
        fields = self.fields_to_save()
        # Between two windows the schedule, which may have come to its end, is not asked.
        terms = terms_of(self._options._replace(steps=self._size if fields.micro_step else None), fields.optimizer_step)
        held = {index: total for index, total in enumerate(self.strategy.sums() if fields.micro_step else ()) if total is not None}
        known = self._knowledge.saved(fields.micro_step)
        return Saved(fields, terms, self._grad_norm, held, self._parameters.masters(), self._workers.place, known)

    def resumed(self, saved: Saved) -> State:
        """The fields to go on with; an open window under other options, or of another worker, is refused."""
        if self._scaler is not None and not saved.fields.micro_step and (saved.terms is None or saved.terms.scale != "dynamic"):
            return self._scaler.current(saved.fields)  # The scaler is the user's, and may have been loaded from a file of its own.
        return saved.resumed(self._options, self._workers.place)

    def restore(self, saved: Saved) -> None:
        """Go on with `saved`, whose fields `resumed` gave and whose sums become this window's own."""
        self.strategy.clear()
        self._micro_batch = NOTHING_SAID
        self.strategy.load([own_copy(saved.sums.get(index), each) for index, each in enumerate(self._parameters.positions())])
        self._parameters.load(saved.masters)
        self._start_with(saved.fields, saved.grad_norm, saved.known)

    def pickled(self) -> dict[str, Any]:
        """The state for `unpickle` of a copy, in the midst of a micro-batch too."""
        state = {"fields": self.fields_to_save(), "grad_norm": self._grad_norm, "micro_batch": self._micro_batch}
        return {**state, "strategy": self.strategy.pickled(), "known": self._knowledge.saved(self._fields.micro_step)}

    def unpickle(self, pickled: Mapping[str, Any]) -> None:
        """Go on with what `pickled` gave."""
        self._start_with(pickled["fields"], pickled["grad_norm"], pickled["known"])
        self._micro_batch = pickled["micro_batch"]
        self.strategy.unpickle(pickled["strategy"])

    def fields_to_save(self) -> State:
        """The state, with a `torch.amp.GradScaler`'s scale and tracker as they are now; may wait for the device."""
        return self._fields if self._scaler is None else self._scaler.current(self._fields)

    def _start_with(self, fields: State, grad_norm: float, known: Known) -> None:
        self._size = window_size(self._options, fields.optimizer_step) if fields.micro_step else None
        self._update.half_made, self._grad_norm = False, grad_norm
        self._knowledge.restore(known, fields.micro_step)
        self._workers.window_ended()
        self._set(fields)
        self._expect()
        if self._scaler is not None:
            self._scaler.write(fields)

    def _expect(self) -> None:
        """Tell the strategy how long the next window is, if that makes a difference to it."""
        if self.strategy.expects:
            self.strategy.expect(known_window_size(self._options, self._fields.optimizer_step))

    def _set(self, fields: Fields, event: tuple[bool, bool, bool] = NOTHING_CLOSED) -> None:
        self._fields, self._event = at_rest(fields, float64_weight=self._plan.float64_weight), event

    def _require_whole(self, call: str | None = None) -> None:
        """Neither a backward pass nor an update was made by half; and before `call` the sum is this worker's own."""
        self._update.require_whole()
        self.strategy.require_whole()
        if call is not None:
            self._workers.require_own_sum(call)
