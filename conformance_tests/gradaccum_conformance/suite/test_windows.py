"""A window ends after `steps` micro-batches or by `flush`, and `discard` forgets it.
Nothing moves in between.
"""

import math

import pytest

from gradaccum import DynamicLossScale
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    check_gradient,
    contents_of,
    cut,
    feed,
    outcome_of,
    random_tree,
    require_same_contents,
    same,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import LINEAR, MLP, Optimizer

TREE = random_tree(LINEAR, 0)


def test_nothing_moves_between_window_ends(backend: Harness, mode: str) -> None:
    session = start(backend, MLP, Optimizer("adam"), steps=3, mode=mode)
    for window in range(2):
        before = session.parameters(), session.optimizer_state()
        for micro_step in (1, 2):
            session.gradients(random_tree(MLP, 10 * window + micro_step))
            assert same(session.parameters(), before[0])
            assert same(session.optimizer_state(), before[1])
        session.gradients(random_tree(MLP, 10 * window + 3))
        assert not same(session.parameters(), before[0])


@pytest.mark.parametrize(
    ("steps", "calls"),
    [(4, [0, 0, 0, 1, 1]), (1, [1, 2, 3, 4, 5]), (None, [0, 0, 0, 0, 0])],
    ids=["four", "one", "none"],
)
def test_inner_optimizer_runs_once_per_window(
    backend: Harness, mode: str, steps: Option, calls: list[int]
) -> None:
    """Without `steps` at the flush alone."""
    session = start(backend, steps=steps, mode=mode)
    for number in calls:
        session.gradients(TREE)
        assert session.captured().calls == number
    session.flush()
    assert session.captured().calls == calls[-1] + (steps != 1)


def test_result_inside_and_at_end(backend: Harness, mode: str) -> None:
    session = start(backend, steps=2, mode=mode)
    results = [session.result()]
    for _ in range(2):
        session.gradients(TREE)
        results.append(session.result())
    begin, middle, end = results
    assert outcome_of(begin) == outcome_of(middle) == set()
    assert (middle.closed, middle.micro_step, middle.optimizer_step) == (False, 1, 0)
    assert outcome_of(end) == {"applied"}
    assert (end.closed, end.micro_step, end.optimizer_step) == (True, 0, 1)
    types = [bool] * 3 + [float] * 2 + [int] * 2 + [float]
    assert [[*map(type, each)] for each in (begin, middle, end)] == [types] * 3


@pytest.mark.every_mode
@pytest.mark.parametrize("sizes", [(7,), (7, 5)], ids=["one", "two"])
def test_flush_divides_by_held_weight(
    backend: Harness, mode: str, errors: Errors, sizes: tuple[int, ...]
) -> None:
    batch = standard_batch(MLP).rows(0, sum(sizes))
    session = start(backend, MLP, steps=4, mode=mode)
    feed(session, cut(batch, sizes))
    session.flush()
    check_gradient(errors, backend, session, MLP, batch, micro_batches=len(sizes))
    assert session.result().applied
    assert session.state().micro_step == 0


@pytest.mark.parametrize("event", ["applied", "skipped", "overflow", "discard"])
def test_flush_of_empty_window_does_nothing_and_says_so(
    backend: Harness, mode: str, event: str
) -> None:
    """What moves once per update looks at the result after each step, and once more
    after the last flush: it must not move twice.
    """
    scale = DynamicLossScale(init_scale=4.0)
    session = start(backend, steps=2, mode=mode, loss_scale=scale, skip_norm=1e6)
    session.gradients(TREE)
    if event == "discard":
        session.discard()
    else:
        factor = {"applied": 1.0, "skipped": 1e9, "overflow": math.inf}[event]
        session.gradients({name: array * factor for name, array in TREE.items()})
    before = contents_of(session)
    result = session.result()
    for _ in range(2):
        session.flush()
        require_same_contents(session, before)
        assert repr(session.result()) == repr(
            result._replace(applied=False, skipped=False, overflow=False)
        )


def test_discard_forgets_the_window(
    backend: Harness, mode: str, errors: Errors
) -> None:
    batch = standard_batch(MLP)
    session = start(backend, MLP, steps=3, mode=mode)
    new = session.state()
    feed(session, cut(standard_batch(MLP, 4), (2, 2)))
    session.discard()
    assert session.state() == new
    assert not any(total.any() for total in session.accumulator().values())
    feed(session, cut(batch, (4, 4, 4)))
    assert session.captured().calls == 1
    check_gradient(errors, backend, session, MLP, batch, micro_batches=3)
    session.discard()
    assert outcome_of(session.result()) == set()
