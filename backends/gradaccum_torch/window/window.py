"""The open window of micro-batches: added to, closed, forgotten, saved, resumed. The
transitions of the core move it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor

from gradaccum import GradAccumWarning, StepResult, UsageError, kit
from gradaccum.kit import Fields, Options, State, close
from gradaccum_torch import checks
from gradaccum_torch.checks import Size, known_window_size, window_size
from gradaccum_torch.grad_scaler import Ended, ScalerLink, factor, scaled
from gradaccum_torch.parameters import Parameters, through
from gradaccum_torch.private.names import last_division
from gradaccum_torch.saving import Saved, own_copy
from gradaccum_torch.statistics import Known, Statistics, Told, as_told
from gradaccum_torch.sums.arithmetic import (
    DTYPE,
    REQUIRES_GRAD,
    UNMEASURED,
    Measured,
    measure,
    sum_dtype,
)
from gradaccum_torch.sums.buffers import (
    BufferStrategy,
    MovingStrategy,
    SeparateStrategy,
)
from gradaccum_torch.sums.strategy import GradStrategy, Strategy
from gradaccum_torch.update import Loss, Progress, Rates, Update
from gradaccum_torch.window.watch import (
    NOTHING_SEEN,
    PASSES,
    Allowed,
    Event,
    Given,
    MicroBatch,
    Place,
    place_of,
    share_loop,
)
from gradaccum_torch.workers.interface import Stages, Workers

_LEFTOVERS = (
    "gradaccum: each step() came after {passes} backward passes of its loop, which"
    " count as one micro-batch. Most likely two lines of the old loop are left: `if (i"
    " + 1) % {passes} == 0:` around step(), and `loss / {passes}`. Delete both, so that"
    " step() follows each backward pass. Or a trainer accumulates too: leave its"
    " gradient_accumulation_steps at 1."
)

_DIVIDED = (
    "gradaccum: the loss is divided by {steps}, and a window of {steps} micro-batches"
    " is divided by itself. Most likely `loss / {steps}` is left of the old loop, and"
    " each update is {steps} times too small: delete the division."
)
_WRITTEN = (
    "gradaccum: parameters changed inside a window, most likely by"
    " model.load_state_dict(), so that its micro-batches have gradients of different"
    " models. Call opt.flush() or opt.discard() before it."
)
_WEIGHED_TWICE = (
    "gradaccum: a second loss came with a weight before step(), so that both count as"
    " one micro-batch of that weight. Each micro-batch needs a step() of its own. For"
    " several losses of one micro-batch, call opt.weigh(n) once, and then"
    " opt.backward(loss) for each."
)


class Last(NamedTuple):
    """The outcome of the last ``step``, ``flush`` or ``discard``, and the norm of the
    last window that closed.
    """

    applied: bool
    skipped: bool
    overflow: bool
    grad_norm: float


_NOTHING_CLOSED = Last(False, False, False, 0.0)


class Begun(NamedTuple):
    """The facts about the open window that hold until its end."""

    size: Size
    """Looked up once, so that a schedule cannot change it under way."""
    rates: Rates | None
    """The learning rates with which it began; None: it may have any."""


class Follower(Protocol):
    """A scheduler that moves once per update."""

    def follow(self) -> None:
        """Move if an update was applied since the last move."""


class Verdict(NamedTuple):
    """The decision on the window that ends."""

    fields: State
    """Its state, with the loss scale as a `torch.amp.GradScaler` has it."""
    decision: kit.Decision
    unclipped: float
    """The divisor without clipping."""
    strayed: bool
    """The model may differ from the rounded masters."""
    divided: tuple[Fields, Options]
    """The state and the options by which the sum and the losses are divided."""


class Window:
    """The open window: everything between two updates.

    The state is in Python numbers: a micro-batch costs a few comparisons, and no wait
    for the device.
    """

    def __init__(
        self,
        parameters: Parameters,
        options: Options,
        update: Update,
        scaler: ScalerLink | None,
        workers: Workers,
    ) -> None:
        self._parameters, self._options, self.update = parameters, options, update
        self._scaler, self.workers, self._scale_in_use = (
            scaler,
            workers,
            options.scale_rule != kit.ScaleRule(),
        )
        self._said: set[str] = set()
        """The warnings that were given."""
        self._divided = False
        """The loss under way is divided by the steps already."""
        self.listeners = kit.Listeners()
        self.schedulers: WeakSet[Follower] = WeakSet()
        """Those that follow the updates."""
        self._statistics = Statistics(options)
        self._use_of_weights = kit.use_of_weights(options)
        self._measures = kit.measures(options)
        """The norm of a window's sum is needed."""
        self._plan = Plan(parameters, options, workers)
        self.strategy = self._plan.strategy()
        self._begun, self._passes = Begun(None, None), PASSES[0]
        self.sizes = kit.Sizes(options.reduction)
        self._fields = kit.at_rest(
            kit.initial_state(options.scale_rule.init_scale),
            float64_weight=self._plan.float64_weight,
        )
        self._loaded: State | None = None
        """The state that was loaded last."""
        self._last = _NOTHING_CLOSED
        self._expect()

    @property
    def result(self) -> StepResult:
        fields, known = self._fields, self._statistics
        counted = fields.loss_scale, fields.micro_step, fields.optimizer_step
        return StepResult(*self._last, *counted, known.loss)

    @property
    def updates(self) -> int:
        return int(self._fields.optimizer_step)

    @property
    def micro_step(self) -> int:
        return int(self._fields.micro_step)

    @property
    def was_just_loaded(self) -> bool:
        """True if nothing was counted since a state with updates was loaded."""
        return self._fields is self._loaded and self.updates > 0

    @property
    def size(self) -> Size:
        """The size of the open window."""
        return self._begun.size

    @property
    def sum_dtypes(self) -> list[torch.dtype]:
        return self._plan.sum_dtypes

    def is_under_way(self) -> bool:
        """True if a window is open, or the micro-batch that opens one has begun."""
        return bool(self._fields.micro_step or self._known.given) or self.strategy.begun

    @property
    def is_micro_batch_begun(self) -> bool:
        """True if a backward pass has delivered something since the last step."""
        return self._known.arrived > 0

    @property
    def _known(self) -> MicroBatch:
        return self.strategy.watch.known

    def _tell(
        self, weight: float, given: Given, *losses: Told, weighed: bool = False
    ) -> None:
        watch = self.strategy.watch
        watch.known = watch.known.told(weight, given, *losses, weighed=weighed)

    def weigh(self, weight: float) -> None:
        known = self._known
        again = known.weighed and bool(known.given or known.arrived)
        self._tell(weight, Given.NOT, weighed=True)
        if again:
            self.strategy.watch.known = self._known._replace(weighed_again=True)

    def _weight(self, weight: float | None) -> float:
        if weight is not None:
            return weight
        known = self._known
        return (
            known.weight
            if known.weighed
            else float(kit.given_weight(None, self._use_of_weights))
        )

    def backward(
        self, loss: Tensor, given: float | None, arguments: Mapping[str, Any]
    ) -> None:
        """Differentiate `loss`, shape ``()``, times weight and loss scale; with weight
        0 only if other workers wait.
        """
        watch, losses, weight = (
            self.strategy.watch,
            tuple[Told, ...](),
            self._weight(given),
        )
        # Refuses another weight before the pass.
        known = watch.known.told(weight, Given.TO_BACKWARD)
        if known.weighed_again or (
            given is not None and known.weighed and watch.known.given
        ):
            self.warn(_WEIGHED_TWICE)
        self._look_for_division(loss)
        if weight:
            self._differentiate(loss, weight, arguments)
            gradient = arguments.get("gradient")
            losses = (as_told(loss if gradient is None else loss.detach() * gradient),)
        elif (taking_part := self.workers.taking_part()) is not None:
            with taking_part:
                self._differentiate(checks.require_graph(loss), weight, arguments)
        elif self.workers.group is not None:
            checks.require_no_collective(loss)
        watch.known = watch.known.told(
            weight, Given.TO_BACKWARD, *losses, weighed=given is not None
        )

    def begin_weightless(self) -> None:
        """Prepare for a loss, scaled already, that adds no weight."""
        self._tell(0.0, Given.SCALED, weighed=True)

    def scale(self, loss: Tensor) -> Tensor:
        weight = self._weight(None)
        if self._known.weighed_again:
            self.warn(_WEIGHED_TWICE)
        self._look_for_division(loss)
        self._tell(weight, Given.SCALED, as_told(loss))
        return scaled(loss, weight, self._fields, self._options, self._scaler)

    def note_scaled(self) -> None:
        self._tell(self._known.weight, Given.SCALED)

    def evaluate(self, closure: Callable[[], Loss]) -> Loss:
        """Run `closure`, and count its loss unless it was passed already, or a gradient
        had arrived before.
        """
        arrived = self._known.arrived
        # The user may have switched gradients off around step().
        with torch.enable_grad():
            loss = closure()
        if not self._known.given:
            if loss is None and not self._known.arrived and not self._holds_users():
                # A trainer's way to leave a micro-batch out.
                self._tell(0.0, Given.TO_BACKWARD, weighed=True)
            self.strategy.watch.known = self._known._replace(
                losses=() if arrived else (as_told(loss),)
            )
        return loss

    def zero_grad(self, set_to_none: bool) -> None:
        self.strategy.zero_grad(set_to_none, first=self._fields.micro_step == 0)

    def groups_changed(self) -> None:
        self._parameters.groups_changed()
        self.workers.parameters_changed()
        self.forget_rates()
        self._plan, old = (
            Plan(self._parameters, self._options, self.workers),
            self.strategy,
        )
        self.strategy = self._plan.carried_over(old)
        if self.strategy is not old:
            self._expect()

    def add(self) -> bool:
        """End the micro-batch: check it, add it, count it. Return whether the window is
        full.
        """
        fields, watch = self._fields, self.strategy.watch
        if first := fields.micro_step == 0:
            self._begun = Begun(
                window_size(self._options, fields.optimizer_step),
                self.update.rates(),
            )
            # A callable may have said 1 when the last window ended.
            if self._begun.size != 1:
                self._parameters.sample.note()
                if self.strategy.expects:
                    self.strategy.expect(self._begun.size)
        known = watch.known
        weight = known.weight
        if (
            self.update.progress is not Progress.NOT_BEGUN
            or known.under_way
            or self.workers.held != "own"
        ):
            self._require_whole("step()")
        if known.weighed_again and not known.given:
            self.warn(_WEIGHED_TWICE)
        if self._divided:
            self._divided = False
            if len(known.losses) == 1:
                self.warn(_DIVIDED.format(steps=self._begun.size))
        if not known.weighed and self._use_of_weights is not None:
            kit.given_weight(None, self._use_of_weights)
        if (
            self._scale_in_use
            or known.given
            or known.weighed
            or known.arrived == Event.MULTIPLIED_PASS
        ):
            watched = watch.allowed is not Allowed.ALL
            known.require_scaled(
                factor(weight, fields, self._options),
                scales=self._scale_in_use,
                watched=watched,
            )
        if not watch.intact():
            self._require_true_gradient(
                State(*kit.accumulate(fields, weight, True, kit.select))
            )
        elif not known.arrived:
            self._require_backward(known)
        if watch.places is not None:
            self._look_for_leftovers(watch.places, place_of(sys._getframe(1)))
        if not first and self._begun.rates not in (None, self.update.rates()):
            self.warn(kit.RATE_MOVED)
        if first and not self._plan.holds():
            self.groups_changed()
        self.sizes.weighed = known.weighed
        losses = (
            ()
            if known.losses and known.arrived >= Event.PLAIN_PASS and known.is_plain
            else known.losses
        )
        finite, self._passes = (
            self.strategy.take(self._begun.size, self.update.leave_half_made),
            PASSES[0],
        )
        if self._scaler is not None:
            self._scaler.count(first=first)
        self._fields = kit.at_rest(
            kit.accumulate(fields, weight, finite, kit.select),
            float64_weight=self._plan.float64_weight,
        )
        self.strategy.watch.known = NOTHING_SEEN  # It may be another one by now.
        if self.update.progress is not Progress.NOT_BEGUN:
            self.update.forget()
        if not finite or any(self._last[:3]):
            self._last = Last(False, False, not finite, self._last.grad_norm)
        self._statistics.counted(fields, weight, finite, losses)
        return bool(kit.ends(self._fields, self._begun.size, kit.select))

    def close(self, denominator: float | None = None) -> None:
        """End a window of at least one micro-batch, whose sum is divided by its weight
        or `denominator`.
        """
        if not self._plan.holds_dtypes():
            raise checks.cast_in_window_error()
        if self._parameters.sample.is_changed():
            self.warn(_WRITTEN)
        if self.workers.several:
            self._join()
            if not self.workers.joined:
                return
        if self.workers.stages is not None:
            self._add_tied(self.workers.stages)
        self._fields, decision, *_ = verdict = self._verdict(self._fields, denominator)
        try:
            if decision.apply:
                self.update.make(
                    self.strategy, decision.divisor, verdict.unclipped, verdict.strayed
                )
            else:
                self.update.leave_half_made()
        finally:
            if self.update.progress is Progress.MADE or not decision.apply:
                self._finish(verdict)
                self.update.forget()

    def close_part(self, number: int, belongs: Callable[[Tensor], bool]) -> None:
        """Make the update of the parameters that `belongs` is true of; the window stays
        open for the others.

        Where the decision needs no norm, it is the same for each part. All workers give
        a part the same `number`.
        """
        fields, positions, sums = (
            self._fields,
            self._parameters.positions(),
            self.strategy.release(),
        )
        self._parameters.sample.forget()
        now = [belongs(each) for each in positions]
        self.strategy.load(
            [total if due else None for total, due in zip(sums, now, strict=True)]
        )
        later = [None if due else total for total, due in zip(sums, now, strict=True)]
        del sums
        if self.workers.several:
            self._join(number)
        with self._parameters.only(
            each for each, due in zip(positions, now, strict=True) if due
        ):
            verdict = self._verdict(self._fields, None)
            if verdict.decision.apply:
                self.update.make(
                    self.strategy,
                    verdict.decision.divisor,
                    verdict.unclipped,
                    verdict.strayed,
                )
            self.strategy.clear()
        self.update.forget()
        self.workers.part_ended()
        self._fields = fields
        self.strategy.load(later)

    def reported(self, close: Callable[[], None]) -> None:
        """Call `close`, and then the listeners with each window closed."""
        if not self.listeners.added:
            return close()
        with self.listeners.settled():
            close()

    def flush(self, denominator: float | None = None) -> None:
        if denominator is not None:
            kit.require_denominator(
                denominator, self._options, several=self.workers.several
            )
        self._require_whole()
        if self._known.given or (self._fields.micro_step and self.strategy.begun):
            raise checks.unfinished_error("flush()")
        if self._fields.micro_step and not self.strategy.watch.intact():
            self._require_true_gradient(self._fields, flushing=True)
        self._last = _NOTHING_CLOSED._replace(grad_norm=self._last.grad_norm)
        self.workers.flush(
            partial(self.close, denominator),
            self._between_windows,
            is_open=self._fields.micro_step > 0,
        )

    def discard(self) -> None:
        self.strategy.clear()
        self.update.forget()
        self._workers_ended()
        self._set(kit.discard(self._fields), self._last.grad_norm)
        self._statistics.discard()

    def regroup(self, workers: Workers) -> None:
        self.workers, self._plan = (
            workers,
            Plan(self._parameters, self._options, workers),
        )

    def between_windows(self) -> Saved:
        saved = self.save()
        return saved._replace(
            fields=State(*kit.discard(saved.fields)),
            sums={},
            known=saved.known._replace(loss=0.0),
        )

    def save(self) -> Saved:
        """Return the window, with the tensors themselves; may wait for the device."""
        self._require_whole("state_dict()")
        if self._fields.micro_step:
            self.strategy.require_counted("state_dict()")
        fields = self.fields_to_save()
        # Between two windows the schedule, which may have come to its end, is not
        # asked.
        terms = kit.terms_of(
            self._options._replace(
                steps=self._begun.size if fields.micro_step else None
            ),
            fields.optimizer_step,
        )
        held = {
            index: total
            for index, total in enumerate(
                self.strategy.sums() if fields.micro_step else ()
            )
            if total is not None
        }
        known = self._statistics.saved(fields.micro_step)
        return Saved(
            fields,
            terms,
            self._last.grad_norm,
            held,
            self._parameters.masters_by_position(),
            self.workers.place,
            known,
        )

    def resumed(self, saved: Saved) -> State:
        """Return the state to resume with; refuse an open window of other options or
        another worker.
        """
        if (
            self._scaler is not None
            and not saved.fields.micro_step
            and (saved.terms is None or saved.terms.scale != "dynamic")
        ):
            # The scaler is the user's, and may have been loaded from a file of its own.
            return self._scaler.current(saved.fields)
        return saved.resumed(self._options, self.workers.place)

    def restore(self, saved: Saved) -> None:
        """Resume with `saved`, whose fields `resumed` returned."""
        self.strategy.clear()
        self.strategy.load(
            [
                own_copy(saved.sums.get(index), each)
                for index, each in enumerate(self._parameters.positions())
            ]
        )
        self._parameters.load(saved.masters)
        self._start_with(saved.fields, saved.grad_norm, saved.known)
        self._loaded = self._fields

    def pickled(self) -> dict[str, Any]:
        """Return the state for `unpickle`, in mid-micro-batch too."""
        state = {"fields": self.fields_to_save(), "grad_norm": self._last.grad_norm}
        return {
            **state,
            "strategy": self.strategy.pickled(),
            "known": self._statistics.saved(self._fields.micro_step),
        }

    def unpickle(self, pickled: Mapping[str, Any]) -> None:
        self._start_with(pickled["fields"], pickled["grad_norm"], pickled["known"])
        self.strategy.unpickle(pickled["strategy"])

    def fields_to_save(self) -> State:
        return (
            self._fields if self._scaler is None else self._scaler.current(self._fields)
        )

    def forget_rates(self) -> None:
        self._begun = self._begun._replace(rates=None)

    def warn(self, text: str) -> None:
        """Say `text` once, at the line of the user's that called."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, GradAccumWarning, stacklevel=_levels_to_user())

    def _look_for_division(self, loss: Tensor) -> None:
        """Note if `loss`, of the first window, is divided by the steps beforehand."""
        fields, reduction = self._fields, self._options.reduction
        if fields.optimizer_step or fields.skipped_windows or reduction == "sum":
            return
        size = self._begun.size
        if not fields.micro_step:
            size = known_window_size(self._options, 0)
        if not isinstance(size, int) or size == 1:
            return
        division = last_division(loss)
        if division is None or not math.isclose(division.divisor, size):
            return
        makes_mean = division.of_sums and reduction == "mean"
        self._divided = division.terms != size and not makes_mean

    def _look_for_leftovers(self, places: list[list[Place]], step: Place) -> None:
        """Warn if the first two micro-batches had equally many backward passes, all
        from one place in the loop that makes the `step`.

        Several losses of one micro-batch have several places, or a loop of their own.
        """
        first, *second = places
        suspect = (
            len(places[-1]) > 1
            and len(set(places[-1])) == 1
            and self._begun.size not in (1, None)
        )
        if suspect and not second:
            return places.append([])
        self.strategy.watch.ask_no_more()
        if suspect and second == [first] and share_loop(first[0], step):
            self.warn(_LEFTOVERS.format(passes=len(first)))

    def _require_backward(self, known: MicroBatch) -> None:
        if (
            known.given is Given.TO_BACKWARD
            or known.weighed
            or PASSES[0] != self._passes
            or self._holds_users()
        ):
            return
        raise checks.no_backward_error()

    def _holds_users(self) -> bool:
        apart = self.strategy.keeps_micro_batch_apart or self._fields.micro_step == 0
        return self.strategy.watch.holds_users(self._parameters.unique(), apart=apart)

    def _between_windows(self) -> None:
        """Repeat between two windows of one call what the user's loop does on the other
        workers.
        """
        self.listeners.tell()
        for scheduler in self.schedulers:
            scheduler.follow()

    def _differentiate(
        self, loss: Tensor, weight: float, arguments: Mapping[str, Any]
    ) -> None:
        self._require_whole()
        factored = scaled(loss, weight, self._fields, self._options, self._scaler)
        self.strategy.backward(
            factored,
            arguments,
            first=self._fields.micro_step == 0,
            multiplied=factored is not loss,
        )

    def _join(self, part: int | None = None) -> None:
        fields = self._fields
        if self._scaler is not None and fields.micro_step == 0:
            self._scaler.count(first=True)
        own = self.strategy.sums()
        joined = self.workers.join(
            fields,
            own,
            self._plan.zeros,
            self._statistics.numbers(fields.micro_step),
            part,
        )
        self._statistics.join(joined.numbers)
        if joined.sums is not own:
            self.strategy.load(joined.sums)
            self.strategy.pack(joined.packed)
        self._fields = self._at_rest(joined.fields)

    def _add_tied(self, stages: Stages) -> None:
        own = self.strategy.sums()
        added = stages.add_tied(self._fields, own, self._plan.zeros)
        if added is not own:
            self.strategy.load(added)
            self.workers.hold("of all")

    def _workers_ended(self) -> None:
        if self.workers.several or self._options.separate_sums:
            self.workers.window_ended()
        if self.workers.stages is not None:
            self.workers.stages.window_ended()
            self.workers.hold("own")

    def _verdict(self, fields: State, denominator: float | None) -> Verdict:
        fields, measured, strayed = self._measured(fields)
        # Clipping comes after this: a sum that leaves the range before it is an
        # overflow, as it would be in a large batch.
        divided, options = cast(Fields, fields), self._options
        if denominator is not None:
            divided, options = kit.with_denominator(
                fields, denominator, options, kit.select
            )
        unclipped = kit.divisor(divided, options, kit.select)
        norm, finite = (
            measured.norm,
            measured.finite
            and (not self._measures or self.strategy.fits(measured.norm, unclipped)),
        )
        if self.workers.stages is not None and self._measures:
            norm, finite = self.workers.stages.agreed(
                fields, self.strategy.sums(), norm, finite
            )
        decision = kit.Decision(
            *kit.decide(divided, norm, finite, options, kit.select, self._plan.largest)
        )
        return Verdict(fields, decision, unclipped, strayed, (divided, options))

    def _measured(self, fields: State) -> tuple[State, Measured, bool]:
        """Return the state, the norm, and whether the model may differ from the
        masters, with at most one wait.
        """
        sums = self.strategy.settle()
        if not self._measures:
            return fields, UNMEASURED, self._parameters.may_have_strayed()
        strayed = self._parameters.strayed() if self._parameters.masters else ()
        scale = () if self._scaler is None else self._scaler.notes()
        losses, of_scale = self._statistics.unread, len(scale)
        measured = measure(sums, (*scale, *losses, *strayed))
        if self._scaler is not None:
            fields = self._scaler.used(fields, measured.notes[:of_scale])
        if losses:
            self._statistics.read(measured.notes[of_scale : of_scale + len(losses)])
        return fields, measured, any(measured.notes[of_scale + len(losses) :])

    def _require_true_gradient(self, after: State, flushing: bool = False) -> None:
        if kit.divisor(after, self._options, kit.select) != 1 or not (
            flushing or kit.ends(after, self._begun.size, kit.select)
        ):
            raise self.strategy.changed_error()
        self.strategy.require_true_gradient(
            first=after.micro_step == 1, flushing=flushing
        )

    def _finish(self, verdict: Verdict) -> None:
        ended, decision = self._fields, verdict.decision
        self._statistics.window_ended(*verdict.divided)
        # A `torch.amp.GradScaler` moves the loss scale by its own rule.
        options = (
            self._options
            if self._scaler is None
            else self._options._replace(scale_rule=self._scaler.rule)
        )
        after = close(ended, decision.apply, decision.overflow, options, kit.select)
        self._fields = kit.at_rest(after, float64_weight=self._plan.float64_weight)
        self._last = Last(
            decision.apply, not decision.apply, decision.overflow, decision.grad_norm
        )
        self._parameters.sample.forget()
        through(self.strategy.window_ended)
        self._workers_ended()
        if self.strategy.expects:
            self._expect()
        if self._scaler is not None:
            self._scaler.window_ended(
                Ended(self._fields, ended.loss_scale, decision.overflow)
            )
        if self.listeners.added:
            self.listeners.note(
                self.result, weight=ended.weight, micro_batches=ended.micro_step
            )

    def _start_with(self, fields: State, grad_norm: float, known: Known) -> None:
        self._begun = Begun(
            (
                window_size(self._options, fields.optimizer_step)
                if fields.micro_step
                else None
            ),
            None,
        )
        self.update.forget()
        self._statistics.restore(known, fields.micro_step)
        self._workers_ended()
        self._set(fields, grad_norm)
        self._expect()
        if self._scaler is not None:
            self._scaler.write(fields)

    def _expect(self) -> None:
        if self.strategy.expects:
            self.strategy.expect(
                known_window_size(self._options, self._fields.optimizer_step)
            )

    def _set(self, fields: Fields, grad_norm: float) -> None:
        self._parameters.sample.forget()
        self._fields, self._last = (
            self._at_rest(fields),
            _NOTHING_CLOSED._replace(grad_norm=grad_norm),
        )

    def _at_rest(self, fields: Fields) -> State:
        return kit.at_rest(fields, float64_weight=self._plan.float64_weight)

    def _require_whole(self, call: str | None = None) -> None:
        """Raise unless pass and update were made as a whole, and before `call` the sum
        is this worker's own.
        """
        self.update.require_whole()
        self.strategy.require_whole()
        if call is not None:
            self.workers.require_own_sum(call)
            if self.workers.stages is not None:
                self.workers.stages.require_own_sum(call)


def _levels_to_user() -> int:
    """Return the ``stacklevel`` at which a warning of the caller is the user's."""
    level = 2
    frame = sys._getframe(level)
    while frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
        level += 1
    return level


def _is_ours(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("gradaccum", "gradaccum_torch", "contextlib", "torch")


class Plan:
    """The choice of the place of a window's sum."""

    def __init__(
        self, parameters: Parameters, options: Options, workers: Workers
    ) -> None:
        self._parameters, self._accumulate_dtype, self._workers = (
            parameters,
            options.accumulate_dtype,
            workers,
        )
        seen = parameters.positions()
        self._ids, self._dtypes, self._trained = (
            list(map(id, seen)),
            list(map(DTYPE, seen)),
            list(map(REQUIRES_GRAD, seen)),
        )
        self.sum_dtypes = [
            sum_dtype(parameter, options.accumulate_dtype) for parameter in seen
        ]
        """The dtype of each parameter's sum."""
        self.float64_weight = torch.float64 in self.sum_dtypes
        self.largest = kit.largest_number(float64_weight=self.float64_weight)
        """The largest finite number of the dtype in which the sums are divided."""
        self._kind, self._drops = (
            _kind(self._dtypes, self.sum_dtypes, options),
            options.on_overflow == "drop_micro_batch",
        )
        if workers.strategy is not None and self._kind is not GradStrategy:
            fix = "Wrap the optimizer after the cast."
            expected, found = (
                "parameters in the dtype of their sums beside gradient_sync=",
                "parameters that were cast",
            )
            raise kit.explain(
                UsageError, "model.to(dtype)", expected=expected, found=found, fix=fix
            )

    def holds(self) -> bool:
        """True if nothing has changed since: casting, freezing and replacing call
        nothing here.
        """
        seen = self._parameters.positions()
        return (
            list(map(id, seen)) == self._ids
            and list(map(DTYPE, seen)) == self._dtypes
            and list(map(REQUIRES_GRAD, seen)) == self._trained
        )

    def holds_dtypes(self) -> bool:
        return list(map(DTYPE, self._parameters.positions())) == self._dtypes

    def zeros(self, position: int) -> Tensor:
        return torch.zeros_like(
            self._parameters.positions()[position], dtype=self.sum_dtypes[position]
        )

    def strategy(self) -> Strategy:
        if self._workers.strategy is not None:
            return self._workers.strategy(self._parameters, self._accumulate_dtype)
        return self._kind(self._parameters, self._accumulate_dtype, self._drops)

    def carried_over(self, old: Strategy) -> Strategy:
        if self._workers.strategy is not None or type(old) is self._kind:
            old.groups_changed()
            return old
        known = old.watch.known
        sums, new = old.release(), self.strategy()
        new.load(
            [
                None if total is None else total.to(dtype)
                for total, dtype in zip(sums, self.sum_dtypes, strict=True)
            ]
        )
        new.watch.reset(known)
        return new


def _kind(
    dtypes: Sequence[torch.dtype], sum_dtypes: Sequence[torch.dtype], options: Options
) -> type[Strategy]:
    """Return the strategy: ``.grad`` unless the sum must be apart."""
    if options.separate_sums:
        return SeparateStrategy
    if options.on_overflow == "drop_micro_batch":
        return BufferStrategy
    return GradStrategy if sum_dtypes == dtypes else MovingStrategy
