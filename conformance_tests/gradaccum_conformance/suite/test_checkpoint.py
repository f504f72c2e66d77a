"""A run that is saved and resumed anywhere in a window equals the uninterrupted run,
bit for bit.
"""

import math
from pathlib import Path

import pytest

import gradaccum
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.scenarios import (
    poisoned,
    random_tree,
    refuses_to_load,
    same,
    start,
)
from gradaccum_conformance.specs import LINEAR, MLP, Optimizer

OPTIONS: dict[str, dict[str, Option]] = {
    "plain": {},
    "clipped and scaled": {
        "clip_norm": 0.5,
        "loss_scale": gradaccum.DynamicLossScale(init_scale=64.0, growth_interval=1),
    },
    "dropping": {
        "on_overflow": "drop_micro_batch",
        "loss_scale": gradaccum.DynamicLossScale(init_scale=64.0),
    },
    "schedule": {"steps": [(0, 4), (1, 2)]},
    "by weight": {"steps": gradaccum.until_weight(7)},
    "wide sums": {"accumulate_dtype": "float64"},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def begin(backend: Harness, mode: str | None = None, **options: Option) -> Session:
    return start(
        backend, MLP, Optimizer("momentum"), **{"steps": 4, "mode": mode, **options}
    )


def go_on(session: Session, first: int, last: int) -> None:
    for step in range(first, last):
        tree = random_tree(MLP, step)
        session.gradients(
            poisoned(tree, math.inf) if step == 1 else tree, weight=1.0 + step % 3
        )


def assert_equal(a: Session, b: Session) -> None:
    assert a.state() == b.state()
    assert same(a.parameters(), b.parameters())
    assert same(a.optimizer_state(), b.optimizer_state())
    assert same(a.accumulator(), b.accumulator())


@by_options
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_resumed_run_equals_uninterrupted_run(
    backend: Harness, tmp_path: Path, options: dict[str, Option], stop: int
) -> None:
    resume_at(backend, tmp_path, options, stop, backend.modes[0])


@pytest.mark.every_mode
def test_resume_in_every_mode(backend: Harness, mode: str, tmp_path: Path) -> None:
    resume_at(backend, tmp_path, {}, 6, mode)


def resume_at(
    backend: Harness, tmp_path: Path, options: dict[str, Option], stop: int, mode: str
) -> None:
    whole, first, resumed = (begin(backend, mode, **options) for _ in range(3))
    go_on(whole, 0, stop)
    go_on(first, 0, stop)
    first.save(tmp_path)
    resumed.load(tmp_path)
    assert_equal(resumed, whole)
    go_on(whole, stop, 10)
    go_on(resumed, stop, 10)
    assert_equal(resumed, whole)
    assert whole.state().optimizer_step > 0


def test_load_into_a_used_session(backend: Harness, mode: str, tmp_path: Path) -> None:
    whole, other = begin(backend, mode), begin(backend, mode)
    go_on(whole, 2, 8)
    whole.save(tmp_path)
    go_on(other, 20, 27)
    other.load(tmp_path)
    go_on(whole, 8, 12)
    go_on(other, 8, 12)
    assert_equal(other, whole)


def test_every_state_field_survives(backend: Harness, tmp_path: Path) -> None:
    options: dict[str, Option] = {
        "loss_scale": gradaccum.DynamicLossScale(init_scale=64.0, growth_interval=3),
        "on_overflow": "drop_micro_batch",
    }
    session, resumed = begin(backend, **options), begin(backend, **options)
    go_on(session, 0, 10)
    session.gradients(poisoned(random_tree(MLP, 1), math.nan))
    state = session.state()
    assert state.micro_step == 3
    assert state.overflow
    assert state.weight > 0
    assert state.optimizer_step > 0
    assert state.growth_tracker > 0
    assert state.loss_scale != 64.0
    session.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.state() == state


def test_snapshot_can_be_restored_twice(backend: Harness) -> None:
    session = begin(backend)
    go_on(session, 2, 5)
    snapshot = session.snapshot()
    go_on(session, 5, 9)
    after = session.state(), session.parameters()
    for _ in range(2):
        session.restore(snapshot)
        go_on(session, 5, 9)
        assert session.state() == after[0]
        assert same(session.parameters(), after[1])


def test_other_parameters_are_refused(backend: Harness, tmp_path: Path) -> None:
    saved = start(backend, LINEAR, Optimizer("momentum"), steps=4)
    saved.gradients(random_tree(LINEAR, 0))
    saved.save(tmp_path)
    own = begin(backend)
    go_on(own, 2, 3)
    refuses_to_load(own, tmp_path)
