"""The loop check: which micro-batches reached the optimizer, and with what weight?

An optimizer has to be handed sum(c_k g_k), where g_k are the gradients of the
micro-batches, each alone and at the same parameters. An adapter records what the
optimizer is handed and solves least squares for the coefficients c_k; this module says
what the coefficients mean. It knows no framework, and no catalogue of mistakes is
needed to see that a coefficient is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

from gradaccum.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    explain,
    require_int,
    require_number,
)
from gradaccum.options import Reduction, require_reduction
from gradaccum.registry import backend_of

ROOM = 0.004
"""Coefficients that differ by a smaller part are called equal: what is misplaced or
weighed wrongly is off by much more.
"""
LEAST = 1e-3
"""A coefficient below this part of the largest one is called zero."""


class SolvedUpdate(NamedTuple):
    """The gradient that an optimizer was handed, as a sum over the micro-batches."""

    coefficients: tuple[float, ...]
    """One per micro-batch; with several workers those of worker 0 first, then those of
    worker 1, and so on.
    """
    uncertainty: float
    """The error of the coefficients by rounding, as a part of the largest one; inf
    where the micro-batches' gradients do not tell them apart.
    """
    unexplained: float
    """||v - sum(c_k g_k)|| / sum(||c_k g_k||), where v is what the optimizer was
    handed.
    """
    norm: float
    """||v||."""
    norms: tuple[float, ...] = ()
    """||g_k|| of each micro-batch."""


class LoopProblem(NamedTuple):
    """One thing that is wrong with a loop."""

    kind: str
    """``"lost"``, ``"only_last"``, ``"leaked"``, ``"not_reduced"``, ``"not_divided"``,
    ``"short_window"``, ``"mean_of_means"``, ``"scaled"``, ``"scaled_inside"``,
    ``"clipped_each"``, ``"counted_again"``, ``"boundary"``, ``"weights"``,
    ``"unexplained"`` or ``"no_update"``.
    """
    update: int
    """The number of the update, from 1; 0 if it is not that of one update."""
    explanation: str


@dataclass(frozen=True)
class LoopReport:
    """The findings of a loop check; `str` shows them in words."""

    updates: tuple[SolvedUpdate, ...]
    expected: tuple[tuple[float, ...], ...]
    """The right coefficients for the micro-batches that each update holds, without
    those that leaked into it from the update before.
    """
    weights: tuple[float, ...]
    """The weight of each micro-batch."""
    workers: int
    problems: tuple[LoopProblem, ...]
    notes: tuple[str, ...]
    """Remarks on what is no mistake, but good to know."""
    uncertain: str
    """Why the check cannot tell; empty if it can."""

    @property
    def right(self) -> bool:
        """True if each update is that of its micro-batches as one large batch."""
        return not self.problems and not self.uncertain

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return str(self)


class LoopRecord(Protocol):
    """The record that `recording` yields."""

    def report(
        self,
        loss_fn: Callable[..., Any] | None = None,
        micro_batches: Sequence[Any] | None = None,
        *,
        weight: Callable[..., float] | None = None,
        reduction: Reduction = "mean",
        steps: int | None = None,
        clip_norm: float | None = None,
    ) -> LoopReport:
        """Say which micro-batches each update held, and with what weight."""
        ...


class RecordingBackend(Protocol):
    """A backend that can record what an optimizer is handed."""

    def recording(
        self, optimizer: Any, model: Any
    ) -> AbstractContextManager[LoopRecord]: ...


def recording(optimizer: Any, model: Any = None) -> AbstractContextManager[LoopRecord]:
    """Record what `optimizer` is handed while a loop runs; no wrapping, any trainer.

    The parameters are put back after each update, so that all gradients are those of
    one point; the optimizer's own state moves on. Record with a fresh model, without
    dropout.

        with gradaccum.recording(optimizer) as record:
            train()
        print(record.report(loss_fn, micro_batches))

    Args:
        optimizer: a torch optimizer, wrapped by any package or not; in MindSpore a
            `gradaccum_mindspore.LoopRecorder`, wrapped or not. JAX has one too, whose
            own ``report`` takes the state that the loop returns.
        model: a module whose call returns an object with a ``loss``, as models of
            transformers do. Its calls are recorded as the micro-batches, so that
            ``report`` needs none.

    Raises:
        ArgumentTypeError: there is no backend that records such an optimizer.
    """
    backend = backend_of(optimizer)
    if not hasattr(backend, "recording"):
        raise explain(
            ArgumentTypeError,
            "optimizer",
            expected="an optimizer of a backend that records",
            got=optimizer,
            fix="In JAX put gradaccum_jax.LoopRecorder() in the optimizer's place, and"
            " call its report.",
        )
    return cast(RecordingBackend, backend).recording(optimizer, model)


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
    """Run a training loop, and say which micro-batches reached the optimizer, and with
    what weight.

    Args:
        train: runs the loop over `micro_batches`, in their order, once.
        optimizer: the optimizer that the loop steps.
        loss_fn: ``loss_fn(*micro_batch)``, the loss of one micro-batch before anything
            divides or weighs it.
        micro_batches: what the loop trains on: tuples of arguments, or single ones.
        weight: ``weight(*micro_batch)``. Default: the number of items, which is the
            length of the first argument.
        reduction: what `loss_fn` returns, as in `gradaccum.wrap`.
        steps: micro-batches per window. Default: those that an update holds are its
            window.
        clip_norm: the global 2-norm to which the loop clips each window. Default:
            several updates that were scaled down to one norm count as clipped.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is none of these.
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
    """Raise an AssertionError with the report unless the loop is right: `check_loop`
    for a test of one's own trainer.
    """
    report = check_loop(train, optimizer, loss_fn, micro_batches, **options)
    if not report.right:
        raise AssertionError(str(report))


def items_of(*micro_batch: Any) -> float:
    """Return the number of items: the length of the first argument."""
    return float(len(micro_batch[0]))


def as_arguments(micro_batch: Any) -> tuple[Any, ...]:
    """Return the arguments of the loss for a micro-batch: a tuple or list is those."""
    if isinstance(micro_batch, list | tuple):
        return tuple(micro_batch)
    return (micro_batch,)


# The coefficients, by least squares.


PIVOT = 1e-12
"""The smallest pivot of the normalised Gram matrix at which directions are told apart."""


def solve_update(gradients: Any, update: Any) -> SolvedUpdate:
    """Return the coefficients of the sum of micro-batches that is nearest to what the
    optimizer was handed.

    Args:
        gradients: an array of NumPy or torch in float64, one row per micro-batch, shape
            (micro-batches, elements).
        update: what the optimizer was handed, shape (elements,).
    """

    def rest_of(coefficients: Sequence[float]) -> tuple[list[float], float]:
        rest = update
        for coefficient, gradient in zip(coefficients, gradients, strict=True):
            rest = rest - coefficient * gradient
        return (gradients @ rest).tolist(), math.sqrt(float(rest @ rest))

    gram = (gradients @ gradients.T).tolist()
    return solve_coefficients(gram, rest_of, gradients.shape[1])


def solve_coefficients(
    gram: Sequence[Sequence[float]],
    rest_of: Callable[[Sequence[float]], tuple[Sequence[float], float]],
    elements: int,
) -> SolvedUpdate:
    """Return the coefficients c of the sum(c_k g_k) that is nearest to a vector v.

    Args:
        gram: the products of the g_k with each other.
        rest_of: returns for coefficients the products of the g_k with
            v - sum(c_k g_k), and the norm of that rest.
        elements: how many numbers v has.
    """
    count = len(gram)
    norms = [math.sqrt(max(gram[k][k], 0.0)) for k in range(count)]
    products, norm = rest_of([0.0] * count)
    used = [k for k in range(count) if norms[k] > 0]
    finite = all(map(math.isfinite, [*norms, norm]))
    factor = None
    if finite and used and len(used) < elements:
        factor = _cholesky(
            [[gram[j][k] / norms[j] / norms[k] for k in used] for j in used]
        )
    if factor is None:
        unknown = (math.nan,) * count
        return SolvedUpdate(unknown, math.inf, 0.0, norm, tuple(norms))
    coefficients = [0.0] * count
    rest = norm
    for _ in range(3):  # Twice more than needed in exact arithmetic.
        parts = _solve(factor, [products[k] / norms[k] for k in used])
        for k, part in zip(used, parts, strict=True):
            coefficients[k] += part / norms[k]
        products, rest = rest_of(coefficients)
    total = sum(abs(c) * size for c, size in zip(coefficients, norms, strict=True))
    largest = max(map(abs, coefficients))
    error = 4 * rest / math.sqrt(elements - len(used)) * _spread(factor, norms, used)
    return SolvedUpdate(
        tuple(coefficients),
        error / largest if largest else 0.0,
        rest / total if total else 0.0,
        norm,
        tuple(norms),
    )


def _cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """Return the lower factor of a matrix with ones on its diagonal; None if a pivot is
    next to zero.
    """
    factor = [[0.0] * len(matrix) for _ in matrix]
    for row in range(len(matrix)):
        for column in range(row + 1):
            known = sum(factor[row][k] * factor[column][k] for k in range(column))
            value = matrix[row][column] - known
            if column < row:
                factor[row][column] = value / factor[column][column]
            elif value > PIVOT:
                factor[row][row] = math.sqrt(value)
            else:
                return None
    return factor


def _solve(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    count = len(factor)
    middle = [0.0] * count
    for row in range(count):
        known = sum(factor[row][k] * middle[k] for k in range(row))
        middle[row] = (right[row] - known) / factor[row][row]
    solution = [0.0] * count
    for row in reversed(range(count)):
        known = sum(factor[k][row] * solution[k] for k in range(row + 1, count))
        solution[row] = (middle[row] - known) / factor[row][row]
    return solution


def _spread(
    factor: Sequence[Sequence[float]], norms: Sequence[float], used: Sequence[int]
) -> float:
    """Return how far a coefficient moves at most with a rest of 1 per element: its
    standard error in least squares.
    """
    largest = 0.0
    for place, k in enumerate(used):
        unit = [float(each == place) for each in range(len(used))]
        variance = _solve(factor, unit)[place]
        largest = max(largest, math.sqrt(max(variance, 0.0)) / norms[k])
    return largest


def rounding_limit(epsilon: float) -> float:
    """Return the `unexplained` part that rounding may leave with a machine epsilon; at
    least what is left of a float64 model whose loss is computed in float32.
    """
    return max(16 * epsilon, math.pow(epsilon, 0.6), 1e-6)


# What the coefficients mean.


def read_coefficients(
    updates: Sequence[SolvedUpdate],
    weights: Sequence[float],
    *,
    reduction: Reduction = "mean",
    steps: int | None = None,
    clip_norm: float | None = None,
    workers: int = 1,
    limit: float = 1e-4,
) -> LoopReport:
    """Say what the coefficients of a loop's updates mean.

    Args:
        updates: in the order in which they were made.
        weights: one per micro-batch, in the order of the coefficients.
        reduction: what the loss of a micro-batch is, as in `gradaccum.wrap`.
        steps: micro-batches of one worker per window, or None.
        clip_norm: the norm to which each window is clipped, or None.
        workers: how many there are; all have the same number of micro-batches.
        limit: the `unexplained` part that rounding may leave.

    Raises:
        ArgumentTypeError, ArgumentValueError: `reduction`, `steps` or a weight is none.
    """
    rule = require_reduction(reduction)
    if steps is not None:
        require_int("steps", steps, at_least=1)
    for weight in weights:
        require_number("weight", weight, above=0, or_equal=True)
    if len(weights) % workers:
        raise explain(
            ArgumentValueError,
            "weights",
            expected="as many micro-batches on each of the workers",
            got=len(weights),
            fix="Give each worker's micro-batches, those of worker 0 first.",
        )
    if clip_norm is not None:
        require_number("clip_norm", clip_norm, above=0)
    reader = _CoefficientReader(
        tuple(updates), tuple(weights), rule, steps, clip_norm, workers, limit
    )
    return reader.report()


class _CoefficientReader:
    """Reads the coefficients of one loop."""

    def __init__(
        self,
        updates: tuple[SolvedUpdate, ...],
        weights: tuple[float, ...],
        reduction: Reduction,
        steps: int | None,
        clip_norm: float | None,
        workers: int,
        limit: float,
    ) -> None:
        self.updates = updates
        self.weights = weights
        self.reduction = reduction
        self.steps = steps
        self.clip_norm = clip_norm
        self.workers = workers
        self.limit = limit
        self.length = len(weights) // workers
        """Micro-batches of one worker."""
        self.members = [self._members_of(update) for update in updates]
        self.scaled_down: list[tuple[int, float]] = []
        """The updates that are right but for a factor between 0 and 1, and the
        factor.
        """
        self.problems: list[LoopProblem] = []
        self.notes: list[str] = []

    def report(self) -> LoopReport:
        uncertain = self._uncertainty()
        expected = tuple(self._expected_of(members) for members in self._new_members())
        if not uncertain:
            if not self.updates:
                self._say("no_update", 0, "The optimizer made no update.")
            self._read_places()
            for number, update in enumerate(self.updates, 1):
                self._read_update(number, update, expected[number - 1])
            self._read_clipping()
            self._note_empty_updates()
        return LoopReport(
            self.updates,
            expected,
            self.weights,
            self.workers,
            tuple(self.problems),
            tuple(self.notes),
            uncertain,
        )

    def _say(self, kind: str, update: int, explanation: str) -> None:
        self.problems.append(LoopProblem(kind, update, explanation))

    def _members_of(self, update: SolvedUpdate) -> tuple[int, ...]:
        """Return the numbers of the micro-batches that an update holds."""
        sizes = [abs(coefficient) for coefficient in update.coefficients]
        largest = max(sizes, default=0.0)
        least = max(LEAST, update.uncertainty) * largest
        return tuple(
            number for number, size in enumerate(sizes) if size > least and largest > 0
        )

    def _new_members(self) -> list[tuple[int, ...]]:
        """Return the micro-batches that each update should hold: all that it holds but
        those of the update before, if others are left.
        """
        new_members = []
        before: tuple[int, ...] = ()
        for members in self.members:
            new = tuple(number for number in members if number not in before)
            new_members.append(new or members)
            before = members
        return new_members

    def _expected_of(self, members: Sequence[int]) -> tuple[float, ...]:
        total = sum(self.weights[number] for number in members)
        coefficients = [0.0] * len(self.weights)
        for number in members:
            if self.reduction == "sum":
                coefficients[number] = 1.0
            elif total:
                part = self.weights[number] if self.reduction == "mean" else 1.0
                coefficients[number] = part / total
        return tuple(coefficients)

    def _uncertainty(self) -> str:
        norms = self.updates[0].norms if self.updates else ()
        without_gradient = [
            number
            for number, norm in enumerate(norms)
            if norm == 0 and self.weights[number]
        ]
        if without_gradient:
            return (
                f"The gradient of {self._named(without_gradient)} is zero, so that no"
                " coefficient tells where it went. Check with other data, or give it"
                " weight 0."
            )
        for number, update in enumerate(self.updates, 1):
            explained = update.unexplained <= self.limit
            if math.isinf(update.uncertainty) or (
                explained and update.uncertainty > 0.1
            ):
                return (
                    f"The micro-batches' gradients are too much alike to tell apart in"
                    f" update {number}. Check with other data, with more parameters"
                    " than micro-batches, or in float32."
                )
        return ""

    # Where each micro-batch went.

    def _read_places(self) -> None:
        if any(update.unexplained > self.limit for update in self.updates):
            return
        times = [0] * len(self.weights)
        for members in self.members:
            for number in members:
                times[number] += 1
        self._read_lost(times)
        for index in range(1, len(self.members)):
            again = set(self.members[index]) & set(self.members[index - 1])
            if again:
                self._say(
                    "leaked",
                    index + 1,
                    f"{self._named(sorted(again))} of the update before"
                    f" {_is_or_are(again)} in update {index + 1} again: gradients were"
                    " not cleared after the update.",
                )
        self._read_boundaries(times)
        self._read_reduction()

    def _read_lost(self, times: Sequence[int]) -> None:
        lost = [
            number
            for number, count in enumerate(times)
            if not count and self.weights[number]
        ]
        if not lost or not self.updates:
            return
        if self.workers == 1:
            after = max(self.members[-1], default=-1)
            tail = [number for number in lost if number > after]
            if tail:
                self._say(
                    "lost",
                    0,
                    f"{self._named(tail)} never reached the optimizer: the loop ends"
                    " without an update for its last, short window.",
                )
            lost = [number for number in lost if number <= after]
        if not lost:
            return
        sizes = [len(members) for members in self.members if members]
        if self.workers == 1 and set(sizes) == {1}:
            text = (
                f"{self._named(lost)} never reached the optimizer. Each update holds"
                " one micro-batch: most likely zero_grad() runs before each backward"
                " pass, or only the last backward pass of a window counts."
            )
            self._say("only_last", 0, text)
        else:
            text = f"{self._named(lost)} never reached the optimizer."
            self._say("lost", 0, text)

    def _read_boundaries(self, times: Sequence[int]) -> None:
        """Compare the micro-batches of each update with windows of `steps`."""
        leaked = any(problem.kind == "leaked" for problem in self.problems)
        if self.steps is None or leaked:
            return
        if any(problem.kind in ("only_last", "lost") for problem in self.problems):
            missing = [number for number, count in enumerate(times) if not count]
        else:
            missing = []
        for number, members in enumerate(self.members, 1):
            places = {member % self.length for member in members}
            first = (number - 1) * self.steps
            window = set(range(first, min(first + self.steps, self.length)))
            if places and places != window and not window & {*missing}:
                window_name = self._named(sorted(window)) if window else "none"
                self._say(
                    "boundary",
                    number,
                    f"Update {number} holds {self._named(members)}, where windows of"
                    f" {self.steps} have {window_name}: the condition for a step is off.",
                )
                return

    def _read_reduction(self) -> None:
        if self.workers == 1:
            return
        for number, members in enumerate(self.members, 1):
            counts = [0] * self.workers
            for member in members:
                counts[member // self.length] += 1
            if len(set(counts)) > 1:
                listed = ", ".join(
                    f"{count} of worker {worker}" for worker, count in enumerate(counts)
                )
                self._say(
                    "not_reduced",
                    number,
                    f"Update {number} holds micro-batches as follows: {listed}. What"
                    " the other workers had was not reduced.",
                )
                return

    # With what weight.

    def _read_update(
        self, number: int, update: SolvedUpdate, expected: Sequence[float]
    ) -> None:
        if update.unexplained > self.limit:
            self._say(
                "unexplained",
                number,
                f"{update.unexplained:.1%} of update {number} is no sum of the"
                " micro-batches' gradients: items of different micro-batches meet"
                " (batch norm, a contrastive loss), the loss has noise or a state, or"
                " a term of the loop's loss is not in loss_fn.",
            )
            return
        ignored = [
            member for member in self.members[number - 1] if not self.weights[member]
        ]
        if ignored:
            self._say(
                "weights",
                number,
                f"Update {number} holds {self._named(ignored)}, whose weight is 0.",
            )
            return
        members = [member for member in self.members[number - 1] if expected[member]]
        ratios = [update.coefficients[member] / expected[member] for member in members]
        if not ratios or _are_equal([*ratios, 1.0], update.uncertainty):
            return
        finding = self._weighing(number, update, members, ratios)
        if finding is not None:
            self.problems.append(finding)

    def _weighing(
        self,
        number: int,
        update: SolvedUpdate,
        members: Sequence[int],
        ratios: Sequence[float],
    ) -> LoopProblem | None:
        """Return what is wrong with the weights of the update's micro-batches."""
        room = update.uncertainty
        count = len(members)
        coefficients = [update.coefficients[member] for member in members]
        longest = self.steps or max(map(len, self.members)) // self.workers
        full_size = longest * self.workers
        if _are_equal([*coefficients, 1.0], room):
            return LoopProblem(
                "not_divided",
                number,
                f"Update {number} is the plain sum of {count} micro-batches: no mean was"
                f" taken, so that it is about {count} times too large.",
            )
        divided = _are_equal([*coefficients, 1 / full_size], room)
        if count < full_size and (
            divided or _are_equal([*ratios, count / full_size], room)
        ):
            text = (
                f"The short window of update {number} was divided by {full_size} in place"
                f" of {count}: it is {count / full_size:.3g} of what it should be."
            )
            if not _are_equal(ratios, room):
                text += (
                    " Its micro-batches count the same, though their weights differ."
                )
            return LoopProblem("short_window", number, text)
        if _are_equal(ratios, room):
            return self._scaling(number, _mean(ratios), count)
        if _are_equal(coefficients, room):
            return LoopProblem(
                "mean_of_means",
                number,
                f"In update {number} micro-batches of different weights count the"
                f" same, {_mean(coefficients):.3g} each: weigh each by its items.",
            )
        norms = [update.norms[member] for member in members] if update.norms else []
        return self._uneven(number, coefficients, ratios, norms, room)

    def _scaling(self, number: int, ratio: float, count: int) -> LoopProblem | None:
        """Return what is wrong with an update whose proportions are right; None if a
        clip of the whole gradient may have made it smaller.
        """
        reason = ""
        if count > 1 and _are_equal([ratio, 1 / count], 0.0):
            reason = f": the loss was divided by {count} once too often"
        elif self.workers > 1 and _are_equal([ratio, 1 / self.workers], 0.0):
            reason = ": the mean over the workers was taken of a mean over all"
        elif ratio >= 256 and _are_equal([ratio, 2.0 ** round(math.log2(ratio))], 0.0):
            reason = ": most likely the loss scale was not divided out"
        elif 0 < ratio < 1:
            self.scaled_down.append((number, ratio))
            return None
        return _scaled(number, ratio, reason)

    def _uneven(
        self,
        number: int,
        coefficients: Sequence[float],
        ratios: Sequence[float],
        norms: Sequence[float],
        room: float,
    ) -> LoopProblem:
        """Look for a factor between each micro-batch and the next, on top of equal or
        of right weights.
        """
        count = len(coefficients)
        again = [
            size * count / (count - place) for place, size in enumerate(coefficients)
        ]
        if count > 2 and _are_equal(again, room):
            return LoopProblem(
                "counted_again",
                number,
                f"In update {number} each micro-batch counts again with every later one:"
                " most likely the losses are added up, and backward() runs for the sum"
                " each time.",
            )
        if norms and _have_one_limit(coefficients, ratios, norms, room):
            return LoopProblem(
                "clipped_each",
                number,
                f"In update {number} each micro-batch was clipped alone: clip their sum"
                " once, at the end of the window.",
            )
        for sizes in (coefficients, ratios):
            if count < 3:
                break  # One factor follows any rule.
            factors = [before / after for before, after in pairwise(sizes)]
            if _are_equal(factors, room):
                return LoopProblem(
                    "scaled_inside",
                    number,
                    f"In update {number} the sum was multiplied by {_mean(factors):.3g}"
                    " before each further micro-batch, as a running mean or a repeated"
                    " scaling does.",
                )
            if all(factor < 1 + ROOM for factor in factors):
                return LoopProblem(
                    "scaled_inside",
                    number,
                    f"In update {number} earlier micro-batches count less than later"
                    " ones: the sum was made smaller inside the window, most likely by"
                    " a clip after each backward pass.",
                )
        return LoopProblem(
            "weights",
            number,
            f"In update {number} the micro-batches have weights that follow no rule.",
        )

    def _read_clipping(self) -> None:
        """Note the updates that were clipped as a whole; what made others smaller is
        wrong.
        """
        if self.problems:
            return  # Most likely the factor comes from what is wrong already.
        norms = [self.updates[number - 1].norm for number, _ in self.scaled_down]
        limit = self.clip_norm
        if limit is None and len(norms) > 1 and _are_equal(norms, 0.0):
            limit = _mean(norms)
        clipped = 0
        for (number, ratio), norm in zip(self.scaled_down, norms, strict=True):
            if limit is not None and _are_equal([norm, limit], 0.0):
                clipped += 1
                continue
            reason = ". If the loop clips each window, give clip_norm="
            self.problems.append(
                _scaled(number, ratio, reason if limit is None else "")
            )
        if clipped:
            self.notes.append(
                f"Updates that were clipped as a whole, to a norm of {limit:.4g}:"
                f" {clipped}."
            )

    def _note_empty_updates(self) -> None:
        empty = [
            str(number) for number, members in enumerate(self.members, 1) if not members
        ]
        if empty:
            self.notes.append(f"Updates that hold no micro-batch: {', '.join(empty)}.")

    def _named(self, members: Sequence[int]) -> str:
        places = sorted({member % self.length + 1 for member in members})
        if len(places) == 1:
            return f"micro-batch {places[0]}"
        if places == list(range(places[0], places[-1] + 1)):
            return f"micro-batches {places[0]} to {places[-1]}"
        return f"micro-batches {', '.join(map(str, places))}"


def _are_equal(numbers: Sequence[float], uncertainty: float) -> bool:
    room = ROOM + uncertainty
    largest = max(map(abs, numbers))
    return max(numbers) - min(numbers) <= room * largest


def _scaled(number: int, ratio: float, reason: str) -> LoopProblem:
    return LoopProblem(
        "scaled",
        number,
        f"Update {number} has the right proportions, and is {ratio:.3g} times the large"
        f" batch's{reason}.",
    )


def _have_one_limit(
    coefficients: Sequence[float],
    ratios: Sequence[float],
    norms: Sequence[float],
    room: float,
) -> bool:
    """True if the micro-batches that count least, on top of equal or of right weights,
    were all brought to one norm.
    """
    for sizes in (coefficients, ratios):
        largest = max(sizes)
        limited = [
            size * norm
            for size, norm in zip(sizes, norms, strict=True)
            if size < (1 - ROOM - room) * largest
        ]
        untouched = [
            largest * norm
            for size, norm in zip(sizes, norms, strict=True)
            if size >= (1 - ROOM - room) * largest
        ]
        if len(limited) < 2 or not _are_equal(limited, room):
            continue
        if all(part <= limited[0] * (1 + ROOM) for part in untouched):
            return True
    return False


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _is_or_are(members: set[int]) -> str:
    return "is" if len(members) == 1 else "are"


# The report in words.


SHOWN = 8
"""The number of updates whose coefficients are shown."""


def _lines(report: LoopReport) -> Iterator[str]:
    yield _verdict(report)
    for problem in report.problems:
        yield f"- {problem.explanation[0].upper()}{problem.explanation[1:]}"
    for note in report.notes:
        yield f"- Note: {note}"
    shown = zip(report.updates[:SHOWN], report.expected, strict=False)
    for number, (update, expected) in enumerate(shown, 1):
        yield f"Update {number}, micro-batches times:"
        yield f"    in the loop        {_row(update.coefficients, report.workers)}"
        yield f"    in the large batch {_row(expected, report.workers)}"
    if len(report.updates) > SHOWN:
        yield f"and {len(report.updates) - SHOWN} updates more."


def _verdict(report: LoopReport) -> str:
    counts = f"micro-batches: {len(report.weights)}, updates: {len(report.updates)}"
    if report.uncertain:
        return f"Cannot tell whether the loop is right ({counts}). {report.uncertain}"
    if report.problems:
        return f"The loop is wrong ({counts})."
    return f"The loop is right ({counts}): each update is that of the large batch."


def _row(coefficients: Sequence[float], workers: int) -> str:
    length = len(coefficients) // workers
    least = LEAST * max(map(abs, coefficients), default=0.0)
    rows = [
        " ".join(
            f"{coefficient:.3g}" if abs(coefficient) > least else "0"
            for coefficient in coefficients[start : start + length]
        )
        for start in range(0, len(coefficients), length)
    ]
    return " | ".join(rows)
