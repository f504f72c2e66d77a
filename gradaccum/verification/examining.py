"""The order of the experiments: a cause that would disturb a later experiment is looked
for, and removed, first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gradaccum.errors import (
    ArgumentValueError,
    GradAccumError,
    explain,
    require_int,
)
from gradaccum.options import require_reduction
from gradaccum.splitting import require_items
from gradaccum.verification import causes, experiments
from gradaccum.verification.measuring import ROUNDING_LIMIT, Bench, Way, moved
from gradaccum.verification.report import Cause, VerificationReport
from gradaccum.verification.subject import Conditions, Subject

_OF_A_PART = (
    "gradaccum: verify runs loss_fn on parts of the batch, each with any of its items."
    " If it takes the whole batch, some items belong together: give the batch an axis of"
    " such groups, and flatten it in loss_fn."
)
USUAL_STEPS = 4
"""The number of micro-batches where none is given, if there are as many items."""


def examine(
    subject: Subject, steps: object, reduction: object = "mean"
) -> VerificationReport:
    """Compare the partitions of the subject's batch, and look for the cause where the
    gradient moves.

    Runs the batch some thirty times if all is right, some two hundred times if not.

    Raises:
        ArgumentTypeError, ArgumentValueError: `steps` is no int from 2 to the number of
            items, the batch has no item, or `reduction`, by which accumulation will add
            up, is unknown.
        Exception: what the loss raises, with a note.
    """
    require_items(subject.items)
    if steps is None:
        if subject.items < 2:
            raise explain(
                ArgumentValueError,
                "batch",
                expected="two items at least",
                found="one, which is no more than a micro-batch",
                fix="Bring a larger batch.",
            )
        steps = min(USUAL_STEPS, subject.items)
    number = require_int(
        "steps",
        steps,
        at_least=2,
        fix="Write steps=2 or more: one micro-batch is the large batch.",
    )
    if number > subject.items:
        fix = f"Write steps={subject.items} or less, or bring a larger batch."
        raise explain(
            ArgumentValueError,
            "steps",
            expected=f"at most the {subject.items} items of the batch",
            got=number,
            fix=fix,
        )
    bench = Bench(subject, number, Way(require_reduction(reduction)))
    try:
        return _Examination(bench).report()
    except Exception as error:
        if not isinstance(error, GradAccumError):
            error.add_note(_OF_A_PART)
        raise


class _Examination:
    """The experiments and their findings so far."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._causes: list[Cause] = []
        self._conditions: Conditions | None = experiments.TRAINING
        self._errors: Mapping[str, float] = {}
        """By parameter, under the conditions."""
        self._infinite: dict[str, str] = {}
        """The parameters whose gradient is infinite in some micro-batches, and where."""
        self._best_error: float | None = None
        """Of the best weights, in units."""
        self._without_weights: list[Conditions] = []
        """The conditions under which no weights make it right."""

    def report(self) -> VerificationReport:
        for ask in (
            experiments.finite,
            experiments.repeatable,
            experiments.linear,
            experiments.fresh_numbers,
        ):
            if self._conditions is not None:
                self._take(ask(self._bench))
        measured = self._bench.errors(experiments.TRAINING)
        self._errors = measured
        if self._conditions is not None and moved(measured):
            self._find_what_moves()
        return VerificationReport(
            not self._causes and not moved(measured),
            tuple(self._causes),
            measured,
            self._bench.units(experiments.TRAINING),
            ROUNDING_LIMIT,
            tuple(partition.words for partition in self._bench.partitions),
            self._notes(),
            self._bench.coefficients(self._conditions or experiments.TRAINING),
        )

    def _take(self, finding: experiments.Finding) -> None:
        self._causes += finding.causes
        if finding.go_on is not None and finding.go_on != self._conditions:
            self._errors = self._bench.errors(finding.go_on)
        self._conditions = finding.go_on

    def _find_what_moves(self) -> None:
        for ask in (experiments.replayed, experiments.stateless):
            if self._conditions is not None and moved(self._errors):
                self._take(ask(self._bench, self._conditions))
        if self._conditions is None or not moved(self._errors):
            return
        if experiments.by_place(self._bench, self._conditions, moved(self._errors)):
            if not self._causes:
                self._causes.append(causes.numbers_by_place())
            return
        if self._find_weights(self._conditions):
            return
        self._take(experiments.apart_in_evaluation(self._bench, self._conditions))
        if moved(self._errors) and not self._find_weights(self._conditions):
            self._find_in_the_loss(self._conditions, moved(self._errors))

    def _find_weights(self, conditions: Conditions) -> bool:
        """True if another reduction or other weights make it right."""
        if conditions in self._without_weights:
            return False
        self._infinite = {}
        if any(map(math.isinf, self._errors.values())):
            self._infinite = experiments.infinite_parts(self._bench, conditions)
        cause, self._best_error = experiments.right_weights(
            self._bench, conditions, next(iter(self._infinite.values()), "")
        )
        if cause is None:
            self._without_weights.append(conditions)
            return False
        self._causes.append(cause)
        return True

    def _find_in_the_loss(self, conditions: Conditions, names: tuple[str, ...]) -> None:
        infinite = self._infinite
        if infinite:
            times = next(iter(infinite.values()))
            self._causes.append(causes.not_finite_part(list(infinite), times))
            names = tuple(name for name in names if name not in infinite)
        cause, explained = experiments.counted_terms(self._bench, conditions, names)
        if cause is not None:
            self._causes.append(cause)
        left = tuple(name for name in names if name not in explained)
        if left:
            self._causes.append(causes.coupled_loss(left, self._best_error))

    def _notes(self) -> tuple[str, ...]:
        reached = self._bench.large(experiments.TRAINING).gradients
        unused = [name for name in self._bench.subject.names if name not in reached]
        if not unused:
            return ()
        return (f"{causes.listed(unused)}: the loss does not reach it.",)
