"""Timing in interleaved rounds: on a noisy machine two contestants are comparable only
within one round.

In each round every contestant has one turn, in an order that rotates, so that whatever
else the machine does hits all of them. A ratio is the median over the rounds of
(contestant / baseline in that round); its spread is the quartiles of those.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

WARM_UP = 3


class Plan(NamedTuple):
    """How long to measure."""

    rounds: int
    """At most."""
    least: int = 1
    """Rounds that are made however long they take."""
    seconds: float = math.inf
    """After which no further round begins."""
    turn: float = 0.0
    """Seconds that the baseline's turn should last at least: short work is repeated
    within a turn, the same number of times by all.
    """


class Timing(NamedTuple):
    """One contestant's times, in milliseconds for one run, and its ratios to the
    baseline.
    """

    contestant: str
    median_ms: float
    ratio: float
    ratio_low: float
    """First quartile."""
    ratio_high: float
    """Third quartile."""
    rounds: int


def measure(
    contestants: Mapping[str, Callable[[], object]],
    baseline: str,
    plan: Plan,
    clock: Callable[[], float] | None = None,
) -> list[Timing]:
    """Time every contestant by `clock` as often as the `plan` says, after a warm-up
    that compiles and allocates.
    """
    for run in contestants.values():
        for _ in range(WARM_UP):
            run()
    repeats = (
        max(1, math.ceil(plan.turn / _time(contestants[baseline], 1, clock)))
        if plan.turn
        else 1
    )
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for turn in range(plan.rounds):
        if turn >= plan.least and time.perf_counter() - begin > plan.seconds:
            break
        for name in _rotated(names, turn):
            seconds[name].append(_time(contestants[name], repeats, clock))
    return [_timing(name, seconds[name], seconds[baseline]) for name in names]


def _time(
    run: Callable[[], object], repeats: int, clock: Callable[[], float] | None
) -> float:
    clock = clock or time.perf_counter
    begin = clock()
    for _ in range(repeats):
        run()
    return (clock() - begin) / repeats


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def _timing(name: str, own: Sequence[float], baseline: Sequence[float]) -> Timing:
    ratios = np.asarray(own) / np.asarray(baseline)
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return Timing(
        name,
        1e3 * float(np.median(own)),
        float(middle),
        float(low),
        float(high),
        len(own),
    )
