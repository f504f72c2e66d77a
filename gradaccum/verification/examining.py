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
        self._notes: list[str] = []

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
        if self._conditions is not None:
            self._find_what_moves(measured)
        return VerificationReport(
            not self._causes and not moved(measured),
            tuple(self._causes),
            measured,
            self._bench.units(experiments.TRAINING),
            ROUNDING_LIMIT,
            tuple(partition.words for partition in self._bench.partitions),
            tuple(self._notes),
        )

    def _take(self, finding: experiments.Finding) -> None:
        self._causes += finding.causes
        self._conditions = finding.go_on

    def _find_what_moves(self, measured: Mapping[str, float]) -> None:
        self._errors = measured
        for ask in (experiments.replayed, experiments.stateless):
            if self._conditions is not None and moved(self._errors):
                self._take(ask(self._bench, self._conditions))
                self._measure()
        if self._conditions is None:
            return
        missing = experiments.missing_gradients(self._bench, self._conditions)
        if not moved(self._errors):
            self._note_missing(missing)
            return
        if not missing and experiments.by_place(
            self._bench, self._conditions, moved(self._errors)
        ):
            self._causes += (
                []
                if any(cause.kind == "shared_randomness" for cause in self._causes)
                else [causes.numbers_by_place()]
            )
            return
        self._take(
            experiments.separate(
                self._bench,
                self._conditions,
                {
                    name: missing[name]
                    for name in moved(self._errors)
                    if name in missing
                },
            )
        )
        self._measure()
        if self._conditions is not None and moved(self._errors):
            self._find_in_the_loss(self._conditions, moved(self._errors), missing)

    def _measure(self) -> None:
        if self._conditions is not None and self._conditions != experiments.TRAINING:
            self._errors = self._bench.errors(self._conditions)

    def _find_in_the_loss(
        self, conditions: Conditions, names: tuple[str, ...], missing: Mapping[str, str]
    ) -> None:
        infinite = (
            experiments.infinite_parts(self._bench, conditions)
            if any(map(math.isinf, self._errors.values()))
            else {}
        )
        times = next(iter(infinite.values()), "")
        weighted, off = experiments.right_weights(self._bench, conditions, times)
        if weighted is not None:
            self._causes.append(weighted)
            return
        if infinite:
            self._causes.append(causes.not_finite_part(list(infinite), times))
            names = tuple(name for name in names if name not in infinite)
        counted, explained = experiments.counted_terms(self._bench, conditions, names)
        self._causes += [counted] if counted is not None else []
        left = tuple(name for name in names if name not in explained)
        absent = [name for name in left if name in missing]
        fitted = [
            name
            for name in self._bench.subject.names
            if name not in explained and name not in infinite
        ]
        several = (
            experiments.several_counts(self._bench, conditions, fitted)
            if left
            else None
        )
        if several is not None:
            self._causes.append(several)
        elif absent:
            self._causes.append(causes.missing_gradients(absent, missing[absent[0]]))
        elif left:
            self._causes.append(causes.coupled_loss(left, off))

    def _note_missing(self, missing: Mapping[str, str]) -> None:
        """Note parameters that lack a gradient in some micro-batches without harm, and
        those that have none at all.
        """
        reached = self._bench.large(experiments.TRAINING).gradients
        unused = [
            name
            for name in self._bench.subject.names
            if name not in reached and name not in missing
        ]
        if unused:
            self._notes.append(f"{causes.listed(unused)}: the loss does not reach it.")
        if missing and not self._causes:
            where = next(iter(missing.values()))
            self._notes.append(
                f"{causes.listed(list(missing))}: no gradient in {where}; it counts as"
                " zero, which is right here."
            )
