"""The experiments with which `gradaccum.verify` finds out why accumulation is wrong for
a loss. Each experiment changes one condition, such as the loss's scale, the random
state, the model's state, the mode (training or evaluation) or the weights.

Some causes of a wrong gradient would also affect later experiments, so the experiments
look for these causes first. If such a cause is found, the later experiments run under
conditions in which the cause has no effect, for example in evaluation mode.
`gradaccum/VERIFY.md` has a section for each kind of cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

from gradaccum.errors import ArgumentValueError, require_int
from gradaccum.options import require_reduction
from gradaccum.refusals import DIVIDED_LOSS
from gradaccum.verification.batch import Items
from gradaccum.verification.causes import CAUSES, Cause
from gradaccum.verification.comparison import (
    ROUNDING_LIMIT,
    Coefficients,
    Comparison,
    Weighting,
    is_finite,
    partitions,
)
from gradaccum.verification.report import VerificationReport
from gradaccum.verification.subject import Subject

USUAL_STEPS = 4
SCALES = (2.0**16, 2.0**8)
"""The factors by which the loss is multiplied in order to test whether the gradient is
proportional to the loss. The factors are powers of two, because multiplying by a power
of two causes no rounding error. The first factor is the initial scale of
`torch.amp.GradScaler`.
"""
FLOAT16_ROUNDOFF = 2.0**-10
"""The distance from 1 to the next larger float16 number."""
SMALLEST_FLOAT16 = 2.0**-24
"""The smallest positive float16 number."""
OTHER_SEED = 0x5EED1
"""A seed that users are unlikely to choose."""
SAME = 1e-3
"""The tolerance of `are_weights`. A coefficient counts as positive if it is at least
this number. The sum of the coefficients counts as 1 if it differs from 1 by less than
this number plus the estimated error of the sum.
"""
OF_A_PART = (
    "gradaccum: verify runs loss_fn on arbitrary subsets of the batch's items. If"
    " loss_fn accepts only the full batch, because some items belong together, make"
    " each group of such items one item of the batch, and flatten the groups in"
    " loss_fn."
)


def examine(
    subject: Subject, steps: object, reduction: object = "mean"
) -> VerificationReport:
    """Find out whether accumulation is correct for the subject's loss, and return a
    report. The subject's batch is split into micro-batches in several ways, and each
    accumulated gradient is compared with the gradient of the whole batch. If the
    gradients differ, experiments look for the causes.
    """
    items = subject.batch.items
    usual_steps = max(2, min(USUAL_STEPS, items))
    number = require_int(
        "steps",
        usual_steps if steps is None else steps,
        at_least=2,
        fix="Write steps=2 or more.",
    )
    require_int(
        "items in the batch",
        items,
        at_least=number,
        fix="Pass a larger batch or a smaller steps=.",
    )
    if not subject.places:
        raise no_gradient_error()
    weighting = Weighting(require_reduction(reduction), subject.batch.weight)
    comparison = Comparison(subject, partitions(items, number), weighting)
    try:
        with subject.isolated():
            examination = Examination(comparison)
            if steps is not None and subject.is_divided_by(number, weighting.reduction):
                examination.notes.append(DIVIDED_LOSS.format(steps=number))
            report = examination.report()
    except Exception as error:
        error.add_note(OF_A_PART)
        raise
    if not examination.has_gradient:
        raise no_gradient_error()
    return report


class Examination:
    """Runs the experiments on one loss, and collects the reasons why accumulation is
    wrong for this loss.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        """The comparison that the next experiment uses. The first comparison runs the
        model as in training. If an experiment shows that the model's state or mode
        makes accumulation wrong, the next comparison excludes the effect of this state
        or mode.
        """
        self.has_gradient = True
        """Whether any parameter has a gradient other than 0."""
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        subject = comparison.subject
        subject.quiet_layers = subject.random_layers()
        for names, remark in (
            (
                subject.layers_in_mode("BatchNorm", training=False),
                "compared in evaluation mode, as you passed it. If you train it in"
                " training mode, put the model in training mode first.",
            ),
            (
                subject.quiet_layers,
                "compared in evaluation mode, because an item gets different random"
                " numbers in a different micro-batch.",
            ),
            (subject.unreached_parameters(), "not reached by the loss."),
        ):
            if names:
                self.notes.append(f"{joined_names(names)}: {remark}")

    def report(self) -> VerificationReport:
        is_unsteady = self.is_unsteady()
        comparison = self.comparison
        if not is_unsteady and comparison.moved:
            self.find_causes()
        return VerificationReport(
            not self.causes and not comparison.moved,
            tuple(self.causes),
            comparison.errors,
            comparison.units,
            comparison.partitions,
            tuple(self.notes),
            self.comparison.coefficients(comparison.partitions[0]),
        )

    def add(self, finding: str, names: Iterable[str] = (), **facts: object) -> bool:
        """Add the cause that has the key `finding` in `CAUSES` to `self.causes`.
        `names` and `facts` are filled into the texts of the cause. The result is always
        True, so that a test that has found a cause can write ``return self.add(...)``.
        """
        facts["names"] = joined_names(names)
        texts = (text.format(**facts) for text in CAUSES[finding])
        self.causes.append(Cause(*texts))
        return True

    def is_unsteady(self) -> bool:
        """Test whether the large batch's gradient is unsuitable for comparisons,
        because it is not finite, differs between two runs, or is not proportional to
        the loss's scale. If so, add this cause, and return True. A scale with which the
        gradient overflows is ignored.
        """
        comparison = self.comparison
        if self.is_infinite([comparison.items]):
            return True
        # Run other micro-batches before the large batch runs again. If the loss
        # remembers its previous batch, the large batch then gives a different gradient.
        gradients = [comparison.large, *comparison.gradients(comparison.partitions[0])]
        names = self.changed_names(scale=1.0)
        if names:
            return self.add("changing", names)
        names = self.scale_float16()
        for scale in SCALES:
            names = names or self.changed_names(scale=scale)
        if names:
            return self.add("custom_backward", names)
        gradients.append(self.comparison.large)
        self.has_gradient = any((gradient != 0).any() for gradient in gradients)
        return False

    def scale_float16(self) -> Sequence[str]:
        """If the loss is computed in float16, scale it in the later experiments.
        Without scaling, small gradients would become 0, which could hide a mistake or
        look like a custom backward pass. Return the names of the parameters whose
        gradient is not proportional to the scale, even though the scale is large.

        The loss is not scaled if a scaled gradient is not finite, or if scaling changes
        the large batch's gradient more than rounding and underflow can. Underflow
        changes an element by at most half of float16's smallest number per item.
        """
        unscaled = self.comparison
        roundoff, _ = unscaled.subject.precision
        if roundoff != FLOAT16_ROUNDOFF:
            return ()
        scaled = unscaled.under(scale=SCALES[1])
        larger_gradient = scaled.under(scale=16 * SCALES[1]).large
        gradients = scaled.gradients([*chain(*unscaled.partitions)])
        if not all(map(is_finite, [larger_gradient, *gradients])):
            return ()
        names = scaled.differing(larger_gradient, scaled.large)
        room = len(unscaled.items) * SMALLEST_FLOAT16 / 2
        changes = unscaled.norms(unscaled.large - scaled.large)
        is_underflow = all(
            changes[name]
            <= ROUNDING_LIMIT * scaled.units[name]
            + room * math.sqrt(place.stop - place.start)
            for name, place in unscaled.subject.places.items()
        )
        if is_underflow:
            self.comparison = scaled
            self.notes.append(
                f"compared with the loss multiplied by {SCALES[1]:g}, because small"
                " float16 gradients become 0 without loss scaling."
            )
        return names

    def is_infinite(self, parts: Iterable[Items]) -> bool:
        for part in parts:
            (gradient,) = self.comparison.gradients([part])
            norms = self.comparison.norms(gradient)
            names = [name for name, norm in norms.items() if math.isinf(norm)]
            if names:
                items = joined_names(map(str, part))
                return self.add("not_finite", names, items=items)
        return False

    def changed_names(self, **conditions: object) -> Sequence[str]:
        """Compute the large batch's gradient again under changed `conditions`. Return
        the names of the parameters whose gradient now differs from the gradient in
        `self.comparison` by more than rounding, or no names if the new gradient is not
        finite.

        `conditions` are fields of `Conditions`, such as ``seed=1``. All other
        conditions stay the same.
        """
        comparison = self.comparison
        gradient = comparison.under(**conditions).large
        distances = comparison.norms(gradient - comparison.large)
        # If no condition was changed, the limits are the lower bounds of the units. If
        # the gradient changes from run to run, the units themselves are too large,
        # because they are measured with several runs.
        is_repetition = conditions == {"scale": comparison.conditions.scale}
        limits = comparison.floors if is_repetition else comparison.units
        return [
            name
            for name, distance in distances.items()
            if is_finite(gradient) and distance > ROUNDING_LIMIT * limits[name]
        ]

    def find_causes(self) -> None:
        """Look for the causes of a wrong gradient one by one, until the causes explain
        the whole difference.
        """
        if self.changed_names(seed=OTHER_SEED):
            self.add("random")
            return
        self.depends_on_state()
        if self.depends_on_places() or self.is_explained():
            return
        if self.depends_on_mode() and self.is_explained():
            return
        if not self.is_infinite(chain(*self.comparison.partitions)):
            self.add("coupled", self.comparison.moved)

    def is_explained(self) -> bool:
        """True if the causes that were found explain the whole difference: under the
        conditions of `self.comparison`, every partition's gradient equals the large
        batch's gradient up to rounding.

        If the gradients differ, but would be equal with another reduction or other
        weights, add this cause, and return True.
        """
        return not self.comparison.moved or self.has_other_weights()

    def depends_on_state(self) -> None:
        """Test whether a micro-batch changes model state that affects the gradient of
        the next micro-batch. If so, add this cause, and run the later experiments with
        the state restored before each micro-batch.
        """
        alone = self.comparison.under(carry_state=False)
        parts = self.comparison.partitions[0]
        gradient = alone.accumulate(parts)
        carried_gradient = self.comparison.accumulate(parts)
        state = self.comparison.subject.state.changed_names()
        names = self.comparison.differing(carried_gradient, gradient)
        if names and is_finite(gradient):
            self.comparison = alone
            state_names = joined_names(state) or "state of the model"
            self.add("hidden_state", names, state=state_names)

    def depends_on_places(self) -> bool:
        """Test whether an item's gradient depends on the item's position in the
        micro-batch, but not on other items. If so, add this cause, and return True.

        The test consists of two experiments with two micro-batches each. In the first
        experiment, the micro-batches swap all items except the first item of each.
        Their accumulated gradient must not change, because each item keeps its
        position. In the second experiment, the items of the first micro-batch are
        reversed. The accumulated gradient must change, because the positions change.
        """
        comparison = self.comparison
        half = len(comparison.items) // 2
        first = comparison.items[:half]
        second = comparison.items[half : 2 * half]
        gradient = comparison.accumulate([first, second])

        def changed_names(*parts: Items) -> set[str]:
            names = comparison.differing(comparison.accumulate(parts), gradient)
            return set(names).intersection(comparison.moved)

        if changed_names(first[:1] + second[1:], second[:1] + first[1:]):
            return False
        if not changed_names(first[::-1], second):
            return False
        return self.add("by_place")

    def has_other_weights(self) -> bool:
        """Test whether accumulation would be correct with another reduction or other
        weights. If so, add this cause, and return True.
        """
        comparison = self.comparison
        weightings = {"sum": Weighting("sum", len), "mean": Weighting("mean", len)}
        for code in self.counts(comparison.items):
            count = partial(self.count, code)
            weightings[code] = Weighting("mean", count)
        for name, weighting in weightings.items():
            if comparison.is_right_with(weighting):
                finding = name if name in CAUSES else "count"
                reduction = comparison.weighting.reduction
                return self.add(finding, count=name, reduction=reduction)
        # Skip the last partition: its only micro-batch always has the coefficient 1.
        coefficients = map(comparison.coefficients, comparison.partitions[:-1])
        certain = [each for each in coefficients if each is not None]
        if certain and all(map(are_weights, certain)):
            return self.add("unknown_count")
        return False

    def count(self, code: str, part: Items) -> float:
        return self.counts(part)[code]

    def counts(self, part: Items) -> dict[str, float]:
        """Return a dictionary of numbers by which a loss may divide, such as a count of
        labels. Each number is computed from the arrays of the micro-batch `part`. Its
        key is the expression that computes the number, such as ``batch[1].sum()``.
        """
        counts = {}
        for path, array in self.comparison.subject.arrays(part):
            columns = {path: array}
            if array.ndim == 2:
                columns[f"{path}[:, 1:]"] = array[:, 1:]
            for code, labels in columns.items():
                counts[f"({code} != -100).sum()"] = float((labels != -100).sum())
                counts[f"({code} != 0).sum()"] = float((labels != 0).sum())
            counts[f"{path}.sum()"] = float(array.sum())
        return counts

    def depends_on_mode(self) -> bool:
        """Test whether training mode makes accumulation wrong, because layers such as
        batch norm compute statistics over the micro-batch. This is the case if
        accumulation is correct in evaluation mode, in which the layers use stored
        statistics, or if any batch norm layer is in training mode. If so, add this
        cause, run the later experiments in evaluation mode, and return True.
        """
        layers = self.comparison.subject.layers_in_mode("BatchNorm", training=True)
        evaluation = self.comparison.under(training=False)
        if evaluation.moved and not layers:
            return False
        verdict = "is wrong for another reason" if evaluation.moved else "is right"
        self.comparison = evaluation
        names = joined_names(layers) or "the model"
        return self.add("batch_statistics", layers=names, verdict=verdict)


def no_gradient_error() -> ArgumentValueError:
    return ArgumentValueError(
        "loss_fn: expected a loss whose gradient is not 0, because comparing zeros"
        " would show nothing; got a loss whose gradient is 0 for every parameter. Check"
        " that the loss is not detached, and that loss_fn calls the model that you"
        " passed, or verify with other data."
    )


def are_weights(coefficients: Coefficients) -> bool:
    """True if these coefficients are all positive, add up to 1, and combine the
    micro-batches' gradients into the large batch's gradient. It is False for a loss
    that is a maximum, because there one coefficient is 1 and the others are 0.
    """
    best = coefficients.best
    for share, norm in zip(best, coefficients.norms, strict=True):
        if norm and share < SAME:
            return False
    is_exact = coefficients.error <= ROUNDING_LIMIT * len(best)
    room = SAME + coefficients.uncertainty * len(best)
    return is_exact and abs(math.fsum(best) - 1) < room


def joined_names(names: Iterable[str]) -> str:
    """List the first five `names`, and say how many more there are."""
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
