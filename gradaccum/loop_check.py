"""The loop check: which micro-batches reached the optimizer, and with what weight?

An optimizer should receive sum(c_k g_k), where g_k is the gradient of micro-batch k by
itself, and all g_k are taken at the same parameters. A backend records the gradient
that the optimizer receives, and finds the coefficients c_k by least squares. This
module interprets the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from gradaccum.least_squares import SolvedUpdate, Vector, solve_updates
from gradaccum.options import Reduction, require_reduction
from gradaccum.registry import backend_of

ROOM = 0.004
"""Coefficients count as equal if their relative difference is at most this number. A
mistake in a loop makes a much larger difference.
"""
LEAST = 1e-3
"""A coefficient counts as zero if it is below this fraction of the largest coefficient.
"""
SHOWN = 8
"""The report shows the coefficients of at most this many updates."""


class LoopProblem(NamedTuple):
    """One thing that is wrong with a loop."""

    kind: str
    """The kind of mistake: ``"lost"``, ``"only_last"``, ``"leaked"``,
    ``"not_reduced"``, ``"not_divided"``, ``"short_window"``, ``"mean_of_means"``,
    ``"scaled"``, ``"scaled_inside"``, ``"clipped_each"``, ``"counted_again"``,
    ``"boundary"``, ``"weights"``, ``"unexplained"`` or ``"no_update"``.
    """
    update: int
    """The number of the update, counted from 1; 0 if the problem does not belong to a
    single update.
    """
    explanation: str


@dataclass(frozen=True)
class LoopReport:
    """The findings of a loop check; `str` shows them in words."""

    updates: tuple[SolvedUpdate, ...]
    expected: tuple[tuple[float, ...], ...]
    """For each update, the right coefficients of the micro-batches that it contains.
    Micro-batches that leaked into it from the previous update are left out.
    """
    weights: tuple[float, ...]
    """The weight of each micro-batch."""
    workers: int
    problems: tuple[LoopProblem, ...]
    notes: tuple[str, ...]
    """Remarks about the loop that do not report a mistake."""
    uncertain: str
    """Why the check cannot tell whether the loop is right; empty if it can tell."""

    @property
    def right(self) -> bool:
        """True if the check has shown that each update equals the update that one large
        batch of its micro-batches would give.
        """
        return not self.problems and not self.uncertain

    def __str__(self) -> str:
        counts = f"micro-batches: {len(self.weights)}, updates: {len(self.updates)}"
        verdict = (
            f"The loop is right ({counts}): each update is the large batch's update."
        )
        if self.uncertain:
            verdict = (
                f"Cannot tell whether the loop is right ({counts}). {self.uncertain}"
            )
        if self.problems:
            verdict = f"The loop is wrong ({counts})."
        lines = [verdict]
        for problem in self.problems:
            explanation = problem.explanation
            lines.append(f"- {explanation[0].upper()}{explanation[1:]}")
        lines += [f"- Note: {note}" for note in self.notes]
        shown = zip(self.updates[:SHOWN], self.expected, strict=False)
        for number, (update, expected) in enumerate(shown, 1):
            lines += [
                f"Update {number}, factors of the micro-batches:",
                f"    in the loop        {self._row(update.coefficients)}",
                f"    in the large batch {self._row(expected)}",
            ]
        if len(self.updates) > SHOWN:
            lines.append(f"and {len(self.updates) - SHOWN} more updates.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _row(self, coefficients: Sequence[float]) -> str:
        length = len(coefficients) // self.workers
        least = LEAST * max(map(abs, coefficients), default=0.0)
        row = ""
        for place, value in enumerate(coefficients):
            separator = " | " if place and place % length == 0 else " "
            row += separator + (f"{value:.3g}" if abs(value) > least else "0")
        return row[1:]


class LoopRecord(Protocol):
    """The recorded loop, which `gradaccum.recording` yields."""

    def report(
        self,
        loss_fn: Callable[..., Any] | None = None,
        micro_batches: Sequence[Any] | None = None,
        **options: Any,
    ) -> LoopReport:
        """Report which micro-batches each update contained, and with what weight. The
        `options` are the same as for `check_loop`.
        """
        ...


def recording(optimizer: Any, model: Any = None) -> AbstractContextManager[LoopRecord]:
    """Record the gradients that `optimizer` receives while a loop runs. The optimizer
    need not be wrapped, and any trainer may run the loop.

    The parameters are restored after each update, so that all gradients are taken at
    the same point. The optimizer's own state is not restored. Record with a fresh
    model, without dropout.

        with gradaccum.recording(optimizer) as record:
            train()
        print(record.report(loss_fn, micro_batches))

    Args:
        optimizer: a torch optimizer, wrapped by any package or not; in MindSpore a
            `gradaccum_mindspore.LoopRecorder`, wrapped or not. JAX has its own
            `LoopRecorder`, whose ``report`` takes the state that the loop returns.
        model: a module whose call returns an object with a ``loss``, as the models of
            Hugging Face transformers do. Its calls are recorded as the micro-batches,
            so that ``report`` needs no `micro_batches`.
    """
    backend: Any = backend_of(optimizer)
    context: AbstractContextManager[LoopRecord] = backend.recording(optimizer, model)
    return context


def check_loop(
    train: Callable[[], object],
    optimizer: Any,
    loss_fn: Callable[..., Any],
    micro_batches: Sequence[Any],
    *,
    weight: Callable[..., float] | None = None,
    reduction: Reduction = "mean",
    steps: int | None = None,
    clip_norm: float | None = None,
) -> LoopReport:
    """Run a training loop, and report which micro-batches reached the optimizer, and
    with what weight.

    Args:
        train: runs the loop once over `micro_batches`, in their order.
        optimizer: the optimizer that the loop steps.
        loss_fn: ``loss_fn(*micro_batch)`` returns the loss of one micro-batch before
            anything divides or weights it.
        micro_batches: the micro-batches that the loop trains on: tuples of arguments,
            or single arguments.
        weight: ``weight(*micro_batch)`` returns the weight of a micro-batch. Default:
            the number of items, which is the length of the first argument.
        reduction: how `loss_fn` combines the losses of its items, as in
            `gradaccum.wrap`.
        steps: micro-batches per window. By default, the micro-batches that an update
            contains count as its window.
        clip_norm: the global 2-norm to which the loop clips each window.
    """
    with recording(optimizer) as record:
        train()
    return record.report(
        loss_fn,
        micro_batches,
        weight=weight,
        reduction=reduction,
        steps=steps,
        clip_norm=clip_norm,
    )


def assert_accumulates(
    train: Callable[[], object],
    optimizer: Any,
    loss_fn: Callable[..., Any],
    micro_batches: Sequence[Any],
    **options: Any,
) -> None:
    """Run `check_loop`, and raise an AssertionError with its report unless the loop is
    right. Use it in a test of your own trainer.
    """
    report = check_loop(train, optimizer, loss_fn, micro_batches, **options)
    if not report.right:
        raise AssertionError(str(report))


def items_of(*micro_batch: Any) -> float:
    """Return the number of items in a micro-batch, which is the length of its first
    argument.
    """
    return float(len(micro_batch[0]))


def as_arguments(micro_batch: Any) -> tuple[Any, ...]:
    """Return the arguments of the loss for a micro-batch: the elements of a tuple or
    list, or the micro-batch itself.
    """
    if isinstance(micro_batch, list | tuple):
        return tuple(micro_batch)
    return (micro_batch,)


def loop_report(
    gradients: Sequence[Vector],
    updates: Sequence[Vector],
    weights: Sequence[float],
    epsilon: float,
    *,
    norms: Sequence[float] | None = None,
    **options: Any,
) -> LoopReport:
    """Report which micro-batches each update contained, and with what weight.

    Args:
        gradients: the gradient of each micro-batch.
        updates: the gradients that the optimizer received.
        weights: the weight of each micro-batch.
        epsilon: the machine epsilon of the coarsest parameter.
        norms: the norm of each update, if `updates` contains only some elements.
        options: as in `LoopReader`.
    """
    solutions = solve_updates(gradients, updates)
    if norms is not None:
        solutions = [
            solution._replace(norm=norm)
            for solution, norm in zip(solutions, norms, strict=True)
        ]
    # A float64 model may compute its loss in float32, so the limit is at least 1e-6.
    limit = max(16 * epsilon, math.pow(epsilon, 0.6), 1e-6)
    return LoopReader(solutions, weights, limit=limit, **options).report()


class LoopReader:
    """Finds out what the coefficients of a loop's updates mean.

    Args:
        updates: the updates, in the order in which they were made.
        weights: one weight per micro-batch, in the order of the coefficients.
        reduction: what the loss of a micro-batch is, as in `gradaccum.wrap`.
        steps: micro-batches of one worker per window, or None.
        clip_norm: the norm to which each window is clipped, or None.
        workers: the number of workers; all have the same number of micro-batches.
        limit: the largest `SolvedUpdate.unexplained` that rounding can cause.
    """

    def __init__(
        self,
        updates: Sequence[SolvedUpdate],
        weights: Sequence[float],
        *,
        reduction: Reduction = "mean",
        steps: int | None = None,
        clip_norm: float | None = None,
        workers: int = 1,
        limit: float = 1e-4,
    ) -> None:
        self.updates = tuple(updates)
        self.weights = tuple(weights)
        self.reduction = require_reduction(reduction)
        self.steps = steps
        self.clip_norm = clip_norm
        self.workers = workers
        self.limit = limit
        self.problems: list[LoopProblem] = []
        self.notes: list[str] = []
        self.length = len(self.weights) // workers
        """The number of micro-batches that each worker ran."""
        self.members = [self.members_of(update) for update in self.updates]
        """For each update, the indices of the micro-batches that it contains."""
        self.expected = [
            self.right_coefficients([k for k in members if k not in before] or members)
            for before, members in pairwise([[], *self.members])
        ]

    def report(self) -> LoopReport:
        uncertain = self.why_uncertain()
        if not uncertain:
            self.find_problems()
        return LoopReport(
            self.updates,
            tuple(self.expected),
            self.weights,
            self.workers,
            tuple(self.problems),
            tuple(self.notes),
            uncertain,
        )

    def members_of(self, update: SolvedUpdate) -> list[int]:
        sizes = [abs(coefficient) for coefficient in update.coefficients]
        least = max(LEAST, update.uncertainty) * max(sizes, default=0.0)
        return [number for number, size in enumerate(sizes) if size > least]

    def right_coefficients(self, members: Sequence[int]) -> tuple[float, ...]:
        total = sum(self.weights[number] for number in members) or 1.0
        coefficients = [0.0] * len(self.weights)
        for number in members:
            coefficients[number] = 1.0 if self.reduction == "sum" else 1.0 / total
            if self.reduction == "mean":
                coefficients[number] = self.weights[number] / total
        return tuple(coefficients)

    def why_uncertain(self) -> str:
        for number, update in enumerate(self.updates, 1):
            pairs = zip(update.norms, self.weights, strict=False)
            flat = [k for k, (norm, weight) in enumerate(pairs) if weight and not norm]
            if flat:
                return (
                    f"The gradient of {self.place_names(flat)} is zero, so the check"
                    " cannot tell where it went. Use other data, or set the weight to"
                    " 0."
                )
            if update.unexplained <= self.limit and update.uncertainty > 0.1:
                return (
                    "The micro-batches' gradients are too similar to distinguish in"
                    f" update {number}. Check with other data, with more parameters"
                    " than micro-batches, or in float32."
                )
        return ""

    def find_problems(self) -> None:
        if not self.updates:
            self.say("no_update", 0, "The optimizer made no update.")
            return
        if all(update.unexplained <= self.limit for update in self.updates):
            self.read_places()
            self.read_reduction()
        for number, update in enumerate(self.updates, 1):
            if update.unexplained > self.limit:
                self.say(
                    "unexplained",
                    number,
                    f"{update.unexplained:.1%} of update {number} is not a sum of the"
                    " micro-batches' gradients. Either items of a batch are mixed"
                    " (batch norm, a contrastive loss), or the loss is random or has"
                    " a state, or loss_fn lacks a term of the loop's loss.",
                )
            else:
                self.read_weights(number, update)

    def say(self, kind: str, update: int, explanation: str) -> None:
        self.problems.append(LoopProblem(kind, update, explanation))

    # The next methods find the update that each micro-batch went into.

    def read_places(self) -> None:
        reached_places = {number for members in self.members for number in members}
        lost_places = [
            number
            for number, weight in enumerate(self.weights)
            if weight and number not in reached_places
        ]
        if lost_places:
            kind, reason = self.why_lost(lost_places, max(reached_places, default=-1))
            places = self.place_names(lost_places)
            self.say(kind, 0, f"{places} never reached the optimizer{reason}.")
        is_leaking = False
        for number, (before, members) in enumerate(pairwise(self.members), 2):
            again = sorted({*members} & {*before})
            if again:
                is_leaking = True
                self.say(
                    "leaked",
                    number,
                    f"Update {number} contains {self.place_names(again)} of the"
                    " previous update again: gradients were not cleared after it.",
                )
        if self.steps and not is_leaking:
            self.read_boundaries(self.steps, lost_places)

    def why_lost(self, lost_places: Sequence[int], last: int) -> tuple[str, str]:
        if self.workers > 1:
            return "lost", ""
        if lost_places[0] > last:
            return "lost", (
                ": the loop ends without an update for its last, short window"
            )
        if all(len(members) <= 1 for members in self.members):
            return "only_last", (
                ". Each update contains only one micro-batch: most likely zero_grad()"
                " runs before each backward pass, or only the last backward pass of a"
                " window counts"
            )
        return "lost", ""

    def read_boundaries(self, steps: int, lost_places: Sequence[int]) -> None:
        """Report the first update that does not contain exactly the micro-batches of
        its window, which has `steps` micro-batches.
        """
        for number, members in enumerate(self.members, 1):
            places = {member % self.length for member in members}
            start = (number - 1) * steps
            window = range(start, min(start + steps, self.length))
            if places and places != {*window} and not {*window} & {*lost_places}:
                window_name = self.place_names(window)
                self.say(
                    "boundary",
                    number,
                    f"Update {number} contains {self.place_names(members)}, but with"
                    f" windows of {steps} it should contain {window_name}: the loop"
                    " steps after the wrong micro-batch.",
                )
                return

    def read_reduction(self) -> None:
        for number, members in enumerate(self.members, 1):
            workers = [member // self.length for member in members]
            counts = [workers.count(worker) for worker in range(self.workers)]
            if len(set(counts)) > 1:
                words = [f"{count} of worker {k}" for k, count in enumerate(counts)]
                self.say(
                    "not_reduced",
                    number,
                    f"Update {number} contains these micro-batches:"
                    f" {', '.join(words)}. Some workers' gradients were not reduced.",
                )
                return

    # The next methods compare the micro-batches' weights.

    def read_weights(self, number: int, update: SolvedUpdate) -> None:
        expected = self.expected[number - 1]
        members = self.members[number - 1]
        weightless = [member for member in members if not self.weights[member]]
        if weightless:
            places = self.place_names(weightless)
            self.say(
                "weights",
                number,
                f"Update {number} contains {places}, whose weight is 0.",
            )
            return
        if not members:
            self.notes.append(f"Update {number} contains no micro-batch.")
            return
        members = [member for member in members if expected[member]]
        coefficients = [update.coefficients[member] for member in members]
        ratios = [update.coefficients[member] / expected[member] for member in members]
        room = ROOM + update.uncertainty
        count = len(members)
        full_size = self.workers * (
            self.steps or max(map(len, self.members)) // self.workers
        )
        share = count / max(full_size, count)
        if are_equal([*ratios, 1.0], room):
            return
        if are_equal([*coefficients, 1.0], room):
            kind = "not_divided"
            text = (
                f"Update {number} is the plain sum of {count} micro-batches: no mean"
                f" was taken, so the update is about {count} times too large."
            )
        elif share < 1 and (
            are_equal([*coefficients, 1 / full_size], room)
            or are_equal([*ratios, share], room)
        ):
            kind = "short_window"
            text = (
                f"The short window of update {number} was divided by {full_size}"
                f" instead of {count}: it is {share:.3g} times what it should be."
            )
            if not are_equal(ratios, room):
                text += (
                    " Its micro-batches count the same although their weights differ."
                )
        elif are_equal(ratios, room):
            self.read_factor(number, ratios[0], count)
            return
        elif are_equal(coefficients, room):
            kind = "mean_of_means"
            text = (
                f"In update {number} micro-batches of different weights count the same,"
                f" {coefficients[0]:.3g} each. Weight each by its number of items."
            )
        else:
            norms = [update.norms[member] for member in members if update.norms]
            kind, text = uneven_weights(coefficients, ratios, norms, room)
            text = f"In update {number} {text}"
        self.say(kind, number, text)

    def read_factor(self, number: int, ratio: float, count: int) -> None:
        """Report an update whose coefficients have the right proportions but the wrong
        size, unless the update was clipped as a whole.
        """
        norm = self.updates[number - 1].norm
        reason = ""
        if count > 1 and are_equal([ratio, 1 / count], ROOM):
            reason = f": the loss was divided by {count} once too often"
        elif self.workers > 1 and are_equal([ratio, 1 / self.workers], ROOM):
            reason = ": a mean over all workers was divided by their number again"
        elif 0 < ratio < 1:
            if self.clip_norm and are_equal([norm, self.clip_norm], ROOM):
                self.notes.append(f"Update {number} was clipped as a whole.")
                return
            if self.problems:
                return  # The other problems most likely explain the factor.
            reason = ". If the loop clips each window, pass clip_norm="
        self.say(
            "scaled",
            number,
            f"Update {number} has the right proportions, but is {ratio:.3g} times the"
            f" large batch's update{reason}.",
        )

    def place_names(self, members: Sequence[int]) -> str:
        places = sorted({member % self.length + 1 for member in members})
        if len(places) == 1:
            return f"micro-batch {places[0]}"
        if len(places) == places[-1] - places[0] + 1:
            return f"micro-batches {places[0]} to {places[-1]}"
        return f"micro-batches {', '.join(map(str, places))}"


def uneven_weights(
    coefficients: Sequence[float],
    ratios: Sequence[float],
    norms: Sequence[float],
    room: float,
) -> tuple[str, str]:
    """Return the kind and the explanation of a problem in which the micro-batches'
    weights are neither equal nor right. Often each weight differs from the next by the
    same factor.
    """
    count = len(coefficients)
    shares = [size * count / (count - place) for place, size in enumerate(coefficients)]
    if count > 2 and are_equal(shares, room):
        return (
            "counted_again",
            "each micro-batch counts again with every later micro-batch: most likely"
            " the losses are added up, and backward() runs on the sum each time.",
        )
    for sizes in (coefficients, ratios):
        largest = max(sizes)
        clipped_norms = [
            size * norm
            for size, norm in zip(sizes, norms, strict=False)
            if size < (1 - room) * largest
        ]
        if len(clipped_norms) > 1 and are_equal(clipped_norms, room):
            return (
                "clipped_each",
                "each micro-batch was clipped by itself. Clip the window's sum once.",
            )
    for sizes in (coefficients, ratios):
        factors = [before / after for before, after in pairwise(sizes)]
        is_one_factor = len(factors) > 1 and are_equal(factors, room)
        if is_one_factor or (count > 2 and max(factors) < 1 + ROOM):
            return (
                "scaled_inside",
                "earlier micro-batches count less or more than later micro-batches, by"
                " a factor: the sum was multiplied inside the window, as a clip after"
                " each backward pass, a running mean or repeated scaling does.",
            )
    return "weights", "the weights of the micro-batches follow no known rule."


def are_equal(numbers: Sequence[float], room: float) -> bool:
    return max(numbers) - min(numbers) <= room * max(map(abs, numbers))
