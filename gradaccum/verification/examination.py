"""The experiments of `gradaccum.verify`. Each changes one condition: the loss's scale,
the random state, the model's state, the mode, the weights, the number of micro-batches.

A cause that would disturb a later experiment is looked for, and removed, first.
`gradaccum/VERIFY.md` has a section for each kind of cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradaccum.errors import ArgumentValueError, explain, require_int
from gradaccum.options import Reduction, require_reduction
from gradaccum.verification.comparison import (
    ROUNDING_LIMIT,
    Coefficients,
    Comparison,
    Partition,
    Weighting,
    cut,
    difference,
    moved_names,
)
from gradaccum.verification.report import Cause, VerificationReport
from gradaccum.verification.subject import Conditions, Gradient, Items, Subject

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
TRAINING = Conditions()
SCALES = (2.0**8, 2.0**16)
"""Powers of two: they scale every step of a linear backward pass exactly. The larger one
is where `torch.amp.GradScaler` begins.
"""
SAME = 1e-3
"""The difference up to which measured coefficients are the expected ones."""
OF_A_PART = (
    "gradaccum: verify runs loss_fn on parts of the batch, each with any of its items."
    " If it takes the full batch only, some items belong together: give the batch an"
    " axis of such groups, and flatten it in loss_fn."
)


def examine(
    subject: Subject, steps: object, reduction: object = "mean"
) -> VerificationReport:
    """Compare the partitions of the subject's batch, and look for the causes where the
    gradient moves.
    """
    if steps is None:
        steps = max(2, min(USUAL_STEPS, subject.items))
    number = require_int("steps", steps, at_least=2, fix="Write steps=2 or more.")
    if number > subject.items:
        raise explain(
            ArgumentValueError,
            "batch",
            expected=f"at least {number} items, one per micro-batch",
            found=f"{subject.items}",
            fix="Bring a larger batch, or write steps= a smaller number.",
        )
    weighting = Weighting(require_reduction(reduction))
    comparison = Comparison(subject, number, weighting)
    try:
        return _Examination(comparison).report()
    except Exception as error:
        error.add_note(OF_A_PART)
        raise


class _Examination:
    """The experiments on one subject, and what they have shown so far."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.subject = comparison.subject
        self.conditions = TRAINING
        """Those of training, without the causes that were found."""
        self.causes: list[Cause] = []
        self.notes: list[str] = []

    def report(self) -> VerificationReport:
        can_compare = (
            self.is_finite() and self.is_repeatable() and self.follows_the_scale()
        )
        errors = self.comparison.errors(self.conditions)
        if can_compare and moved_names(errors) and self.can_hold_random_numbers():
            errors = self.comparison.errors(self.conditions)
            self.find_causes(errors)
        self.note_unused_parameters()
        first = self.comparison.partitions[0].parts
        return VerificationReport(
            not self.causes and not moved_names(errors),
            tuple(self.causes),
            errors,
            self.comparison.units(self.conditions),
            ROUNDING_LIMIT,
            tuple(partition.words for partition in self.comparison.partitions),
            tuple(self.notes),
            self.comparison.coefficients(first, self.conditions),
        )

    def add(self, kind: str, where: str, explanation: str, fix: str) -> None:
        self.causes.append(Cause(kind, where, explanation, fix))

    def find_causes(self, errors: Mapping[str, float]) -> None:
        """Look for the causes of `errors`, one after the other, until none is left."""
        if moved_names(errors) and self.depends_on_state():
            errors = self.comparison.errors(self.conditions)
        if not moved_names(errors):
            return
        if self.depends_on_places(moved_names(errors)):
            return
        if self.has_other_weights():
            return
        if self.depends_on_mode():
            errors = self.comparison.errors(self.conditions)
            if not moved_names(errors) or self.has_other_weights():
                return
        if self.has_infinite_parts():
            return
        names = self.without_counted_terms(moved_names(errors))
        if names:
            self.say_coupled(names)

    # Can the gradients be compared at all?

    def is_finite(self) -> bool:
        gradients = self.comparison.large(TRAINING).gradients
        names = [
            name
            for name, gradient in gradients.items()
            if not math.isfinite(self.comparison.norm(gradient))
        ]
        if names:
            self.add(
                "not_finite",
                joined_names(names),
                "The gradient of the large batch itself is not finite.",
                "Mend the loss first, or verify with another batch.",
            )
        return not names

    def is_repeatable(self) -> bool:
        names = self.differing_in_two_runs()
        if names and self.switch_off_random_layers():
            names = self.differing_in_two_runs()
        if names:
            self.add(
                "not_repeatable",
                "outside of the model",
                "Two runs of the same batch, with the model's state and the random"
                f" state restored, differ in {joined_names(names)}: the loss reads something"
                " that changes from call to call, as a generator of its own does.",
                "Make it a buffer of the model, or a part of the batch.",
            )
        return not names

    def differing_in_two_runs(self) -> tuple[str, ...]:
        (again,) = self.subject.window([self.comparison.items], self.conditions)
        large = self.comparison.large(self.conditions)
        # Units are measured by repeated runs, so that they would hide the difference.
        floors = self.comparison.floors(self.conditions)
        return moved_names(
            self.comparison.distances_in(floors, again.gradients, large.gradients)
        )

    def follows_the_scale(self) -> bool:
        """Test that the gradient scales with the loss. Scales that overflow are left
        out.
        """
        large = self.comparison.large(self.conditions)
        names: list[str] = []
        for scale in SCALES:
            scaled_conditions = replace(self.conditions, scale=scale)
            (run,) = self.subject.window([self.comparison.items], scaled_conditions)
            if self.comparison.is_finite(run):
                distances = self.comparison.distances(
                    run.gradients, large.gradients, self.conditions
                )
                names = names or list(moved_names(distances))
        if names:
            self.add(
                "custom_backward",
                joined_names(names),
                "A loss multiplied by a number does not give the multiplied gradient in"
                f" {joined_names(names)}: a custom backward pass or a hook ignores the"
                " gradient that it is handed, and with it the weight of a micro-batch.",
                "Multiply by the incoming gradient in the custom backward pass; in"
                " place of a hook that clips write clip_norm=.",
            )
        return not names

    def can_hold_random_numbers(self) -> bool:
        """Return False if an item meets other numbers in another micro-batch, even with
        random layers in evaluation mode.
        """
        if not self.follows_the_seed():
            return True
        if self.switch_off_random_layers() and not self.follows_the_seed():
            return True
        self.add(
            "not_repeatable",
            "the loss",
            "The loss draws random numbers. In another micro-batch an item meets other"
            " numbers, so that nothing can be compared. Drawing is no mistake by"
            " itself.",
            "Bring the numbers in the batch, or verify with the drawing switched off.",
        )
        return False

    def switch_off_random_layers(self) -> bool:
        layers = self.subject.random_layers()
        if not layers or not self.conditions.random_layers:
            return False
        self.conditions = replace(self.conditions, random_layers=False)
        self.notes.append(
            f"{joined_names(layers)}: compared in evaluation mode, because an item draws"
            " other random numbers in another micro-batch."
        )
        return True

    def follows_the_seed(self) -> bool:
        other_seed = replace(self.conditions, seed=1)
        (run,) = self.subject.window([self.comparison.items], other_seed)
        large = self.comparison.large(self.conditions).gradients
        distances = self.comparison.distances(run.gradients, large, self.conditions)
        return bool(moved_names(distances))

    # Why does the gradient move?

    def depends_on_state(self) -> bool:
        """Test whether a micro-batch leaves something behind that changes the gradient
        of the next.
        """
        alone = replace(self.conditions, carry_state=False)
        parts = self.comparison.partitions[0].parts
        runs = self.subject.window(parts, self.conditions)
        runs_alone = self.subject.window(parts, alone)
        changed_state: dict[str, None] = {}
        names: dict[str, None] = {}
        for run, run_alone in zip(runs, runs_alone, strict=True):
            changed_state |= dict.fromkeys(run.changed_state)
            if self.comparison.is_finite(run) or self.comparison.is_finite(run_alone):
                distances = self.comparison.distances(
                    run.gradients, run_alone.gradients, self.conditions
                )
                names |= dict.fromkeys(moved_names(distances))
        if names:
            self.conditions = alone
            self.add(
                "hidden_state",
                joined_names(list(changed_state)) or "state of the model",
                "The forward pass changes this and the loss reads it: with the state"
                " restored before each micro-batch the gradient of"
                f" {joined_names(list(names))} is another one.",
                "Update it once per window, after the optimizer's step, or use the"
                " value from before the window.",
            )
        return bool(names)

    def depends_on_places(self, names: Sequence[str]) -> bool:
        """Test whether an item's gradient depends on its place in the micro-batch and
        on no other item: two pairs may swap their second items.
        """
        if len(self.comparison.items) < 4:
            return False

        def gradient_of(*pairs: Items) -> dict[str, Gradient]:
            return self.comparison.accumulate(pairs, self.conditions)

        try:
            gradient = gradient_of((0, 1), (2, 3))
            swapped_gradient = gradient_of((0, 3), (2, 1))
            turned_gradient = gradient_of((1, 0), (2, 3))
        except Exception:  # The user's loss may refuse two items.
            return False
        by_neighbour = self.comparison.distances(
            gradient, swapped_gradient, self.conditions
        )
        by_place = self.comparison.distances(gradient, turned_gradient, self.conditions)
        if {*moved_names(by_neighbour)} & {*names} or not {*moved_names(by_place)} & {
            *names
        }:
            return False
        self.add(
            "not_repeatable",
            "the loss",
            "The loss gives an item a number by its place in the micro-batch, the same"
            " in every micro-batch: as a seed, a key or a generator does that is made"
            " in the loss, or a table.",
            "Seed once, at the start of the program, or bring the numbers in the batch."
            " In JAX split one key into a key per item, or verify without dropout.",
        )
        return True

    def has_other_weights(self) -> bool:
        """Test whether another reduction or other weights make it right."""
        used = self.comparison.weighting.reduction
        reductions: tuple[Reduction, ...] = ("sum", "mean")
        for reduction in reductions:
            weighting = Weighting(reduction, by_items=True)
            errors = self.comparison.errors(self.conditions, weighting)
            if not moved_names(errors):
                self.say_other_reduction(used, reduction)
                return True
        fits = []
        for partition in self.comparison.partitions:
            fit = self.comparison.coefficients(partition.parts, self.conditions)
            if fit is not None and len(partition.parts) > 1:
                fits.append((partition, fit))
        if not fits or not all(self.are_weights(*pair) for pair in fits):
            return False
        count = self.count_for(fits)
        coefficients = ", ".join(f"{value:.3g}" for value in fits[0][1].best)
        infinite = self.infinite_parts(fits[0][0])
        explanation = (
            "The loss is a weighted mean, whose weight differs between micro-batches:"
            " it divides by a count, such as tokens, labels that are not ignored,"
            " positives or weights of classes. The right coefficients of the"
            f" {fits[0][0].words} are {coefficients}."
        )
        if infinite:
            explanation += (
                f" The gradient of {infinite} is not finite: the count is zero there,"
                " and a weight of zero leaves such a micro-batch out."
            )
        self.add(
            "weights",
            count or "the denominator of the loss",
            explanation,
            f"Write reduction='mean', weight=lambda *batch: {count}."
            if count
            else "Write reduction='mean' and weight= a function that returns what the"
            " loss divides by in a micro-batch.",
        )
        return True

    def are_weights(self, partition: Partition, fit: Coefficients) -> bool:
        """True if the micro-batches add up with these coefficients, which are shares of
        one. A maximum gives its item the share of 1.
        """
        runs = self.subject.window(partition.parts, self.conditions)
        for run, share in zip(runs, fit.best, strict=True):
            counts = self.comparison.is_finite(run) and any(
                self.comparison.norm(gradient) for gradient in run.gradients.values()
            )
            if counts and share < SAME:
                return False
        is_exact = fit.error <= ROUNDING_LIMIT * len(partition.parts)
        room = SAME + fit.uncertainty * len(partition.parts)
        return is_exact and abs(math.fsum(fit.best) - 1) < room

    def count_for(self, fits: Sequence[tuple[Partition, Coefficients]]) -> str:
        """Return what to count in a micro-batch to get its weight, as Python; "" if
        nothing fits.
        """
        for code in self.counts(self.comparison.items):
            if all(self.is_count(code, *pair) for pair in fits):
                return code
        return ""

    def is_count(self, code: str, partition: Partition, fit: Coefficients) -> bool:
        counts = [self.counts(part)[code] for part in partition.parts]
        total = math.fsum(counts) or 1.0
        room = SAME + fit.uncertainty
        return all(
            abs(count / total - share) < room
            for count, share in zip(counts, fit.best, strict=True)
        )

    def counts(self, part: Items) -> dict[str, float]:
        """Return the numbers in a micro-batch's arrays that a loss may divide by."""
        counts = {}
        for path, array in self.subject.arrays(part):
            counts[f"({path} != -100).sum()"] = float((array != -100).sum())
            counts[f"({path} != 0).sum()"] = float((array != 0).sum())
            counts[f"{path}.sum()"] = float(array.sum())
            if array.ndim == 2:
                labels = array[:, 1:]
                counts[f"({path}[:, 1:] != -100).sum()"] = float((labels != -100).sum())
                counts[f"({path}[:, 1:] != 0).sum()"] = float((labels != 0).sum())
        return counts

    def say_other_reduction(self, used: Reduction, right: Reduction) -> None:
        fix = "Write reduction='mean' and no weight=."
        if right == "sum":
            fix = (
                "Write reduction='sum'; or, for the mean over the window's items,"
                " reduction='sum_per_item' and weight= their number."
            )
        self.add(
            "weights",
            "the loss",
            f"The gradient moves with reduction={used!r} and your weights. It stays the"
            f" same with reduction={right!r} and no weights.",
            fix,
        )

    def depends_on_mode(self) -> bool:
        """Test whether evaluation mode, in which statistics are those of before, keeps
        the items apart.
        """
        layers = self.subject.statistics_layers()
        evaluation = replace(self.conditions, training=False)
        is_right = not moved_names(self.comparison.errors(evaluation))
        if not layers and not is_right:
            return False
        gradient = "stays the same" if is_right else "moves too, for another reason"
        self.conditions = evaluation
        self.add(
            "batch_statistics",
            joined_names(layers) or "the model",
            "In training mode the output for one item depends on the other items of its"
            f" micro-batch. In evaluation mode the gradient {gradient}.",
            "Use GroupNorm or LayerNorm, freeze the statistics (evaluation mode for"
            " these layers), or accept statistics per micro-batch.",
        )
        return True

    def infinite_parts(self, partition: Partition) -> str:
        """Say how many micro-batches have a gradient that is not finite; "" if none."""
        runs = self.subject.window(partition.parts, self.conditions)
        count = sum(not self.comparison.is_finite(run) for run in runs)
        return f"{count} of {len(runs)} micro-batches" if count else ""

    def has_infinite_parts(self) -> bool:
        for partition in self.comparison.partitions:
            infinite = self.infinite_parts(partition)
            if infinite:
                self.add(
                    "not_finite",
                    "the loss",
                    f"The gradient of {infinite} ({partition.words}) is not finite: the"
                    " loss divides by a count that is zero there, or by a deviation"
                    " over too few items.",
                    "Divide by max(count, 1), and write weight= that count.",
                )
                return True
        return False

    def without_counted_terms(self, names: Sequence[str]) -> tuple[str, ...]:
        """Name the parameters with a term that each micro-batch adds in full, or
        divides once too often; return those that are left.

        Let the gradient be A + B, where A accumulates and B does not. Under "sum" a
        penalty gives A + N B in N micro-batches: its error (N - 1) B triples from two
        micro-batches to four. Under "mean" a sum over items gives A + B / N: its error
        grows by a half.
        """
        items = self.comparison.items[: len(self.comparison.items) // 4 * 4]
        if not items:
            return tuple(names)
        is_mean = self.comparison.weighting.reduction == "mean"
        by_items = Weighting("mean" if is_mean else "sum", by_items=True)
        (large,) = self.subject.window([items], self.conditions)
        errors = []
        for parts in (
            cut(items, len(items) // 2),
            cut(items, len(items) // 4),
            tuple(items[start::4] for start in range(4)),
        ):
            total = self.comparison.accumulate(parts, self.conditions, by_items)
            errors.append(difference(total, large.gradients))
        growth = 1.5 if is_mean else 3.0
        units = self.comparison.units(self.conditions)
        counted_names = []
        for name in names:
            if not all(name in error for error in errors):
                continue
            two, four, four_dealt = (error[name] for error in errors)
            room = 2 * growth * ROUNDING_LIMIT * units[name]
            size = self.comparison.norm(four)
            off = max(
                self.comparison.norm(four - two * growth),
                self.comparison.norm(four - four_dealt),
            )
            if size > room and off <= min(room, size / 4):
                counted_names.append(name)
        if counted_names and is_mean:
            self.add(
                "weights",
                joined_names(counted_names),
                "A part of the gradient of these parameters shrinks with the number of"
                " micro-batches: the loss adds a sum over the items to a mean over"
                " them, and reduction='mean' divides both.",
                "Make each term of the loss a mean over items, or each a sum.",
            )
        elif counted_names:
            self.add(
                "weights",
                joined_names(counted_names),
                "The gradient of these parameters grows with the number of"
                " micro-batches: each micro-batch adds a part of it in full. That part"
                " is a penalty, an auxiliary loss, or a parameter of the loss itself,"
                " such as a temperature.",
                "Multiply that term by the micro-batch's share of the window's items,"
                " or use coupled_backward, which differentiates it once.",
            )
        return tuple(name for name in names if name not in counted_names)

    def say_coupled(self, names: Sequence[str]) -> None:
        self.add(
            "coupled",
            "the loss",
            "No weights make the micro-batches add up to the large batch's gradient in"
            f" {joined_names(names)}: the loss of one item depends on the others, as in"
            " contrastive, ranking and load-balancing losses, statistics over the batch"
            " and a branch that the batch chooses.",
            "Split it into outputs per item and a loss of all outputs: coupled_backward"
            " (torch), coupled_value_and_grad (JAX, MindSpore). If it only adds terms"
            " that divide by different counts: gradaccum.windows.",
        )

    def note_unused_parameters(self) -> None:
        reached_gradients = self.comparison.large(TRAINING).gradients
        unused_names = [
            name for name in self.subject.names if name not in reached_gradients
        ]
        if unused_names:
            self.notes.append(
                f"{joined_names(unused_names)}: the loss does not reach it."
            )


def joined_names(names: Sequence[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
