"""The windows of several workers: they fill together, and leave nothing to the next;
they are saved and go on.
"""

import math
from pathlib import Path

import pytest

from gradaccum import StepResult
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    coarse,
    poisoned,
    random_tree,
    same,
    same_result,
)
from gradaccum_conformance.specs import MLP, Arrays
from gradaccum_conformance.workers import Crew, Crews
from gradaccum_conformance.workers.options import FULL, SCALE
from gradaccum_conformance.workers.shares import (
    Share,
    check_update,
    feed,
    on_first,
    require_equal,
    unequal,
)


def test_full_windows_need_no_flush(crews: Crews, errors: Errors) -> None:
    """Nothing moves inside one; the loss scale grows on every worker after two; a tail
    that only one worker has is flushed.
    """
    crew = crews(**FULL)
    for window in range(2):
        seeds = [
            range(100 * window + 10 * rank, 100 * window + 10 * rank + 2)
            for rank in range(crew.workers)
        ]
        shares = [
            [Share(random_tree(MLP, seed), 1.0 + rank) for seed in own]
            for rank, own in enumerate(seeds)
        ]
        before = crew.parameters()
        feed(crew, [own[:1] for own in shares])
        assert [state.micro_step for state in crew.states()] == [1] * crew.workers
        assert all(
            same(*pair) for pair in zip(crew.parameters(), before, strict=True)
        ), "parameters moved inside a window"
        feed(crew, [own[1:] for own in shares])
        check_update(errors, crew, shares, calls=window + 1)
    assert crew.results()[0].loss_scale == 2 * SCALE.init_scale
    tail = on_first(crew.workers, Share(random_tree(MLP, 200)))
    feed(crew, tail)
    crew.flush()
    check_update(errors, crew, tail, calls=3)


def test_flush_of_nothing_says_so(crews: Crews) -> None:
    """After a full window no worker has a micro-batch left: their flush did nothing."""
    crew = crews(**FULL)
    feed(crew, [[Share(random_tree(MLP, seed)) for seed in (1, 2)]] * crew.workers)
    before = require_equal(crew)
    assert before.applied
    crew.flush()
    assert same_result(require_equal(crew), before._replace(applied=False))


def test_windows_follow_a_schedule(crews: Crews, errors: Errors) -> None:
    """Of two micro-batches on each worker, of three, and a short one that is
    flushed.
    """
    crew = crews(steps=[(0, 2), (1, 3)])
    for window, size in enumerate((2, 3, 2)):
        seeds = [
            range(100 * window + 10 * rank, 100 * window + 10 * rank + size)
            for rank in range(crew.workers)
        ]
        shares = [
            [Share(random_tree(MLP, seed), 1.0 + rank) for seed in own]
            for rank, own in enumerate(seeds)
        ]
        feed(crew, shares)
        if window == 2:
            crew.flush()
        check_update(errors, crew, shares, calls=window + 1)


def test_masters_are_updated_by_all(crews: Crews, errors: Errors) -> None:
    """The optimizer gets the float32 gradient of all workers; an overflow on one of
    them moves nobody's parameters.
    """
    crew = crews(steps=2, dtype="bfloat16", master_weights=True)
    shares = [
        [Share(coarse(MLP, 10 * rank + index, 2.0**-4)) for index in range(2)]
        for rank in range(crew.workers)
    ]
    start = crew.parameters()
    feed(crew, shares)
    check_update(errors, crew, shares, calls=1)
    before = crew.parameters()
    assert not same(before[0], start[0])
    feed(
        crew,
        [*shares[:-1], [shares[-1][0], Share(poisoned(coarse(MLP, 9, 1.0), math.inf))]],
    )
    assert (require_equal(crew).overflow, require_equal(crew).applied) == (True, False)
    assert same(crew.parameters()[0], before[0])


def test_window_leaves_nothing_to_the_next(crews: Crews) -> None:
    """After a window of large gradients, and after one that was discarded with a NaN in
    it, the next is that of a new crew, bit for bit.
    """
    crew = crews()
    fresh, shares = crew.snapshot(), unequal(crew.workers)
    feed(crew, shares)
    crew.flush()
    alone = crew.captured()[0].gradient or {}
    crew.restore(fresh)
    feed(
        crew,
        [
            [Share(random_tree(MLP, 20 + rank, 1e6), 3.0)]
            for rank in range(crew.workers)
        ],
    )
    crew.flush()
    feed(crew, shares)
    crew.flush()
    assert same(crew.captured()[0].gradient or {}, alone)
    feed(
        crew,
        [
            [Share(poisoned(random_tree(MLP, 20 + rank), math.nan))]
            for rank in range(crew.workers)
        ],
    )
    crew.discard()
    assert not any(
        state.micro_step or state.weight or state.overflow for state in crew.states()
    )
    feed(crew, shares)
    crew.flush()
    assert same(crew.captured()[0].gradient or {}, alone)
    assert require_equal(crew).optimizer_step == 3


def test_two_optimizers_of_the_same_workers(crews: Crews, errors: Errors) -> None:
    """A window of one is open while the other's ends, is discarded, or overflows."""
    first, second = crews(), crews(**FULL)
    shares, full = (
        unequal(first.workers),
        [
            [Share(random_tree(MLP, 50 + 10 * rank + index)) for index in range(2)]
            for rank in range(first.workers)
        ],
    )
    for window in range(2):
        feed(first, [own[:1] for own in shares])
        feed(second, full)
        check_update(errors, second, full, calls=window + 1)
        feed(second, [[Share(poisoned(random_tree(MLP, 9), math.nan))]] * first.workers)
        second.discard()
        feed(first, [own[1:] for own in shares])
        first.flush()
        check_update(errors, first, shares, calls=window + 1)
    assert second.results()[0].loss_scale == 2 * SCALE.init_scale
    assert first.results()[0].loss_scale == 1


def begin_and_save(crew: Crew, directory: Path) -> tuple[StepResult, Arrays]:
    """Save after three of six micro-batches, in mid-window; the result and the
    parameters at the end.
    """
    go_on(crew, 0, 3)
    crew.save(directory)
    go_on(crew, 3, 6)
    return require_equal(crew), crew.parameters()[0]


def go_on(crew: Crew, first: int, last: int) -> None:
    seeds = range(first, last)
    feed(
        crew,
        [
            [Share(random_tree(MLP, 10 * rank + seed), 1.0 + seed) for seed in seeds]
            for rank in range(crew.workers)
        ],
    )


def check_end(crew: Crew, end: tuple[StepResult, Arrays]) -> None:
    go_on(crew, 3, 6)
    assert same_result(require_equal(crew), end[0])
    assert same(crew.parameters()[0], end[1])


def test_resumed_window_is_the_same(crews: Crews, tmp_path: Path) -> None:
    """From memory and from files, in mid-window, bit for bit."""
    crew = crews(**FULL)
    fresh = crew.snapshot()
    end = begin_and_save(crew, tmp_path)
    crew.restore(fresh)
    go_on(crew, 0, 3)
    middle, states, sums = crew.snapshot(), crew.states(), crew.accumulators()
    check_end(crew, end)
    for source in ("memory", "files"):
        crew.restore(middle) if source == "memory" else crew.load(tmp_path)
        assert crew.states() == states
        assert all(same(*pair) for pair in zip(crew.accumulators(), sums, strict=True))
        check_end(crew, end)


@pytest.mark.deep
def test_restarted_workers_go_on(crews: Crews, tmp_path: Path) -> None:
    """From their files, after every process was killed in mid-window."""
    crew = crews(**FULL)
    end = begin_and_save(crew, tmp_path)
    go_on(crew, 6, 7)
    crew.pool.close()
    crew = crews(**FULL)
    crew.load(tmp_path)
    check_end(crew, end)
