"""The experiments of `gradaccum.verify`. Each changes one condition: the loss's scale,
the random state, the model's state, the mode, the weights, the number of micro-batches.

If a cause would disturb a later experiment, it is looked for and removed first.
`gradaccum/VERIFY.md` has a section for each kind of cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from gradaccum.errors import require_int
from gradaccum.least_squares import Vector
from gradaccum.options import Reduction, require_reduction
from gradaccum.refusals import DIVIDED_LOSS
from gradaccum.verification.batch import Items
from gradaccum.verification.comparison import (
    ROUNDING_LIMIT,
    Coefficients,
    Comparison,
    Parts,
    is_finite,
    partitions,
)
from gradaccum.verification.report import Cause, VerificationReport
from gradaccum.verification.subject import Subject

KINDS = (
    "not_finite",
    "not_repeatable",
    "custom_backward",
    "hidden_state",
    "batch_statistics",
    "weights",
    "coupled",
)
"""The kinds of causes, in the order in which the experiments look for them."""
USUAL_STEPS = 4
SCALES = (2.0**8, 2.0**16)
"""Powers of two, which scale every step of a linear backward pass exactly. The larger
scale is the initial scale of `torch.amp.GradScaler`.
"""
OTHER_SEED = 0x5EED1
"""A seed that users are unlikely to choose."""
SAME = 1e-3
"""Measured coefficients count as equal to the expected coefficients up to this
difference.
"""
OF_A_PART = (
    "gradaccum: verify runs loss_fn on parts of the batch, which may contain any of its"
    " items. If loss_fn accepts only the full batch, because some items belong"
    " together, give the batch an axis of such groups, and flatten that axis in"
    " loss_fn."
)


def examine(
    subject: Subject, steps: object, reduction: object = "mean"
) -> VerificationReport:
    """Compare the partitions of the subject's batch, and look for the causes if their
    gradients differ.
    """
    is_chosen = steps is not None
    if not is_chosen:
        steps = max(2, min(USUAL_STEPS, subject.batch.items))
    number = require_int("steps", steps, at_least=2, fix="Write steps=2 or more.")
    require_int(
        "items in the batch",
        subject.batch.items,
        at_least=number,
        fix="Pass a larger batch or a smaller steps=.",
    )
    by_parts = partitions(subject.batch.items, number)
    comparison = Comparison(subject, by_parts, require_reduction(reduction))
    try:
        with subject.isolated():
            examination = _Examination(comparison)
            if is_chosen and subject.is_divided_by(number, comparison.reduction):
                examination.notes.append(DIVIDED_LOSS.format(steps=number))
            return examination.report()
    except Exception as error:
        error.add_note(OF_A_PART)
        raise


class _Examination:
    """Runs the experiments, and collects the causes that they have found."""

    def __init__(self, comparison: Comparison) -> None:
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        layers = comparison.subject.random_layers()
        if layers:
            comparison = comparison.under(quiet_layers=tuple(layers))
            self.notes.append(
                f"{joined_names(layers)}: compared in evaluation mode, because an item"
                " gets different random numbers in a different micro-batch."
            )
        names = comparison.subject.unreached_parameters()
        if names:
            self.notes.append(f"{joined_names(names)}: not reached by the loss.")
        self.comparison = comparison
        """The comparison under the conditions of training, excluding the causes that
        were found.
        """

    def report(self) -> VerificationReport:
        can_compare = (
            self.is_finite()
            and self.is_repeatable()
            and self.follows_the_scale()
            and not self.draws_random_numbers()
        )
        comparison = self.comparison
        if can_compare and comparison.moved:
            self.find_causes()
        return VerificationReport(
            not self.causes and not comparison.moved,
            tuple(self.causes),
            comparison.errors,
            comparison.units,
            tuple(comparison.partitions.values()),
            tuple(self.notes),
            self.comparison.coefficients(comparison.first_parts),
        )

    def add(self, kind: str, where: str, explanation: str, fix: str) -> None:
        self.causes.append(Cause(kind, where, explanation, fix))

    def find_causes(self) -> None:
        """Look for causes one by one, until they explain the whole difference."""
        self.depends_on_state()
        if (
            not self.comparison.moved
            or self.depends_on_places()
            or self.has_other_weights()
        ):
            return
        if self.depends_on_mode() and (
            not self.comparison.moved or self.has_other_weights()
        ):
            return
        if self.has_infinite_parts():
            return
        self.add(
            "coupled",
            "the loss",
            "No weights make the micro-batches add up to the large batch's gradient in"
            f" {joined_names(self.comparison.moved)}. Either the loss of one item"
            " depends on other items, as in contrastive, ranking and load-balancing"
            " losses, statistics over the batch and branches that depend on the batch."
            " Or the loss adds terms that need different weights, such as a sum over"
            " the items and a penalty.",
            "Split the loss into outputs per item and a loss of all outputs, and call"
            " coupled_backward (torch) or coupled_value_and_grad (JAX, MindSpore). If"
            " the loss only adds terms that divide by different counts, use"
            " gradaccum.windows. Multiply a penalty beside a sum by the micro-batch's"
            " share of the items.",
        )

    # Can the gradients be compared at all?

    def is_finite(self) -> bool:
        norms = self.comparison.norms(self.comparison.large.gradient)
        names = [name for name, norm in norms.items() if math.isinf(norm)]
        if names:
            self.add(
                "not_finite",
                joined_names(names),
                "The gradient of the large batch itself is not finite.",
                "Make the loss finite first, or verify with another batch.",
            )
        return not names

    def is_repeatable(self) -> bool:
        comparison = self.comparison
        again = comparison.runs([comparison.items])[0].gradient
        distances = comparison.norms(again - comparison.large.gradient)
        # Units are measured with repeated runs, so they would hide the difference.
        names = [
            name
            for name, distance in distances.items()
            if distance > ROUNDING_LIMIT * comparison.floors[name]
        ]
        if names:
            self.add(
                "not_repeatable",
                "outside of the model",
                "Two runs of the same batch, with the model's state and the random"
                f" state restored, differ in {joined_names(names)}: the loss reads"
                " something that changes from call to call, such as its own random"
                " generator.",
                "Make that value a buffer of the model, or a part of the batch.",
            )
        return not names

    def follows_the_scale(self) -> bool:
        """Test whether multiplying the loss by a number multiplies the gradient by the
        same number. Scales that overflow are left out.
        """
        names: dict[str, None] = {}
        for scale in SCALES:
            gradient = self.comparison.under(scale=scale).large.gradient
            if is_finite(gradient):
                names |= dict.fromkeys(self.differing_from_large(gradient))
        if names:
            self.add(
                "custom_backward",
                joined_names(names),
                "Multiplying the loss by a number does not multiply the gradient of"
                f" {joined_names(names)} by the same number: a custom backward pass or"
                " a hook ignores the gradient that it receives, and therefore also the"
                " weight of a micro-batch.",
                "Multiply by the incoming gradient in the custom backward pass. Replace"
                " a hook that clips with clip_norm=.",
            )
        return not names

    def differing_from_large(self, gradient: Vector) -> tuple[str, ...]:
        return self.comparison.differing(gradient, self.comparison.large.gradient)

    def draws_random_numbers(self) -> bool:
        """Test whether the gradient changes because an item gets different random
        numbers in a different micro-batch, even with random layers in evaluation mode.
        """
        if not self.comparison.moved:
            return False
        gradient = self.comparison.under(seed=OTHER_SEED).large.gradient
        if not self.differing_from_large(gradient):
            return False
        self.add(
            "not_repeatable",
            "the loss",
            "The loss draws random numbers. In a different micro-batch an item gets"
            " different numbers, so the gradients cannot be compared. Drawing random"
            " numbers is not a mistake in itself.",
            "Pass the numbers in the batch, or verify without random numbers.",
        )
        return True

    # Why do the gradients differ?

    def depends_on_state(self) -> None:
        """Test whether a micro-batch leaves something behind that changes the gradient
        of the next micro-batch.
        """
        comparison = self.comparison
        alone = comparison.under(carry_state=False)
        parts = comparison.first_parts
        changed_state: dict[str, None] = {}
        names: dict[str, None] = {}
        for run, run_alone in zip(
            comparison.runs(parts), alone.runs(parts), strict=True
        ):
            changed_state |= dict.fromkeys(run.changed_state)
            gradients = (run.gradient, run_alone.gradient)
            if any(map(is_finite, gradients)):
                names |= dict.fromkeys(comparison.differing(*gradients))
        if names:
            self.comparison = alone
            self.add(
                "hidden_state",
                joined_names(changed_state) or "state of the model",
                "The forward pass changes this state, and the loss reads it: if the"
                " state is restored before each micro-batch, the gradient of"
                f" {joined_names(names)} is different.",
                "Update the state once per window, after the optimizer's step, or use"
                " the value from before the window.",
            )

    def depends_on_places(self) -> bool:
        """Test whether an item's gradient depends on its place in the micro-batch but
        on no other item. If so, two pairs of items can swap their second items without
        a change of the gradient.
        """
        comparison = self.comparison
        if len(comparison.items) < 4:
            return False
        try:
            gradients = comparison.accumulate([(0, 1), (2, 3)])
            swapped_gradients = comparison.accumulate([(0, 3), (2, 1)])
            turned_gradients = comparison.accumulate([(1, 0), (2, 3)])
        except Exception:  # The user's loss may reject such a batch.
            return False
        by_neighbour = comparison.differing(gradients, swapped_gradients)
        by_place = comparison.differing(gradients, turned_gradients)
        moved = {*comparison.moved}
        if moved.intersection(by_neighbour) or not moved.intersection(by_place):
            return False
        self.add(
            "not_repeatable",
            "the loss",
            "The loss gives an item a number that depends on its place in the"
            " micro-batch and is the same in every micro-batch. This happens if a seed,"
            " a key or a generator is created in the loss, or if the loss reads a"
            " table.",
            "Seed once, at the start of the program, or pass the numbers in the batch."
            " In JAX split one key into a key per item, or verify without dropout.",
        )
        return True

    def has_other_weights(self) -> bool:
        """Test whether another reduction or other weights make accumulation right."""
        if self.has_other_reduction("sum") or self.has_other_reduction("mean"):
            return True
        fits = {}
        for parts in self.comparison.partitions:
            fit = self.comparison.coefficients(parts)
            if fit is not None and len(parts) > 1:
                fits[parts] = fit
        if not fits or not all(map(are_weights, fits.values())):
            return False
        where = "the denominator of the loss"
        fix = (
            "Write reduction='mean', and pass as weight= a function that returns the"
            " number by which the loss divides in a micro-batch."
        )
        for code in self.counts(self.comparison.items):
            if all(self.is_count(code, *pair) for pair in fits.items()):
                where = code
                fix = f"Write reduction='mean', weight=lambda *batch: {code}."
                break
        self.add(
            "weights",
            where,
            "The loss is a weighted mean whose weight differs between micro-batches: it"
            " divides by a count, such as the number of tokens, of labels that are not"
            " ignored or of positives, or by a sum of class weights.",
            fix,
        )
        return True

    def has_other_reduction(self, right: Reduction) -> bool:
        """Test whether reduction `right` without weights makes accumulation right."""
        if replace(self.comparison, reduction=right, weighs_items=True).moved:
            return False
        fix = "Write reduction='mean' and no weight=."
        if right == "sum":
            fix = (
                "Write reduction='sum'. For the mean over the window's items write"
                " reduction='sum_per_item', and pass the number of items as weight=."
            )
        self.add(
            "weights",
            "the loss",
            f"With reduction={self.comparison.reduction!r} and your weights the"
            f" gradient is wrong. With reduction={right!r} and no weights it is right.",
            fix,
        )
        return True

    def is_count(self, code: str, parts: Parts, fit: Coefficients) -> bool:
        counts = [self.counts(part)[code] for part in parts]
        total = math.fsum(counts) or 1.0
        room = SAME + fit.uncertainty
        return all(
            abs(count / total - share) < room
            for count, share in zip(counts, fit.best, strict=True)
        )

    def counts(self, part: Items) -> dict[str, float]:
        """Return the numbers that a loss may divide by, computed from a micro-batch's
        arrays. The keys are the expressions that compute them.
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
        """Test whether the items are independent in evaluation mode, in which layers
        use the stored statistics.
        """
        layers = self.comparison.subject.training_layers("BatchNorm")
        evaluation = self.comparison.under(training=False)
        if evaluation.moved and not layers:
            return False
        gradient = "is wrong for another reason" if evaluation.moved else "is right"
        self.comparison = evaluation
        self.add(
            "batch_statistics",
            joined_names(layers) or "the model",
            "In training mode the output for one item depends on the other items of the"
            f" micro-batch. In evaluation mode the gradient {gradient}.",
            "Use GroupNorm or LayerNorm, freeze the statistics (evaluation mode for"
            " these layers), or accept statistics per micro-batch.",
        )
        return True

    def has_infinite_parts(self) -> bool:
        for parts, words in self.comparison.partitions.items():
            runs = self.comparison.runs(parts)
            if not all(is_finite(run.gradient) for run in runs):
                self.add(
                    "not_finite",
                    "the loss",
                    f"The gradient of a micro-batch ({words}) is not finite: the loss"
                    " divides by a count that is zero in this micro-batch, or by a"
                    " standard deviation over too few items.",
                    "Divide by max(count, 1), and pass the count as weight=.",
                )
                return True
        return False


def are_weights(fit: Coefficients) -> bool:
    """True if the micro-batches' gradients add up to the large batch's gradient with
    these coefficients, and the coefficients are positive and add up to 1. If the loss
    is a maximum, one item has the coefficient 1 and all other items have 0; such
    coefficients do not count as weights.
    """
    for share, norm in zip(fit.best, fit.norms, strict=True):
        if norm and share < SAME:
            return False
    is_exact = fit.error <= ROUNDING_LIMIT * len(fit.best)
    room = SAME + fit.uncertainty * len(fit.best)
    return is_exact and abs(math.fsum(fit.best) - 1) < room


def joined_names(names: Iterable[str]) -> str:
    """Return a text with the first five `names` and the number of other names."""
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
