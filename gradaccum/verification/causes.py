"""The causes that `gradaccum.verify` can name, in words. `gradaccum/VERIFY.md` has a
section for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import eq, le, lt, ne
from typing import NamedTuple

from gradaccum.verification.report import Cause
from gradaccum.verification.subject import Column

# Numbers per item that stand in the batch and might be what a mean loss divides by.
#
# A mean over tokens divides by the labels that are no padding, a detector's loss by its
# positives, a weighted one by the sum of the weights.


IGNORED = -100
"""`ignore_index` of torch's cross entropy; others use it too."""

Row = Sequence[float]


class Count(NamedTuple):
    """A number per item."""

    where: str
    """What is counted: ``batch[1] != -100``."""
    code: str
    """What to write as ``weight=``."""
    values: tuple[float, ...]
    """One number >= 0 per item."""


def counts(columns: Sequence[Column]) -> list[Count]:
    """Return the counts to try, without duplicates and those that are equal for all
    items.
    """
    found: dict[tuple[float, ...], Count] = {}
    for column in columns:
        for count in _counts_of(column):
            if len(set(count.values)) > 1 and min(count.values) >= 0:
                found.setdefault(count.values, count)
    return list(found.values())


def labels(columns: Sequence[Column]) -> list[Column]:
    return [column for column in columns if all(len(row) == 1 for row in column.rows)]


def _counts_of(column: Column) -> Iterator[Count]:
    shifts = [("", slice(None))] + (
        [("[:, 1:]", slice(1, None)), ("[:, :-1]", slice(None, -1))]
        if column.sequence
        else []
    )
    for words, part in shifts:
        rows = [row[part] for row in column.rows]
        where = column.where + words
        for test, holds in _tests(column):
            yield _count(
                f"{where} {test}",
                f"({where} {test}).sum()",
                [float(sum(map(holds, row))) for row in rows],
            )
        yield _count(
            f"the sum of {where}", f"{where}.sum()", [float(sum(row)) for row in rows]
        )


def _tests(column: Column) -> Iterator[tuple[str, Callable[[float], bool]]]:
    if column.integers:
        yield f"!= {IGNORED}", partial(ne, IGNORED)
    yield "!= 0", partial(ne, 0)
    yield "== 0", partial(eq, 0)
    yield "> 0", partial(lt, 0)
    yield ">= 0", partial(le, 0)
    if column.integers and column.sequence:
        paddings = {row[-1] for row in column.rows if row}
    else:
        paddings = set()
    for padding in sorted(paddings - {0, IGNORED})[:3]:
        yield f"!= {padding:g}", partial(ne, padding)


def _count(where: str, code: str, values: Sequence[float]) -> Count:
    return Count(where, f"lambda *batch: {code}", tuple(values))


LOSS = "the loss"
SHOWN = 5

KINDS = (
    "not_finite",
    "not_repeatable",
    "custom_backward",
    "hidden_state",
    "batch_statistics",
    "wrong_weight",
    "coupled_loss",
)
"""Every kind of cause, in the order in which the experiments look for it."""


def listed(names: Sequence[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def not_finite(names: Sequence[str]) -> Cause:
    explanation = (
        "The gradient of the large batch itself is not finite, so nothing can be"
        " compared with it."
    )
    return Cause(
        "not_finite",
        listed(names),
        explanation,
        "Mend the loss first, or verify with another batch.",
    )


def not_finite_part(names: Sequence[str], times: str) -> Cause:
    explanation = (
        f"The gradient of the large batch is finite, that of {times} is not: the loss"
        " divides by a count that is zero there, or by a deviation over too few items."
    )
    fix = (
        "Divide by max(count, 1), so that a micro-batch without any has a loss of zero,"
        " and write weight= that count."
    )
    return Cause("not_finite", listed(names), explanation, fix)


def not_repeatable(names: Sequence[str]) -> Cause:
    explanation = (
        "Two runs of the same batch, with the model's state and the random state put"
        f" back, differ in {listed(names)}: the loss keeps or reads something that"
        " changes from call to call, as a generator without a seed does."
    )
    fix = (
        "Keep it in the model as a buffer, or compute it outside of the loss and give"
        " it as a part of the batch."
    )
    return Cause("not_repeatable", "outside of the model", explanation, fix)


def custom_backward(names: Sequence[str], culprits: Sequence[str]) -> Cause:
    if names:
        seen = (
            "A loss multiplied by a number does not give the multiplied gradient in"
            f" {listed(names)}. "
        )
    else:
        seen = ""
    explanation = (
        f"{seen}A backward pass ignores the gradient that it is handed, and with it the"
        " weight of a micro-batch."
    )
    fix = (
        "Multiply by the incoming gradient in the backward pass of the custom function."
    )
    return Cause(
        "custom_backward",
        listed(culprits) or "a custom backward or gradient hook",
        explanation,
        fix,
    )


def shared_randomness(places: Sequence[str]) -> Cause:
    explanation = (
        "These random numbers do not follow the random state: a seed or key is fixed,"
        " so every micro-batch gets the same ones."
    )
    fix = (
        "Seed once, at the start of the program, not in the loss. In JAX give each"
        " micro-batch its own key: axes='key' or fold_in."
    )
    return Cause("not_repeatable", listed(places), explanation, fix)


def numbers_by_place() -> Cause:
    """Name random numbers that are equal in every micro-batch, each item's by its place
    in the micro-batch.
    """
    explanation = (
        "The loss gives an item a number by its place in the micro-batch, the same in"
        " every micro-batch: as a generator does that is made with a seed in the loss,"
        " or numbers from a table."
    )
    fix = (
        "Make the generator once, outside of the loss, or bring the numbers in the"
        " batch."
    )
    return Cause("not_repeatable", LOSS, explanation, fix)


def randomness(places: Sequence[str], names: Sequence[str]) -> Cause:
    """Name random numbers that cannot be replayed for the same items."""
    explanation = (
        f"The gradient of {listed(names)} depends on random numbers that cannot be"
        " given to the same items again in another partition, so that only evaluation"
        " mode can be compared."
    )
    return Cause(
        "not_repeatable",
        listed(places),
        explanation,
        "Verify again with these operations switched off; drawing is no mistake by"
        " itself.",
    )


def state(changed: Sequence[str], names: Sequence[str]) -> Cause:
    """Name state left by one micro-batch that changes the gradient of the next."""
    explanation = (
        "The forward pass changes this and the loss reads it: with the state put back"
        f" before each micro-batch the gradient of {listed(names)} is another one."
    )
    fix = (
        "Update it once per window, after the optimizer's step, or use the value from"
        " before the window."
    )
    return Cause(
        "hidden_state", listed(changed) or "state of the model", explanation, fix
    )


def batch_statistics(layers: Sequence[str], settled: bool) -> Cause:
    """Name the layers with statistics of the batch, if their framework shows them."""
    mode = "stays the same" if settled else "moves too, for another reason"
    explanation = (
        "In training mode the output for one item depends on the other items of its"
        f" micro-batch. In evaluation mode the gradient {mode}."
    )
    fix = (
        "Use GroupNorm or LayerNorm, freeze the statistics (evaluation mode for these"
        " layers), or accept statistics per micro-batch."
    )
    return Cause("batch_statistics", listed(layers) or "the model", explanation, fix)


def wrong_reduction(reduction: str, right: str) -> Cause:
    weights = " and these weights" if reduction == right else ""
    stays = f"reduction={right!r}{' and without them' if weights else ''}"
    explanation = (
        f"The gradient moves with reduction={reduction!r}{weights}; it stays the same"
        f" under every partition with {stays}."
    )
    fix = "Write reduction='mean' and no weight=."
    if right == "sum":
        fix = (
            "Write reduction='sum'; or, for the mean over the window's items,"
            " reduction='sum_per_item' and weight= their number."
        )
    return Cause("wrong_weight", LOSS, explanation, fix)


def unequal_count(count: Count, times: str = "") -> Cause:
    """Name a count of the batch that makes it right; `times` says which micro-batches
    have a non-finite gradient, "" if none.
    """
    seen = (
        f" The gradient of {times} is not finite: the count is zero there, and a weight"
        " of zero leaves such a micro-batch out."
    )
    explanation = (
        f"The loss divides by a count ({count.where}) that differs between"
        " micro-batches. With that count as the weight the gradient stays the same"
        f" under every partition.{seen if times else ''}"
    )
    return Cause(
        "wrong_weight",
        count.where,
        explanation,
        f"Write reduction='mean', weight={count.code}.",
    )


def unequal_weights(
    values: Sequence[float], labels: str | None, by_label: Sequence[tuple[float, float]]
) -> Cause:
    """Name measured weights that make it right."""
    if labels is not None:
        table = ", ".join(f"{label:g}: {weight:.3g}" for label, weight in by_label)
        seen = f"The weight follows {labels}: {table}."
        where = f"a weight by {labels}"
    else:
        # Those of 1000 and 1003 tokens are told apart.
        digits = 3 if max(values) - min(values) > 0.1 else 6
        shown = ", ".join(f"{value:.{digits}g}" for value in values[:8])
        more = ", ..." if len(values) > 8 else ""
        seen = f"Measured, per item: {shown}{more}."
        where = "the denominator of the loss"
    explanation = (
        f"The loss is a weighted mean, whose items weigh differently. {seen} With these"
        " weights the gradient stays the same."
    )
    fix = (
        "Write weight= a function that returns what the loss divides by in a"
        " micro-batch: the sum of these weights over its items."
    )
    return Cause("wrong_weight", where, explanation, fix)


def repeated_term(names: Sequence[str]) -> Cause:
    """Name a part of the gradient that grows with the number of micro-batches."""
    explanation = (
        "The gradient of these parameters grows with the number of micro-batches: each"
        " micro-batch adds a part of it in full. That part is a penalty, an auxiliary"
        " loss, or a parameter of the loss itself, such as a temperature."
    )
    fix = (
        "Add that term once per window (divide it by the number of micro-batches), or"
        " use coupled_backward, which differentiates it once."
    )
    return Cause("wrong_weight", listed(names), explanation, fix)


def summed_term(names: Sequence[str]) -> Cause:
    """Name a part of the gradient that shrinks with the number of micro-batches."""
    explanation = (
        "A part of the gradient of these parameters shrinks with the number of"
        " micro-batches: the loss adds a sum over the items to a mean over them, and"
        " reduction='mean' divides both."
    )
    return Cause(
        "wrong_weight",
        listed(names),
        explanation,
        "Make each term of the loss a mean over items, or each a sum.",
    )


def coupled_loss(names: Sequence[str], off: float | None) -> Cause:
    if off is None:
        best = ""
    else:
        best = f" (the best ones are {off:.3g} units of rounding off)"
    explanation = (
        "No weights make the micro-batches add up to the large batch's gradient in"
        f" {listed(names)}{best}: the loss of one item depends on the others, as in"
        " contrastive, ranking and load-balancing losses, statistics over the batch and"
        " a branch that the batch chooses."
    )
    fix = (
        "Split it into outputs per item and a loss of all outputs: coupled_backward"
        " (torch), coupled_value_and_grad (JAX, MindSpore). If it only adds terms that"
        " divide by different counts: gradaccum.windows."
    )
    return Cause("coupled_loss", LOSS, explanation, fix)
