"""The loop check: which micro-batches reached the optimizer, and with what weight?

An optimizer should receive sum(c_k g_k), where g_k is the gradient of micro-batch k.
All g_k are computed at the same parameters. A backend records the gradient that the
optimizer receives, and finds the coefficients c_k by least squares. This module
interprets the coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from gradaccum.errors import ArgumentValueError
from gradaccum.least_squares import (
    GradientBasis,
    Vector,
    WeightedSum,
    norm_of,
    right_factors,
)
from gradaccum.nests import Nest, leaves_of
from gradaccum.options import Reduction, require_reduction
from gradaccum.registry import backend_of
from gradaccum.verification.subject import as_arguments
from gradaccum.window_loop import number_of_items

ROOM = 0.004
"""Coefficients count as equal if their relative difference is at most this number. A
mistake in a loop causes a much larger difference.
"""
LEAST = 1e-3
"""A coefficient counts as zero if it is at most this fraction of the largest
coefficient. For a micro-batch of very small weight, the limit is half of the expected
coefficient, because otherwise even the right coefficient could count as zero.
"""
MOST_ROUNDING = 0.02
"""The largest relative change of a gradient that rounding can cause, even in bfloat16.
`loop_report` ignores a larger result of `rounding_of`, because something other than
rounding must have changed the gradient.
"""
SCALES = (2.0**10, 2.0**12)
"""The factors by which `rounding_of` multiplies a loss so that the small elements of a
float16 gradient do not become 0.
"""
MOST_NOISE = 0.1
"""If the coefficients may be off by more than this fraction of the largest coefficient,
the check cannot tell whether the loop is right.
"""
SHOWN = 8
"""The report shows the coefficients of at most this many updates."""


class LoopProblem(NamedTuple):
    """One mistake in a training loop."""

    kind: str
    """The kind of mistake:

    - ``"lost"``: some micro-batches contributed to no update.
    - ``"only_last"``: each update contains only one micro-batch; the others were lost.
    - ``"leaked"``: micro-batches of the previous update contributed again.
    - ``"not_reduced"``: the workers contributed different numbers of micro-batches.
    - ``"not_divided"``: the update is a plain sum instead of a mean.
    - ``"short_window"``: a short window was divided by the length of a full window.
    - ``"mean_of_means"``: micro-batches of different weights count the same.
    - ``"scaled"``: the whole update was multiplied by a wrong factor.
    - ``"scaled_inside"``: the gradient sum was multiplied inside the window.
    - ``"clipped_each"``: each micro-batch's gradient was clipped separately.
    - ``"not_clipped"``: the window's gradient was not clipped.
    - ``"counted_again"``: each backward pass added all earlier gradients again.
    - ``"boundary"``: the update was applied after the wrong micro-batch.
    - ``"weights"``: the coefficients follow no known rule, or a micro-batch of weight 0
      contributed.
    - ``"unexplained"``: the update is not a weighted sum of the micro-batches'
      gradients.
    - ``"empty"``: the optimizer stepped with a gradient of zero.
    - ``"no_update"``: the optimizer applied no update.
    """
    update: int
    """The number of the update, counted from 1; 0 if the problem is not specific to one
    update.
    """
    explanation: str


@dataclass(repr=False)
class LoopReader:
    """Interprets the coefficients of a loop's updates. The gradient of an update is a
    sum of the micro-batches' gradients, each multiplied by a coefficient. The
    coefficients show which micro-batches reached the optimizer, and with what weight.
    """

    updates: Sequence[WeightedSum]
    """The gradient of each update as a weighted sum of the micro-batches' gradients, in
    the order in which the updates were applied.
    """
    weights: Sequence[float]
    """The weight of each micro-batch. With several workers, the micro-batches of worker
    0 come first, as in `WeightedSum.coefficients`.
    """
    reduction: Reduction = "mean"
    """How the loss function combines the losses of a micro-batch's items, as in
    `gradaccum.wrap`.
    """
    steps: int | None = None
    """The number of micro-batches that each worker adds to a window; None if unknown.
    """
    clip_norm: float | None = None
    """The norm to which each window's gradient is clipped, or None."""
    workers: int = 1
    """The number of workers. Every worker runs the same number of micro-batches."""
    limit: float = 1e-4
    """The largest `WeightedSum.unexplained` that can still be due to rounding."""
    rounding: float = 0.0
    """The relative rounding error of a micro-batch's gradient, if it was measured."""

    def __post_init__(self) -> None:
        require_reduction(self.reduction)
        self._length = len(self.weights) // self.workers
        """The number of micro-batches that each worker ran."""
        weights = self.weights
        if self.reduction != "mean":
            weights = [1.0 if weight else 0.0 for weight in self.weights]
        largest = max(weights, default=0.0) or 1.0
        self._shares = [weight / largest for weight in weights]
        """For each micro-batch, its expected coefficient, relative to the largest
        coefficient.
        """
        noise = max(map(self._noise_of, self.updates), default=0.0)
        self._unseen = {k for k, share in enumerate(self._shares) if share <= noise}
        """The micro-batches whose coefficients are too small to be measured, including
        the micro-batches of weight 0.
        """
        self.members = [self._members_of(update) for update in self.updates]
        """For each update, the indices of the micro-batches that contributed to the
        update.
        """
        self.expected = [
            self._right_coefficients(members - before or members)
            for before, members in pairwise([set(), *self.members])
        ]
        """For each update, the coefficients that a correct loop would give: one
        coefficient per micro-batch. The coefficient is 0 if the micro-batch did not
        contribute to the update, or had already contributed to the previous update.
        There is one exception: if this rule would make all coefficients of the update
        0, the previous update is ignored.
        """
        self.problems: list[LoopProblem] = []
        self.notes: list[str] = []
        """Further remarks about the loop, which do not indicate a mistake."""
        self.uncertain = self._why_uncertain()
        """Why the check cannot tell whether the loop is right; empty if it can tell."""
        if not self.uncertain:
            light = {k for k in self._unseen if self.weights[k]}
            if light:
                self.notes.append(
                    f"The weight of {self._names(light)} is too small to check, because"
                    " the gradients are rounded too coarsely."
                )
            self._find_problems()

    def _noise_of(self, update: WeightedSum) -> float:
        """Return the error of the update's coefficients, relative to the largest
        coefficient. Return 0 if the update is not a weighted sum of the micro-batches'
        gradients, because the coefficients of such an update are not used.
        """
        if update.unexplained > self.limit:
            return 0.0
        return max(update.uncertainty, self.rounding * update.condition)

    def _members_of(self, update: WeightedSum) -> set[int]:
        noise = self._noise_of(update)
        sizes = [abs(coefficient) for coefficient in update.coefficients]
        members = set()
        for k, (size, share) in enumerate(zip(sizes, self._shares, strict=True)):
            least = min(LEAST, share / 2 or LEAST)
            if size > max(noise, least) * max(sizes):
                members.add(k)
        return members

    def _right_coefficients(self, members: set[int]) -> tuple[float, ...]:
        weights = [self.weights[number] for number in members]
        factors = right_factors(self.reduction, weights)
        by_member = dict(zip(members, factors, strict=True))
        return tuple(by_member.get(k, 0.0) for k in range(len(self.weights)))

    def _why_uncertain(self) -> str:
        for number, update in enumerate(self.updates, 1):
            pairs = zip(update.norms, self.weights, strict=False)
            flat = {k for k, (norm, weight) in enumerate(pairs) if weight and not norm}
            finite = map(math.isfinite, update.norms)
            infinite = {k for k, is_finite in enumerate(finite) if not is_finite}
            if infinite:
                return (
                    f"The gradient of {self._names(infinite)} is not finite. Use other"
                    " data."
                )
            if not math.isfinite(update.norm):
                return (
                    f"The gradient of update {number} is not finite. If the loss is"
                    " scaled, check with a smaller scale."
                )
            if flat:
                return (
                    f"The gradient of {self._names(flat)} is zero, so it cannot be"
                    " found in any update. Use other data, or set the weight to 0."
                )
            if update.unexplained <= self.limit and self._noise_of(update) > MOST_NOISE:
                return (
                    "The micro-batches' gradients are too similar to distinguish in"
                    f" update {number}. Check with other data, with more parameters"
                    " than micro-batches, or in float32."
                )
        return ""

    def _find_problems(self) -> None:
        if not self.updates:
            self._say("no_update", 0, "The optimizer applied no update.")
        elif max(update.unexplained for update in self.updates) <= self.limit:
            self._find_lost()
            self._find_misplaced()
        for number, update in enumerate(self.updates, 1):
            if update.unexplained <= self.limit:
                self._read_weights(number, update)
                continue
            self._say(
                "unexplained",
                number,
                f"{100 * update.unexplained:.2g}% of update {number} is not a weighted"
                " sum of the micro-batches' gradients. Possible causes: items of a"
                " batch are mixed (batch norm, a contrastive loss); the loss is random"
                " or has a state; loss_fn lacks a term of the loop's loss; the loop"
                " clips or clears parts of the gradient, or adds up gradients in half"
                " precision.",
            )

    def _say(self, kind: str, update: int, explanation: str) -> None:
        self.problems.append(LoopProblem(kind, update, explanation))

    def _find_lost(self) -> None:
        """Report the micro-batches that did not contribute to any update. Micro-batches
        of weight 0 are not reported.
        """
        reached = set().union(*self.members)
        lost = {*range(len(self.weights))} - reached - self._unseen
        kind = "lost"
        reason = ""
        if not lost:
            return
        if self.workers == 1 and min(lost) > max(reached, default=-1):
            reason = ": the loop ends without an update for its last, short window"
        elif self.workers == 1 and max(map(len, self.members)) == 1:
            kind = "only_last"
            reason = (
                ". Each update contains only one micro-batch: most likely zero_grad()"
                " runs before each backward pass, or only the last backward pass of a"
                " window counts"
            )
        places = self._names(lost).capitalize()
        self._say(kind, 0, f"{places} never reached the optimizer{reason}.")

    def _find_misplaced(self) -> None:
        """Report three kinds of mistakes:

        - ``"leaked"``: a micro-batch of the previous update contributed to this update
          again. Every such update is reported.
        - ``"boundary"``: the update does not consist of the `steps` micro-batches of
          its window. At most one such update is reported.
        - ``"not_reduced"``: one worker contributed more micro-batches to the update
          than another worker. At most one such update is reported.
        """
        steps = self.steps or self._length
        unreached = set(range(len(self.weights))).difference(*self.members)
        pairs = pairwise([set(), *self.members])
        workers = range(0, len(self.weights), self._length)
        unseen_places = {
            place
            for place in range(self._length)
            if self._unseen.issuperset(worker + place for worker in workers)
        }
        starts = range(0, self._length, steps)
        windows = [set(range(self._length)[start : start + steps]) for start in starts]
        # A window of weight 0 needs no update, so no update is expected for it.
        expected_windows = iter([each for each in windows if each - unseen_places])
        for number, (before, members) in enumerate(pairs, 1):
            kinds = {problem.kind for problem in self.problems}
            places = {k % self._length for k in members}
            window = next(expected_windows, set()) if members else set()
            is_off = places != window and window.isdisjoint(unreached)
            if members & before:
                self._say(
                    "leaked",
                    number,
                    f"Update {number} contains {self._names(members & before)} of the"
                    " previous update again: gradients were not cleared after it.",
                )
            elif self.steps and places and is_off and "boundary" not in kinds:
                self._say(
                    "boundary",
                    number,
                    f"Update {number} contains {self._names(members)}, but with windows"
                    f" of {steps} it should contain"
                    f" {in_words(sorted(place + 1 for place in window))}: the loop steps"
                    " after the wrong micro-batch.",
                )
            counts = [0] * self.workers
            for k in range(len(self.weights)):
                # A micro-batch of weight 0 need not reach the optimizer.
                if k in members or (k in self._unseen and k % self._length in places):
                    counts[k // self._length] += 1
            if len(set(counts)) > 1 and "not_reduced" not in kinds:
                words = [f"{count} of worker {k}" for k, count in enumerate(counts)]
                self._say(
                    "not_reduced",
                    number,
                    f"Update {number} contains these micro-batches:"
                    f" {', '.join(words)}. Some workers' gradients were not reduced"
                    " before optimizer.step().",
                )

    def _read_weights(self, number: int, update: WeightedSum) -> None:
        """Compare the coefficients of an update with a list of patterns, such as the
        pattern of a loss that was divided twice. If the first matching pattern
        indicates a mistake, report the mistake. Some patterns indicate none, such as
        the right coefficients, or a window that was clipped as a whole.
        """
        expected = self.expected[number - 1]
        members = self.members[number - 1]
        weightless = {k for k in members if not self.weights[k]}
        window = [k for k in sorted(members) if expected[k]]
        if not members:
            self._say(
                "empty",
                number,
                f"Update {number} contains no micro-batch: its gradient is zero, but"
                " momentum and weight decay change the parameters.",
            )
            return
        if weightless:
            self._say(
                "weights",
                number,
                f"Update {number} contains {self._names(weightless)}, whose weight is"
                " 0.",
            )
            return
        coefficients = [update.coefficients[k] for k in window]
        ratios = [update.coefficients[k] / expected[k] for k in window]
        norms = [update.norms[k] for k in window if update.norms]
        room = ROOM + self._noise_of(update)
        noise = self._noise_of(update) * max(map(abs, update.coefficients))
        rooms = [ROOM + noise / abs(coefficient) for coefficient in coefficients]
        count = len(window)
        longest = max(map(len, self.members))
        full_size = max(self.workers * (self.steps or longest // self.workers), count)
        share = count / full_size

        def same(numbers: Sequence[float], *targets: float) -> bool:
            return are_equal([*numbers, *targets], [*rooms, *[room] * len(targets)])

        counted_again = [
            coefficient / (count - place)
            for place, coefficient in enumerate(coefficients)
        ]
        is_whole = same(ratios)
        is_smaller = is_whole and 0 < ratios[0] < 1
        limit = self.clip_norm or math.inf
        # The absolute tolerance is 1e-6, because torch's `clip_grad_norm_` divides by
        # the norm plus 1e-6.
        is_clipped = math.isclose(update.norm, limit, rel_tol=ROOM, abs_tol=1e-6)
        short = (
            f"The short window of update {number} was divided by {full_size} instead of"
            f" {count}: it is {share:.3g} times what it should be."
        )
        scaled = (
            f"Update {number} has the right proportions, but is"
            f" {ratios[0]:.3g} times the large batch's update"
        )
        rules = (
            (
                same(ratios, 1) and update.norm > (1 + room) * limit,
                "not_clipped",
                f"Update {number} was not clipped: its gradient has the norm"
                f" {update.norm:.3g}, but clip_norm={limit:.3g}.",
            ),
            (same(ratios, 1), "", ""),
            (
                same(coefficients, 1),
                "not_divided",
                f"Update {number} is the plain sum of {count} micro-batches: no mean"
                f" was taken, so the update is about {count} times too large.",
            ),
            (
                share < 1 and same(ratios, share),
                "short_window",
                short,
            ),
            (
                share < 1 and same(coefficients, 1 / full_size),
                "short_window",
                f"{short} Its micro-batches count the same although their weights"
                " differ.",
            ),
            (
                same(ratios, 1 / count),
                "scaled",
                f"{scaled}: the loss was divided by {count} once too often.",
            ),
            (
                same(ratios, 1 / self.workers),
                "scaled",
                f"{scaled}: a mean over all workers was divided by their number again.",
            ),
            (
                is_smaller and is_clipped,
                "",
                f"Update {number} was clipped as a whole.",
            ),
            # Do not report a small factor if another problem most likely caused it.
            (is_smaller and bool(self.problems), "", ""),
            (
                is_smaller and update.norm < limit < math.inf,
                "scaled",
                f"{scaled}, and its norm is {update.norm:.3g}. If the loop clips the"
                " gradients of several optimizers together, this may be right.",
            ),
            (
                is_smaller,
                "scaled",
                f"{scaled}. If the loop clips each window, pass clip_norm=.",
            ),
            (is_whole, "scaled", f"{scaled}."),
            (
                same(coefficients),
                "mean_of_means",
                f"In update {number} micro-batches of different weights count the same,"
                f" {coefficients[0]:.3g} each. Weight each by its number of items.",
            ),
            (
                count > 2 and same(counted_again),
                "counted_again",
                f"In update {number} each micro-batch counts again with every later"
                " micro-batch: most likely the losses are added up, and backward() runs"
                " on the sum each time.",
            ),
            (
                are_clipped(coefficients, norms, room)
                or are_clipped(ratios, norms, room),
                "clipped_each",
                f"In update {number} each micro-batch was clipped separately. Clip the"
                " window's sum once.",
            ),
            (
                are_multiplied(coefficients, room) or are_multiplied(ratios, room),
                "scaled_inside",
                f"In update {number} earlier micro-batches count less or more than"
                " later micro-batches, most likely because the sum was multiplied"
                " inside the window, for example by clipping after each backward pass,"
                " a running mean or repeated scaling.",
            ),
            (
                True,
                "weights",
                f"In update {number} the weights of the micro-batches follow no known"
                " rule.",
            ),
        )
        _, kind, text = next(rule for rule in rules if rule[0])
        if kind:
            self._say(kind, number, text)
        elif text:
            self.notes.append(text)

    def _names(self, members: Iterable[int]) -> str:
        """Describe the micro-batches `members` in words, such as "micro-batches 1 to
        3". The workers are mentioned only if their micro-batches differ.
        """
        places: list[list[int]] = [[] for _ in range(self.workers)]
        for member in sorted(members):
            places[member // self._length].append(member % self._length + 1)
        if all(each == places[0] for each in places):
            return in_words(places[0])
        return " and ".join(
            f"{in_words(each)} of worker {worker}"
            for worker, each in enumerate(places)
            if each
        )


class LoopReport(LoopReader):
    """The findings of a loop check; `str` shows them in words."""

    @property
    def right(self) -> bool:
        """True if the check has shown that each update equals the update you would get
        from its micro-batches combined into a single large batch.
        """
        return not self.problems and not self.uncertain

    def __str__(self) -> str:
        counts = f"micro-batches: {len(self.weights)}, updates: {len(self.updates)}"
        if self.problems:
            lines = [f"The loop is wrong ({counts})."]
        elif self.uncertain:
            lines = [
                f"Cannot tell whether the loop is right ({counts}). {self.uncertain}"
            ]
        else:
            lines = [
                f"The loop is right ({counts}): each update is the large batch's update."
            ]
        lines += [f"- {problem.explanation}" for problem in self.problems]
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

    __repr__ = __str__

    def _row(self, coefficients: Sequence[float]) -> str:
        length = len(coefficients) // self.workers
        least = LEAST * max(map(abs, coefficients))
        words = [
            f"{value:.3g}" if abs(value) > least else "0" for value in coefficients
        ]
        starts = range(0, len(words), length)
        return " | ".join(" ".join(words[start : start + length]) for start in starts)


class LoopRecord(Protocol):
    """The recorded loop, which `gradaccum.recording` yields."""

    def report(
        self,
        loss_fn: Callable[..., Any] | None = None,
        micro_batches: Sequence[Any] | None = None,
        **options: Any,
    ) -> LoopReport:
        """Report which micro-batches contributed to each update, and with what weight.
        The `options` are the same as for `check_loop`.
        """
        ...


def recording(optimizer: Any, model: Any = None) -> AbstractContextManager[LoopRecord]:
    """Record the gradients that `optimizer` receives while a loop runs. Any trainer may
    run the loop, and the loop need not use gradaccum.

    The parameters are restored after each update, so that all gradients are computed at
    the same parameters. The optimizer's own state is not restored. Use a fresh model
    without dropout.

        with gradaccum.recording(optimizer) as record:
            train()
        print(record.report(loss_fn, micro_batches))

    Args:
        optimizer: the optimizer that the loop steps. In torch, this is any optimizer,
            whether or not gradaccum or another package has wrapped it. In MindSpore, it
            is a `gradaccum_mindspore.LoopRecorder`, which gradaccum may have wrapped.
            In JAX, use `gradaccum_jax.LoopRecorder` instead of this function.
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
        loss_fn: ``loss_fn(*micro_batch)`` returns the loss of one micro-batch, not yet
            divided or weighted.
        micro_batches: the micro-batches that the loop trains on: tuples of arguments,
            or single arguments. A data loader must not shuffle.
        weight: ``weight(*micro_batch)`` returns the weight of a micro-batch. Default:
            the number of items, which is the length of the first argument, or of its
            arrays if it is a dictionary.
        reduction: how `loss_fn` combines the losses of its items, as in
            `gradaccum.wrap`.
        steps: micro-batches per window. By default, the window of an update is assumed
            to consist of the micro-batches that contributed to the update.
        clip_norm: the global 2-norm to which the loop clips each window's gradient.
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
    correct. Use it in a test of your own trainer.
    """
    report = check_loop(train, optimizer, loss_fn, micro_batches, **options)
    if not report.right:
        raise AssertionError(str(report))


def recorded_batches(micro_batches: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of each micro-batch.

    Raises:
        ArgumentValueError: there are no micro-batches; or `micro_batches` yields
            different micro-batches when it is iterated again, as a shuffling data
            loader does.
    """
    iterator = iter(micro_batches)
    batches = [as_arguments(each) for each in iterator]
    kind = type(micro_batches).__name__
    problem = "" if batches else f"an empty {kind}"
    if iterator is not micro_batches and not isinstance(micro_batches, list | tuple):
        second_batches = [as_arguments(each) for each in micro_batches]
        if not may_be_same(batches, second_batches):
            problem = f"a {kind} that yields different ones each time"
    if problem:
        raise ArgumentValueError(
            "micro_batches: expected the micro-batches on which the loop trains; got"
            f" {problem}. Write micro_batches = list(loader), and train on this list."
        )
    return batches


def may_be_same(batches: Nest, other_batches: Nest) -> bool:
    """Return False if two nests (nested structures of tuples, lists and dicts) are
    certainly different: they have different numbers of values, or two arrays at the
    same place have different shapes or elements. Values that cannot be compared count
    as equal.
    """
    values: list[Any] = [leaf.value for leaf in leaves_of(batches)]
    other_values: list[Any] = [leaf.value for leaf in leaves_of(other_batches)]
    if len(values) != len(other_values):
        return False
    for value, other_value in zip(values, other_values, strict=True):
        try:
            if value.shape != other_value.shape:
                return False
            # NaN counts as equal to any value. Only NaN differs from itself.
            is_same: Any = (value == other_value) | (value != value)
            if not is_same.all():
                return False
        except (AttributeError, TypeError, RuntimeError):
            continue  # These values cannot be compared.
    return True


def items_of(*micro_batch: Any) -> float:
    """Return the number of items in a micro-batch. `micro_batch` contains the arguments
    of the loss function. If the first argument is a list or an array, the number is its
    length. If it is a dictionary or another nest (nested structure of tuples, lists and
    dicts), the number is the length of the arrays in the nest.

    Raises:
        ArgumentValueError: the arrays in the first argument have different lengths, or
            the first argument contains no array.
    """
    first = micro_batch[0]
    shape: tuple[int, ...] = getattr(first, "shape", ())
    if isinstance(first, list) or shape:
        return float(len(first))
    items = number_of_items(dict(first) if isinstance(first, Mapping) else first)
    if not items:
        raise ArgumentValueError(
            "weight: expected a function, because the first element of a micro-batch"
            " does not tell its number of items; got None. Pass weight=lambda"
            " *micro_batch: ..., which returns the number of items."
        )
    return float(items)


def rounding_of(
    gradients: Sequence[Vector],
    gradient_of: Callable[[int, float], Vector],
    *,
    is_float16: bool = False,
) -> float:
    """Return the relative rounding error of the micro-batches' gradients. To measure
    the error, each gradient is computed again from the loss multiplied by 3, and then
    divided by 3. Without rounding, the gradient would stay the same. The result is the
    largest relative change of a gradient.

    Return 0 if something other than rounding changes a gradient, because the loss is
    random or its backward pass is not linear. To detect such a loss, each gradient is
    also computed with the factor 4, which causes hardly any rounding error, because 4
    is a power of two. If the factor 4 causes more than a tenth of the change that the
    factor 3 causes, the change is not due to rounding.

    float16 is an exception: the smallest elements of a gradient become 0 if the loss is
    not scaled (Micikevicius et al., "Mixed Precision Training", 2018). The factors in
    `SCALES` prevent this. If both factors give the same gradient, the difference
    between this gradient and the original gradient counts as rounding.

    Args:
        gradients: the gradient of each micro-batch.
        gradient_of: ``gradient_of(number, factor)`` computes the gradient of one
            micro-batch again, from its loss multiplied by `factor`. Every worker calls
            this function the same number of times.
        is_float16: whether the loss is computed in float16.
    """
    largest_change = 0.0
    is_linear = True
    for number, gradient in enumerate(gradients):
        by_three, by_four, scaled, scaled_more = [
            gradient_of(number, factor) * (1 / factor) for factor in (3.0, 4.0, *SCALES)
        ]
        change = norm_of(by_three - gradient)
        if norm_of(by_four - gradient) > 0.1 * change:
            is_same = norm_of(scaled_more - scaled) <= 0.1 * change
            is_linear = is_linear and is_float16 and is_same
            change = max(change, norm_of(scaled - gradient))
        norm = norm_of(gradient)
        if norm:
            largest_change = max(largest_change, change / norm)
    return largest_change if is_linear else 0.0


def loop_report(
    gradients: Sequence[Vector],
    updates: Sequence[Vector],
    weights: Sequence[float],
    epsilon: float,
    *,
    measure_rounding: Callable[[], float] | None = None,
    norms: Sequence[float] | None = None,
    **options: Any,
) -> LoopReport:
    """Report which micro-batches contributed to each update, and with what weight.

    Args:
        gradients: the gradient of each micro-batch.
        updates: the gradients that the optimizer received.
        weights: the weight of each micro-batch.
        epsilon: the machine epsilon of the coarsest dtype among the parameters.
        measure_rounding: returns the result of `rounding_of`. It is called only if the
            loop seems to be wrong, because it runs each micro-batch four more times.
        norms: the norm of each update, if `updates` contains only some elements of each
            update.
        options: as in `LoopReader`.
    """
    basis = GradientBasis(gradients)
    sums = [basis.weighted_sum(update) for update in updates]
    if norms is not None:
        sums = [
            each._replace(norm=norm) for each, norm in zip(sums, norms, strict=True)
        ]
    # The limit is at least 1e-6, because a float64 model may compute its loss in
    # float32.
    limit = max(16 * epsilon, math.pow(epsilon, 0.6), 1e-6)
    report = LoopReport(sums, weights, limit=limit, **options)
    if report.right or measure_rounding is None:
        return report
    # Under autocast the gradients are rounded more coarsely than the parameters.
    rounding = measure_rounding()
    if not 0 < rounding <= MOST_ROUNDING:
        return report
    limit = max(limit, 4 * rounding)
    return LoopReport(sums, weights, limit=limit, rounding=rounding, **options)


def in_words(places: Sequence[int]) -> str:
    if not places:
        return "no micro-batch"
    if len(places) == 1:
        return f"micro-batch {places[0]}"
    if list(places) == list(range(places[0], places[-1] + 1)):
        return f"micro-batches {places[0]} to {places[-1]}"
    return f"micro-batches {', '.join(map(str, places))}"


def are_equal(numbers: Sequence[float], rooms: Iterable[float]) -> bool:
    """True if all numbers count as equal, which means that some value lies within the
    tolerance of every number. The relative tolerance of a number is half of its entry
    in `rooms`. Two numbers with the same entry r therefore count as equal if their
    relative difference is at most about r.
    """
    least = -math.inf
    most = math.inf
    for number, room in zip(numbers, rooms, strict=True):
        error = abs(number) * room / 2
        least = max(least, number - error)
        most = min(most, number + error)
    return least <= most


def are_clipped(sizes: Sequence[float], norms: Sequence[float], room: float) -> bool:
    """True if the loop seems to have clipped each micro-batch's gradient separately,
    because the clipped gradients have the same norm. If there are more than two
    micro-batches, the micro-batches with the largest factor in `sizes` are left out,
    because their gradients may have been too small to clip.

    - `sizes`: for each micro-batch, the factor by which the loop multiplied its
      gradient. The caller passes the micro-batches' coefficients, or the coefficients
      divided by the right coefficients.
    - `norms`: the norms of the micro-batches' gradients before they were multiplied.
    - `room`: the relative difference up to which two numbers count as equal.
    """
    largest = max(sizes)
    clipped_norms = [
        size * norm
        for size, norm in zip(sizes, norms, strict=False)
        if size < (1 - room) * largest or len(sizes) == 2
    ]
    rooms = [room] * len(clipped_norms)
    return len(clipped_norms) > 1 and are_equal(clipped_norms, rooms)


def are_multiplied(sizes: Sequence[float], room: float) -> bool:
    """True if the gradient sum seems to have been multiplied inside the window, between
    two micro-batches. `sizes` and `room` have the same meaning as in `are_clipped`.

    The result is True in two cases:

    - The ratio of consecutive sizes is constant. This happens if the sum was multiplied
      by the same number after each micro-batch.
    - The sizes never decrease. This happens if the sum was multiplied by numbers <= 1,
      as clipping does, because the gradients of earlier micro-batches are then
      multiplied more times.

    With fewer than three micro-batches the result is False, because any two sizes have
    a constant ratio.
    """
    factors = [before / after for before, after in pairwise(sizes)]
    if len(factors) < 2:
        return False
    return max(factors) < 1 + ROOM or are_equal(factors, [room] * len(factors))
