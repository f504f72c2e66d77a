"""The end of a window around its update: the workers join, the sum is measured where that is needed, and the core decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gradaccum.kit import Decision, Fields, Options, State, close, decide, divisor, ends, measures, select
from gradaccum_torch.checks import Size
from gradaccum_torch.grad_scaler import ScalerLink
from gradaccum_torch.knowledge import Knowledge
from gradaccum_torch.masters import Parameters
from gradaccum_torch.misuse import changed_gradients_error
from gradaccum_torch.norm import UNMEASURED, Measured
from gradaccum_torch.plan import Plan
from gradaccum_torch.strategy import Strategy
from gradaccum_torch.workers import Workers


class Verdict(NamedTuple):
    """What is to be done with the window that ends."""

    fields: State
    """Its state, with the loss scale as a `torch.amp.GradScaler` has it."""
    decision: Decision
    unclipped: float
    """The divisor without clipping."""
    norms: list[Tensor]
    """Of the sum; empty if it was not measured."""
    strayed: bool
    """The model may differ from the rounded masters."""


class Closing:
    """Brings windows to their verdict.

    Args:
        parameters: those that are summed over.
        options: those of `gradaccum.wrap`.
        scaler: the user's `torch.amp.GradScaler`, if the loss scale is its.
        knowledge: what the window knows.
    """

    def __init__(self, parameters: Parameters, options: Options, scaler: ScalerLink | None, knowledge: Knowledge) -> None:
        self._parameters, self._options, self._scaler, self._knowledge = parameters, options, scaler, knowledge
        self.measures = measures(options)
        """The norm of a window's sum is needed."""

    def join(self, workers: Workers, fields: State, strategy: Strategy, zeros: Callable[[int], Tensor]) -> Fields:
        """Make the sum, its weight and what is known of it those of all workers; returns the state."""
        if self._scaler is not None and fields.micro_step == 0:
            self._scaler.count(first=True)
        own = strategy.sums()
        joined = workers.join(fields, own, zeros, self._knowledge.numbers(fields.micro_step))
        self._knowledge.join(joined.numbers)
        if joined.sums is not own:
            strategy.load(joined.sums)
        return joined.fields

    def verdict(self, fields: State, strategy: Strategy, plan: Plan) -> Verdict:
        """Measure and decide."""
        if self._knowledge.measures_noise and not plan.holds():
            self._knowledge.groups_changed()
        fields, measured, strayed = self._measured(fields, strategy)
        # Clipping comes after this: a sum that leaves the range before it is an overflow, as it would be in a large batch.
        unclipped = divisor(fields, self._options, select)
        finite = measured.finite and (not self.measures or strategy.fits(measured.norm, unclipped))
        decision = Decision(*decide(fields, measured.norm, finite, self._options, select, plan.largest))
        return Verdict(fields, decision, unclipped, measured.norms, strayed)

    def closed(self, ended: State, decision: Decision) -> Fields:
        """The state after the window; a `torch.amp.GradScaler` moves the loss scale by its own rule."""
        options = self._options if self._scaler is None else self._options._replace(scale_rule=self._scaler.rule)
        return close(ended, decision.apply, decision.overflow, options, select)

    def require_true_gradient(self, after: State, size: Size, strategy: Strategy, flushing: bool = False) -> None:
        """A changed ``.grad`` is right only where it is the window's true gradient: the last moment of a window divided by 1.

        Args:
            after: the state with the micro-batch under way.
            size: of the window.
            strategy: has the sum.
            flushing: no micro-batch is under way.

        Raises:
            UsageError: it is not.
        """
        if divisor(after, self._options, select) != 1 or not (flushing or ends(after, size, select)):
            raise changed_gradients_error()
        strategy.require_true_gradient(first=after.micro_step == 1, flushing=flushing)

    def _measured(self, fields: State, strategy: Strategy) -> tuple[State, Measured, bool]:
        """The state with the loss scale in use, the norm, and whether the model may differ from the masters: one wait, or none."""
        if not self.measures:
            strategy.settle()
            return fields, UNMEASURED, self._parameters.may_have_strayed()
        strayed, scale = self._parameters.strayed(), () if self._scaler is None else self._scaler.notes()
        losses, of_scale = self._knowledge.unread, len(scale)
        measured = strategy.measure((*scale, *losses, *strayed))
        if self._scaler is not None:
            fields = self._scaler.used(fields, measured.notes[:of_scale])
        self._knowledge.read(measured.notes[of_scale : of_scale + len(losses)])
        return fields, measured, any(measured.notes[of_scale + len(losses) :])
