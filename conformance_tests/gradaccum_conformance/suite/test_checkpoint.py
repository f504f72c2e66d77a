"""A run that is saved and resumed anywhere in a window equals the uninterrupted run,
bit for bit. Under other options an open window is refused.
"""

import math
from pathlib import Path

import pytest

import gradaccum
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.scenarios import (
    contents_of,
    poisoned,
    random_tree,
    refuses_to_load,
    require_same_contents,
    start,
)
from gradaccum_conformance.specs import LINEAR, MLP, Optimizer

DYNAMIC = gradaccum.DynamicLossScale(init_scale=64.0, growth_interval=3)
OPTIONS: dict[str, dict[str, Option]] = {
    "clipped and scaled": {
        "clip_norm": 0.5,
        "loss_scale": gradaccum.DynamicLossScale(init_scale=64.0, growth_interval=1),
    },
    "dropping": {"on_overflow": "drop_micro_batch", "loss_scale": DYNAMIC},
    "wide sums": {"accumulate_dtype": "float64"},
}


def begin(backend: Harness, mode: str | None = None, **options: Option) -> Session:
    return start(
        backend, MLP, Optimizer("momentum"), **{"steps": 4, "mode": mode, **options}
    )


def go_on(session: Session, first: int, last: int) -> None:
    """Micro-batches of these numbers. Number 1 and number 9 are not finite."""
    for step in range(first, last):
        tree = random_tree(MLP, step)
        session.gradients(
            poisoned(tree, math.inf) if step in (1, 9) else tree, weight=1.0 + step % 3
        )


def resume_at(
    tmp_path: Path, stop: int, whole: Session, first: Session, resumed: Session
) -> None:
    go_on(whole, 0, stop)
    go_on(first, 0, stop)
    first.save(tmp_path)
    resumed.load(tmp_path)
    require_same_contents(resumed, contents_of(whole))
    go_on(whole, stop, 14)
    go_on(resumed, stop, 14)
    require_same_contents(resumed, contents_of(whole))
    assert whole.state().optimizer_step > 0


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_resumed_run_equals_uninterrupted_run(
    backend: Harness, tmp_path: Path, options: dict[str, Option], stop: int
) -> None:
    sessions = (begin(backend, **options) for _ in range(3))
    resume_at(tmp_path, stop, *sessions)


@pytest.mark.every_mode
def test_resume_in_every_mode(backend: Harness, mode: str, tmp_path: Path) -> None:
    """Into a session that is in the middle of another window."""
    whole, first, resumed = (begin(backend, mode) for _ in range(3))
    go_on(resumed, 20, 27)
    resume_at(tmp_path, 6, whole, first, resumed)


def test_every_state_field_survives(backend: Harness, tmp_path: Path) -> None:
    """None of them is what a new session has."""
    options = OPTIONS["dropping"]
    session, resumed, new = (begin(backend, **options) for _ in range(3))
    go_on(session, 0, 8)
    session.flush()
    go_on(session, 8, 10)
    skipped = session.state()._replace(skipped_windows=1)
    assert all(a != b for a, b in zip(skipped, new.state(), strict=True))
    session.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.state() == session.state()


def test_other_parameters_are_refused(backend: Harness, tmp_path: Path) -> None:
    saved = start(backend, LINEAR, Optimizer("momentum"), steps=4)
    saved.gradients(random_tree(LINEAR, 0))
    saved.save(tmp_path)
    own = begin(backend)
    go_on(own, 2, 3)
    refuses_to_load(own, tmp_path)


OTHER_OPTIONS: dict[str, tuple[dict[str, Option], dict[str, Option], str]] = {
    "fewer steps": ({}, {"steps": 2}, "steps"),
    "a weight, then as many": (
        {"steps": gradaccum.until_weight(9)},
        {},
        "until_weight",
    ),
    "policy": ({}, {"on_overflow": "drop_micro_batch"}, "on_overflow"),
    "a scale, then none": ({"loss_scale": DYNAMIC}, {}, "loss_scale"),
    "another static scale": ({"loss_scale": 8.0}, {"loss_scale": 1024.0}, "loss_scale"),
}


@pytest.mark.parametrize("change", OTHER_OPTIONS)
def test_open_window_refuses_other_options(
    backend: Harness, tmp_path: Path, change: str
) -> None:
    saved, own, name = OTHER_OPTIONS[change]
    first = begin(backend, **saved)
    second = begin(backend, **own)
    go_on(first, 2, 4)
    first.save(tmp_path)
    go_on(second, 2, 3)
    refuses_to_load(second, tmp_path, name)
