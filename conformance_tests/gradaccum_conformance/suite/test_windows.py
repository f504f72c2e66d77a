"""A window ends after `steps` micro-batches or by `flush`, and `discard` forgets it.
Nothing moves in between.
"""

import math

import pytest

from gradaccum import DynamicLossScale
from gradaccum_conformance.harness import Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    check_gradient,
    cut,
    feed,
    random_tree,
    same,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import LINEAR, MLP, Optimizer

DYNAMIC = DynamicLossScale(init_scale=4.0)


def test_nothing_moves_between_window_ends(backend: Harness, mode: str) -> None:
    session = start(backend, MLP, Optimizer("adam"), steps=3, mode=mode)
    for window in range(2):
        before = session.parameters(), session.optimizer_state()
        for micro_step in (1, 2):
            session.gradients(random_tree(MLP, 10 * window + micro_step))
            assert same(session.parameters(), before[0]), (
                "parameters moved inside a window"
            )
            assert same(session.optimizer_state(), before[1]), (
                "the optimizer's state moved inside a window"
            )
        session.gradients(random_tree(MLP, 10 * window + 3))
        assert not same(session.parameters(), before[0]), (
            "the window's end made no update"
        )


def test_inner_optimizer_runs_once_per_window(backend: Harness, mode: str) -> None:
    session = start(backend, steps=4, mode=mode)
    calls = []
    for step in range(9):
        session.gradients(random_tree(LINEAR, step))
        calls.append(session.captured().calls)
    assert calls == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_result_inside_and_at_end(backend: Harness, mode: str) -> None:
    session = start(backend, steps=2, mode=mode)
    begin = session.result()
    session.gradients(random_tree(LINEAR, 0))
    middle = session.result()
    assert (
        middle.applied,
        middle.skipped,
        middle.closed,
        middle.micro_step,
        middle.optimizer_step,
    ) == (False, False, False, 1, 0)
    session.gradients(random_tree(LINEAR, 1))
    end = session.result()
    assert (
        end.applied,
        end.skipped,
        end.closed,
        end.micro_step,
        end.optimizer_step,
    ) == (True, False, True, 0, 1)
    assert [[*map(type, each)] for each in (begin, middle, end)] == [
        [bool] * 3 + [float] * 2 + [int] * 2 + [float]
    ] * 3


@pytest.mark.parametrize("held", [1, 2, 3])
def test_flush_divides_by_held_weight(
    backend: Harness, errors: Errors, held: int
) -> None:
    batch = standard_batch(MLP).rows(0, 3 * held)
    session = start(backend, MLP, steps=4)
    feed(session, cut(batch, (3,) * held))
    session.flush()
    check_gradient(errors, backend, session, MLP, batch, micro_batches=held)
    assert session.result().applied
    assert session.state().micro_step == 0


@pytest.mark.every_mode
def test_flush_in_every_mode(backend: Harness, mode: str, errors: Errors) -> None:
    batch = standard_batch(MLP)
    session = start(backend, MLP, steps=8, mode=mode)
    feed(session, cut(batch, (7, 5)))
    session.flush()
    check_gradient(errors, backend, session, MLP, batch, micro_batches=2)


@pytest.mark.parametrize("event", ["applied", "skipped", "overflow", "discard"])
def test_flush_of_empty_window_does_nothing_and_says_so(
    backend: Harness, mode: str, event: str
) -> None:
    """What moves once per update looks at the result after each step, and once more
    after the last flush: it must not move twice.
    """
    session = start(backend, steps=2, mode=mode, loss_scale=DYNAMIC, skip_norm=1e6)
    last = {"applied": 1.0, "skipped": 1e9, "overflow": math.inf}
    session.gradients(random_tree(LINEAR, 0))
    if event == "discard":
        session.discard()
    else:
        session.gradients(
            {
                name: array * last[event]
                for name, array in random_tree(LINEAR, 1).items()
            }
        )
    before = session.parameters(), session.optimizer_state(), session.state()
    result = session.result()
    for _ in range(2):
        session.flush()
        assert same(session.parameters(), before[0])
        assert same(session.optimizer_state(), before[1])
        assert session.state() == before[2]
        assert repr(session.result()) == repr(
            result._replace(applied=False, skipped=False, overflow=False)
        )


def test_discard_forgets_the_window(
    backend: Harness, mode: str, errors: Errors
) -> None:
    batch = standard_batch(MLP)
    session = start(backend, MLP, steps=3, mode=mode)
    feed(session, cut(standard_batch(MLP, 4), (2, 2)))
    session.discard()
    state = session.state()
    assert (
        state.micro_step,
        state.weight,
        state.optimizer_step,
        state.skipped_windows,
    ) == (0, 0.0, 0, 0)
    assert not any(total.any() for total in session.accumulator().values())
    feed(session, cut(batch, (4, 4, 4)))
    assert session.captured().calls == 1
    check_gradient(errors, backend, session, MLP, batch, micro_batches=3)


def test_steps_none_waits_for_flush(backend: Harness) -> None:
    session = start(backend, steps=None)
    for step in range(5):
        session.gradients(random_tree(LINEAR, step))
    assert session.captured().calls == 0
    session.flush()
    assert session.captured().calls == 1


def test_steps_one_updates_every_time(backend: Harness, mode: str) -> None:
    session = start(backend, steps=1, mode=mode)
    for step in range(3):
        session.gradients(random_tree(LINEAR, step))
        assert session.captured().calls == step + 1
