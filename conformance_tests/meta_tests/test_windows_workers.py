"""Windows taken from several workers' loaders: they end together, and each knows the totals of all."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradaccum
from gradaccum import until_weight, windows


def test_end_is_the_end() -> None:
    """No reduction after the one that found it: no other worker would come."""
    sent = []
    for arguments in ({"steps": 2}, {"steps": until_weight(2), "weight": float}):
        made = iter(windows([1], reduce=lambda values: sent.append(values) or values, **arguments))
        assert len(list(made)) == 1
        reductions = len(sent)
        assert list(made) == []
        assert len(sent) == reductions


@pytest.mark.parametrize("answer", [None, [1.0], [math.nan, 1.0], [math.inf, 1.0], [0.5, 1.0], ["a", "b"]])
def test_bad_reductions_raise_and_lose_nothing(answer: Any) -> None:
    answers = iter([answer])
    made = iter(windows([4, 5], 2, {"tokens": float}, reduce=lambda values: next(answers, values)))
    with pytest.raises(gradaccum.GradAccumError, match="reduce: expected a function that returns 2"):
        next(made)
    assert next(made).totals["tokens"] == 9


class Crew:
    """Workers as threads whose reductions meet. One that comes alone fails soon, and so does a reduction of unequal lists."""

    def __init__(self, workers: int) -> None:
        self.workers, self.reductions = workers, 0
        self._barrier = threading.Barrier(workers)
        self._sent: dict[int, list[float]] = {}

    def reduce(self, rank: int) -> Callable[[list[float]], list[float]]:
        def reduce(values: list[float]) -> list[float]:
            self._sent[rank] = values
            self._barrier.wait(timeout=10)
            total = [sum(column) for column in zip(*self._sent.values(), strict=True)]
            if self._barrier.wait(timeout=10) == 0:
                self.reductions += 1
            return total

        return reduce

    def run(self, loaders: list[list[int]], steps: Any, **arguments: Any) -> list[list[tuple[list[int], float]]]:
        """The windows of each worker: its own micro-batches, and the total of all."""
        made: list[list[tuple[list[int], float]]] = [[] for _ in loaders]

        def work(rank: int) -> None:
            own = windows(loaders[rank], steps, {"tokens": float}, reduce=self.reduce(rank), **arguments)
            made[rank] = [(list(window), window.totals["tokens"]) for window in own]

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        return made


def test_worker_whose_loader_ends_first_takes_part() -> None:
    crew = Crew(3)
    made = crew.run([[1, 2, 3, 4, 5], [6], []], 2)
    assert made == [
        [([1, 2], 9.0), ([3, 4], 7.0), ([5], 5.0)],
        [([6], 9.0), ([], 7.0), ([], 5.0)],
        [([], 9.0), ([], 7.0), ([], 5.0)],
    ]
    assert crew.reductions == 4, "one per window, and one that finds that all have ended"


def test_workers_agree_on_a_window_that_ends_by_its_weight() -> None:
    crew = Crew(2)
    made = crew.run([[1, 2, 3, 4], [3, 3]], until_weight(5), weight="tokens")
    assert made == [[([1, 2], 9.0), ([3, 4], 7.0)], [([3, 3], 9.0), ([], 7.0)]]
    assert crew.reductions == 5, "one per micro-batch, and one that finds that all have ended"


@settings(max_examples=40, deadline=None)
@given(loaders=st.lists(st.lists(st.integers(0, 5), max_size=7), min_size=2, max_size=3), by_weight=st.booleans(), size=st.integers(1, 8))
def test_any_share_of_the_data(loaders: list[list[int]], by_weight: bool, size: int) -> None:
    arguments = {"steps": until_weight(size), "weight": "tokens"} if by_weight else {"steps": size}
    made = Crew(len(loaders)).run(loaders, **arguments)
    assert [list(chain.from_iterable(own for own, _ in each)) for each in made] == loaders
    totals = [[total for _, total in each] for each in made]
    assert all(each == totals[0] for each in totals)
    assert sum(totals[0]) == sum(map(sum, loaders))
    if by_weight:
        assert all(total >= size for total in totals[0][:-1])


def test_empty_loaders() -> None:
    assert Crew(2).run([[], []], 3) == [[], []]
