"""The windows of several workers: they fill together, and leave nothing to the next;
they are saved and go on.
"""

import math
from pathlib import Path

import pytest

from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    coarse,
    outcome_of,
    poisoned,
    random_tree,
    same,
    same_result,
)
from gradaccum_conformance.specs import MLP
from gradaccum_conformance.workers import Crew, Crews
from gradaccum_conformance.workers.options import FULL, SCALE
from gradaccum_conformance.workers.shares import (
    Share,
    check_update,
    close,
    feed,
    random_shares,
    require_equal,
    unequal,
)


def test_full_windows_need_no_flush(crews: Crews, errors: Errors) -> None:
    """Nothing moves inside one; the loss scale grows on every worker after two; a tail
    that only one worker has is flushed.
    """
    crew = crews(**FULL)
    for window in range(2):
        shares = random_shares([2] * crew.workers, window)
        before = crew.ask("parameters")
        feed(crew, [own[:1] for own in shares])
        assert [state.micro_step for state in crew.ask("state")] == [1] * crew.workers
        assert all(map(same, crew.ask("parameters"), before))
        feed(crew, [own[1:] for own in shares])
        check_update(errors, crew, shares, calls=window + 1)
    assert require_equal(crew).loss_scale == 2 * SCALE.init_scale
    tail = random_shares([1, *[0] * (crew.workers - 1)], 2)
    close(crew, tail)
    check_update(errors, crew, tail, calls=3)


def test_windows_follow_a_schedule(crews: Crews, errors: Errors) -> None:
    """Of two micro-batches on each worker, of three, and a short one that is
    flushed.
    """
    crew = crews(steps=[(0, 2), (1, 3)])
    for window, size in enumerate((2, 3, 2)):
        shares = random_shares([size] * crew.workers, window)
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
    start = crew.ask("parameters")[0]
    feed(crew, shares)
    check_update(errors, crew, shares, calls=1)
    before = crew.ask("parameters")[0]
    assert not same(before, start)
    shares[-1][1] = Share(poisoned(coarse(MLP, 9, 1.0), math.inf))
    feed(crew, shares)
    assert outcome_of(require_equal(crew)) == {"skipped", "overflow"}
    assert same(crew.ask("parameters")[0], before)


def test_window_leaves_nothing_to_the_next(crews: Crews) -> None:
    """After a window of large gradients, and after one that was discarded with a NaN in
    it, the next is that of a new crew, bit for bit.
    """
    crew = crews()
    fresh = crew.snapshot()
    shares = unequal(crew.workers)
    close(crew, shares)
    alone = crew.ask("captured")[0].gradient
    crew.restore(fresh)
    close(crew, [[Share(random_tree(MLP, 20, 1e6), 3.0)]] * crew.workers)
    close(crew, shares)
    assert same(crew.ask("captured")[0].gradient, alone)
    feed(crew, [[Share(poisoned(random_tree(MLP, 20), math.nan))]] * crew.workers)
    crew.discard()
    for state in crew.ask("state"):
        assert (state.micro_step, state.weight, state.overflow) == (0, 0, False)
    assert close(crew, shares).optimizer_step == 3
    assert same(crew.ask("captured")[0].gradient, alone)


def test_two_optimizers_of_the_same_workers(crews: Crews, errors: Errors) -> None:
    """A window of one is open while the other's ends, is discarded, or overflows."""
    first = crews()
    second = crews(**FULL)
    shares = unequal(first.workers)
    full = random_shares([2] * first.workers, 1)
    bad = Share(poisoned(random_tree(MLP, 9), math.nan))
    for window in range(2):
        feed(first, [own[:1] for own in shares])
        feed(second, full)
        check_update(errors, second, full, calls=window + 1)
        feed(second, [[bad]] * first.workers)
        second.discard()
        close(first, [own[1:] for own in shares])
        check_update(errors, first, shares, calls=window + 1)
    assert second.ask("result")[0].loss_scale == 2 * SCALE.init_scale
    assert first.ask("result")[0].loss_scale == 1


def go_on(crew: Crew, first: int, last: int) -> None:
    """Micro-batches of these numbers on each worker."""
    feed(crew, [own[first:last] for own in random_shares([7] * crew.workers)])


@pytest.mark.parametrize(
    "restarts", [False, pytest.param(True, marks=pytest.mark.deep)]
)
def test_saved_window_goes_on(crews: Crews, tmp_path: Path, restarts: bool) -> None:
    """From files of its middle, bit for bit; also after every process was killed."""
    crew = crews(**FULL)
    go_on(crew, 0, 3)
    crew.save(tmp_path)
    states = crew.ask("state")
    sums = crew.ask("accumulator")
    go_on(crew, 3, 6)
    result = require_equal(crew)
    parameters = crew.ask("parameters")[0]
    go_on(crew, 6, 7)
    if restarts:
        crew.pool.close()
        crew = crews(**FULL)
    crew.load(tmp_path)
    assert crew.ask("state") == states
    assert all(map(same, crew.ask("accumulator"), sums))
    go_on(crew, 3, 6)
    assert same_result(require_equal(crew), result)
    assert same(crew.ask("parameters")[0], parameters)
