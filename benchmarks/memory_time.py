"""Memory and time of the four ways to make one gradient, as the case and the plot that
torch and JAX share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.case import LIMIT, Case, Curve
from benchmarks.contestants.bert import (
    BATCHES,
    BERT_BASE,
    FEW_LAYERS,
    LARGE,
    QUICK_BATCHES,
    RECOMPUTE,
    WAYS,
    Encoder,
)
from benchmarks.rounds import Plan, measure

PLAN = Plan(rounds=5, least=3, seconds=60.0)
MakeWindow = Callable[[str, int, Encoder], Callable[[], object]]
"""From a way, a size of batch and the encoder's shape, one run."""
Memory = Callable[[str, int, Encoder], float]
"""Its peak MiB."""


def answers(
    framework: str, quick: bool, window: MakeWindow, memory: Memory
) -> Iterator[Case | Curve]:
    """With few layers the largest batch as a case, and a curve for each way, from the
    smallest batch to the largest; and all layers.

    Args:
        framework: its name, for the plot.
        quick: small batches and few layers alone.
        window: makes a run.
        memory: measures one.
    """
    sizes = QUICK_BATCHES if quick else BATCHES
    known = {
        (way, size): memory(way, size, FEW_LAYERS) for way in WAYS for size in sizes
    }
    yield comparison(
        FEW_LAYERS, sizes[-1], window, {way: known[way, sizes[-1]] for way in WAYS}
    )
    limit = limit_of(known, sizes)
    medians = {
        size: measure({way: window(way, size, FEW_LAYERS) for way in WAYS}, LARGE, PLAN)
        for size in sizes
    }
    for way in WAYS:
        times = [
            next(t.median_ms for t in medians[size] if t.contestant == way)
            for size in sizes
        ]
        counts_of_way = {
            LIMIT: limit,
            "largest batch under the limit": largest_under(known, way, sizes, limit),
        }
        peaks = [known[way, size] for size in sizes]
        yield Curve(
            f"{framework}: memory and time",
            way,
            times,
            peaks,
            "time of one gradient, ms",
            "peak memory, MiB",
            counts_of_way,
        )
    if not quick:
        yield comparison(
            BERT_BASE,
            sizes[-1],
            window,
            {way: memory(way, sizes[-1], BERT_BASE) for way in (LARGE, RECOMPUTE)},
        )


def comparison(
    shape: Encoder, items: int, window: MakeWindow, peaks: Mapping[str, float]
) -> Case:
    """One size of batch as a case, of the ways whose peak MiB are given, the large
    batch among them.
    """
    counts = {
        way: {"peak MiB": peak, "of the large batch": peak / peaks[LARGE]}
        for way, peak in peaks.items()
    }
    name = f"{shape.layers} x {shape.width}, {shape.length} tokens x {items}"
    return Case(name, LARGE, {way: window(way, items, shape) for way in peaks}, counts)


def limit_of(memory: Mapping[tuple[str, int], float], sizes: Sequence[int]) -> float:
    """A limit at which the large batch runs out half way: midway between what its two
    middle sizes need.
    """
    middle = len(sizes) // 2
    return (memory[LARGE, sizes[middle - 1]] + memory[LARGE, sizes[middle]]) / 2


def largest_under(
    memory: Mapping[tuple[str, int], float],
    way: str,
    sizes: Sequence[int],
    limit: float,
) -> int:
    """The largest batch of `sizes` that needs no more than `limit`; 0 if none does."""
    return max((size for size in sizes if memory[way, size] <= limit), default=0)
