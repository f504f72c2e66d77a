"""Windows taken from one or several loaders: cut where they should be, totals right,
nothing read too early, kept too long or lost.
"""

from __future__ import annotations

import math
import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum import (
    GradAccumError,
    GradAccumWarning,
    UsageError,
    kit,
    until_weight,
    updates_in,
    windows,
)
from gradaccum.kit import Sizes, epoch


class Item:
    """Something that a weak reference can watch."""


class Loader:
    """Counts what was read of it, and watches whether it still lives."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.given: list[weakref.ref[Item]] = []

    def __iter__(self) -> Iterator[Item]:
        for _ in range(self.items):
            item = Item()
            self.given.append(weakref.ref(item))
            yield item
            del item

    def alive(self) -> list[int]:
        return [index for index, item in enumerate(self.given) if item() is not None]


def lengths(made: Any) -> list[int]:
    return [len(window) for window in made]


@given(sizes=st.lists(st.integers(0, 9), max_size=30), limit=st.integers(1, 20))
def test_windows_end_where_those_of_an_optimizer_do(
    sizes: list[int], limit: int
) -> None:
    schedule = until_weight(limit)
    state = kit.initial_state()
    expected = []
    for size in sizes:
        state = kit.State(*kit.accumulate(state, size, True, kit.select))
        if kit.ends(state, schedule, kit.select):
            expected.append(state.micro_step)
            state = kit.State(*kit.discard(state))
    if state.micro_step:
        expected.append(state.micro_step)
    made = windows(sizes, schedule, {"tokens": float}, weight="tokens")
    assert lengths(made) == expected


def test_schedules_follow_the_number_over_epochs() -> None:
    pairs = windows(range(6), [(0, 1), (2, 3)])
    assert lengths(pairs) == [1, 1, 3, 1]
    assert lengths(pairs) == [3, 3], "a second epoch goes on"
    assert lengths(windows(range(6), lambda number: number + 1)) == [1, 2, 3]
    assert lengths(windows(range(6), [(0, 1), (2, 3)], start=2)) == [3, 3]
    by_weight = until_weight([(0, 1), (1, 4)])
    assert lengths(windows(range(6), by_weight, {"n": lambda _: 2}, "n")) == [
        1,
        2,
        2,
        1,
    ]


def test_reads_one_window_and_no_more() -> None:
    loader = Loader(7)
    made = iter(windows(loader, 3))
    assert len(loader.given) == 0, "before it is asked for"
    positions = []
    for window in made:
        end = len(loader.given)
        positions.append(end)
        assert loader.alive() == list(range(end - len(window), end))
    assert positions == [3, 6, 7]
    assert loader.alive() == []


def test_window_can_be_run_through_again_while_it_is_the_current_one() -> None:
    made = iter(windows([1, 2, 3], 2))
    first = next(made)
    assert list(first) == list(first) == [1, 2]
    half_way = iter(first)
    next(half_way)
    second = next(made)
    for late in (half_way, iter(first)):
        with pytest.raises(
            UsageError, match="window 0: expected to be iterated over before the next"
        ):
            next(late)
    assert len(first) == 2
    assert first.number == 0
    assert list(second) == [3]
    with pytest.raises(StopIteration):
        next(made)
    with pytest.raises(UsageError, match="window 1"):
        list(second)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "3"])
def test_bad_counts_raise(value: Any) -> None:
    made = windows([1], 1, {"tokens": lambda _: value})
    with pytest.raises(GradAccumError, match="finite number >= 0"):
        next(iter(made))


@pytest.mark.parametrize("steps", [lambda _: 0, until_weight(lambda _: 0)])
def test_bad_sizes_of_a_callable_raise(steps: Any) -> None:
    weight = "tokens" if isinstance(steps, kit.UntilWeight) else None
    with pytest.raises(GradAccumError, match="an int >= 1"):
        next(iter(windows([[1]], steps, {"tokens": sum}, weight)))


GROWING = [(0, 1), (3, 4)]


@pytest.mark.parametrize(
    ("length", "steps", "arguments", "updates"),
    [
        (10, 4, {}, 3),
        (0, 4, {"epochs": 2}, 0),
        (10, GROWING, {}, 5),
        (10, GROWING, {"optimizer_step": 3}, 3),
        (6, lambda number: number + 1, {"epochs": 2}, 5),
        # An open window is filled up first; a full one, whose update raised, is closed.
        (9, 4, {"micro_step": 3}, 3),
        (8, 4, {"micro_step": 2}, 3),
        (0, 4, {"micro_step": 1, "epochs": 2}, 1),
        (5, 4, {"micro_step": 4}, 3),
    ],
)
def test_updates_are_counted_with_the_short_windows(
    length: int, steps: Any, arguments: dict[str, int], updates: int
) -> None:
    assert updates_in(length, steps, **arguments) == updates
    assert updates_in([None] * length, steps, **arguments) == updates


def test_progress_of_a_loader_of_unknown_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(epoch(iter([1, 2]), lambda: None, progress=True)) == [1, 2]
    assert "micro-batches" in capsys.readouterr().out


def test_epoch_flushes_when_the_loader_ends() -> None:
    flushed = []
    seen: list[int] = []
    looked_at: list[int] = []
    batches = epoch([1, 2, 3], lambda: flushed.append(len(seen)), see=looked_at.append)
    for item in batches:
        assert looked_at == seen, "after the loop's body"
        assert not flushed
        seen.append(item)
    assert seen == [1, 2, 3]
    assert flushed == [3]
    assert looked_at == [1, 2, 3]


def test_epoch_is_one_pass() -> None:
    """A loop over epochs that uses one object would otherwise train a single epoch."""
    batches = epoch([1, 2, 3], lambda: None)
    chunks = [list(islice(batches, 2)) for _ in range(3)]
    assert chunks == [[1, 2], [3], []]
    batches = epoch([1, 2, 3], lambda: None)
    assert [*batches, *batches] == [1, 2, 3]
    with pytest.raises(UsageError, match="got an iterator that is already exhausted"):
        list(batches)


def test_epoch_has_the_length_of_its_loader() -> None:
    assert len(epoch([1, 2, 3], lambda: None)) == 3
    with pytest.raises(TypeError, match="has no len"):
        len(epoch(iter([1]), lambda: None))


def test_epoch_leaves_the_window_open_where_it_is_asked_to_or_is_left_early() -> None:
    def flush():
        raise AssertionError("nobody asked for it")

    assert list(epoch([1, 2], flush, carry=True)) == [1, 2]
    for item in epoch([1, 2], flush):
        if item == 1:
            break

    def broken():
        yield 1
        raise OSError("a disk that is gone for a moment")

    with pytest.raises(OSError, match="a disk"):
        list(epoch(broken(), flush))


class Batch:
    """Graphs that are no container, with their number, as PyTorch Geometric's."""

    def __init__(self, num_graphs: int) -> None:
        self.num_graphs = num_graphs


class Nested:
    """A tensor of rows of several lengths, as torch's first ones."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no sizes")


NO_ARRAYS = (5, "text", np.zeros(()))


def rows(*counts: int) -> list[Any]:
    return [(*NO_ARRAYS, np.zeros((count, 7))) for count in counts]


SIZES = {
    "equal": ("mean", [*rows(4, 4), None, *rows(4)], []),
    "said once": ("mean", rows(4, 3, 4, 2), [[4, 3]]),
    "no arrays": ("mean", [None, NO_ARRAYS, *rows(4, 2)], [[4, 2]]),
    "a sum": ("sum", rows(4, 3), []),
    "a sum per item": ("sum_per_item", rows(4, 3), []),
    "labels": (
        "mean",
        [{"x": np.zeros((n, 7)), "y": np.zeros(n)} for n in (4, 4, 3)],
        [[4, 3]],
    ),
    "time first": (
        "mean",
        [*((np.zeros((n, 3, 7)), np.zeros(3)) for n in (3, 5, 6)), *rows(4)],
        [],
    ),
    "graphs": (
        "mean",
        [  # nodes, edges, labels
            (np.zeros((n, 7)), np.zeros((2, 3 * n)), np.zeros(4)) for n in (9, 6, 7)
        ],
        [],
    ),
    "fewer graphs": ("mean", [Batch(4), Batch(3)], [[4, 3]]),
    "nested": ("mean", [Nested(), Nested()], []),
}


@pytest.mark.parametrize("name", SIZES)
def test_unequal_micro_batches_without_a_weight_are_said_once(name: str) -> None:
    """None is a micro-batch with a weight, whose items do not matter."""
    reduction, micro_batches, numbers = SIZES[name]
    sizes = Sizes(reduction)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sizes.see(rows(9))
        for micro_batch in micro_batches:
            sizes.weighed = micro_batch is None
            sizes.see(micro_batch or rows(3))
            sizes.see(rows(8))  # The micro-batch was seen already.
    assert all(each.category is GradAccumWarning for each in caught)
    texts = [str(warning.message) for warning in caught]
    assert [
        [*map(int, re.findall(r"\d+(?= and| items)", text))] for text in texts
    ] == numbers


@pytest.mark.parametrize(("keys", "weights"), [("xy", [2, 7, 2]), ("x", [1, 1, 1])])
def test_number_of_keys_may_be_a_weight(keys: str, weights: list[int]) -> None:
    """If another weight shows that the user means it, or all micro-batches count 1."""
    sizes = Sizes("mean")
    for items, sizes.weight in zip((4, 4, 3), weights, strict=True):
        sizes.see(dict.fromkeys(keys, np.zeros((items, 7))))


# Several workers' loaders: their windows end together, and each knows the totals of
# all.


@pytest.mark.parametrize(
    "answer", [[9.0], [math.nan, 1.0], [math.inf, 1.0], [0.5, 1.0]]
)
def test_bad_reductions_raise(answer: Any) -> None:
    made = iter(windows([4, 5], 2, {"tokens": float}, reduce=lambda _: answer))
    words = "reduce: expected a function that returns 2"
    with pytest.raises(GradAccumError, match=words):
        next(made)


Pieces = list[tuple[list[int], float]]


def run_workers(
    loaders: list[list[int]], steps: Any, **arguments: Any
) -> tuple[list[Pieces], int]:
    """The windows of each worker, its own micro-batches with the total of all workers,
    and the number of reductions.

    The workers are threads whose reductions meet. A worker that comes alone fails soon,
    and so does a reduction of unequal lists.
    """
    barrier = threading.Barrier(len(loaders))
    sent = {}
    reductions = []
    made: list[Pieces] = [[] for _ in loaders]

    def work(rank: int) -> None:
        def reduce(values: list[float]) -> list[float]:
            sent[rank] = values
            barrier.wait(timeout=10)
            total = [sum(column) for column in zip(*sent.values(), strict=True)]
            if barrier.wait(timeout=10) == 0:
                reductions.append(rank)
            return total

        count = {"tokens": float}
        for window in windows(loaders[rank], steps, count, reduce=reduce, **arguments):
            made[rank].append((list(window), window.totals["tokens"]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(loaders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return made, len(reductions)


def test_worker_whose_loader_ends_first_takes_part() -> None:
    """One reduction per window, and one that finds that all have ended."""
    made, reductions = run_workers([[1, 2, 3, 4, 5], [6], []], 2)
    assert made == [
        [([1, 2], 9.0), ([3, 4], 7.0), ([5], 5.0)],
        [([6], 9.0), ([], 7.0), ([], 5.0)],
        [([], 9.0), ([], 7.0), ([], 5.0)],
    ]
    assert reductions == 4


def test_workers_agree_on_a_window_that_ends_by_its_weight() -> None:
    """One reduction per micro-batch, and one that finds that all have ended."""
    loaders = [[1, 2, 3, 4, 1], [3, 3], []]
    made, reductions = run_workers(loaders, until_weight(5), weight="tokens")
    assert made == [
        [([1, 2], 9.0), ([3, 4], 7.0), ([1], 1.0)],
        [([3, 3], 9.0), ([], 7.0), ([], 1.0)],
        [([], 9.0), ([], 7.0), ([], 1.0)],
    ]
    assert reductions == 6
