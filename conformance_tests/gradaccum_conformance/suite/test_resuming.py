"""A state loaded under other options: an open window is refused; between two windows
the new options apply.
"""

import math
from pathlib import Path

import pytest

import gradaccum
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.scenarios import (
    poisoned,
    random_tree,
    refuses_to_load,
    same,
    start,
)
from gradaccum_conformance.specs import MLP, Optimizer

DYNAMIC = gradaccum.DynamicLossScale(init_scale=64.0, growth_interval=100)
OTHER: dict[str, tuple[dict[str, Option], dict[str, Option], str]] = {
    "fewer steps": ({}, {"steps": 2}, "steps"),
    "more steps": ({}, {"steps": 8}, "steps"),
    "no steps": ({}, {"steps": None}, "steps"),
    "a weight, then as many": (
        {"steps": gradaccum.until_weight(4)},
        {},
        "until_weight",
    ),
    "another weight": (
        {"steps": gradaccum.until_weight(4)},
        {"steps": gradaccum.until_weight(5)},
        "until_weight",
    ),
    "reduction": ({"reduction": "mean"}, {"reduction": "sum"}, "reduction"),
    "policy": ({}, {"on_overflow": "drop_micro_batch"}, "on_overflow"),
    "a scale, then none": ({"loss_scale": DYNAMIC}, {}, "loss_scale"),
    "no scale, then one": ({}, {"loss_scale": DYNAMIC}, "loss_scale"),
    "another static scale": ({"loss_scale": 8.0}, {"loss_scale": 1024.0}, "loss_scale"),
    "static, then dynamic": (
        {"loss_scale": 64.0},
        {"loss_scale": DYNAMIC},
        "loss_scale",
    ),
}
SCALES: dict[str, tuple[Option, Option, float]] = {
    "a scale, then none": (DYNAMIC, None, 1.0),
    "no scale, then one": (None, DYNAMIC, 64.0),
    "another static scale": (8.0, 1024.0, 1024.0),
    "dynamic goes on": (DYNAMIC, gradaccum.DynamicLossScale(init_scale=2.0**16), 32.0),
}


def begin(backend: Harness, **options: Option) -> Session:
    return start(backend, MLP, Optimizer("momentum"), **{"steps": 4, **options})


def feed(session: Session, micro_batches: int, *, poison: bool = False) -> None:
    for step in range(micro_batches):
        tree = random_tree(MLP, step)
        session.gradients(poisoned(tree, math.inf) if poison else tree, weight=1.0)


@pytest.mark.parametrize(
    "change",
    deep_but(
        (
            "fewer steps",
            "a weight, then as many",
            "reduction",
            "policy",
            "another static scale",
        ),
        OTHER,
    ),
)
def test_open_window_refuses_other_options(
    backend: Harness, tmp_path: Path, change: str
) -> None:
    saved, own, name = OTHER[change]
    first, second = begin(backend, **saved), begin(backend, **own)
    feed(first, 3)
    first.save(tmp_path)
    feed(second, 1)
    refuses_to_load(second, tmp_path, name)


@pytest.mark.parametrize(("saved", "own", "scale"), SCALES.values(), ids=SCALES)
def test_closed_window_takes_own_scale(
    backend: Harness, tmp_path: Path, saved: Option, own: Option, scale: float
) -> None:
    """The gradient after it is exact, and the counters go on."""
    first, second = begin(backend, loss_scale=saved), begin(backend, loss_scale=own)
    feed(first, 4, poison=True)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.state()[:3] == first.state()[:3]
    assert (second.state().loss_scale, second.result().loss_scale) == (scale, scale)
    feed(second, 4)
    plain = begin(backend)
    feed(plain, 4)
    assert second.result().applied
    assert same(second.parameters(), plain.parameters())


@pytest.mark.parametrize("change", deep_but(("fewer steps", "reduction"), OTHER))
def test_closed_window_takes_other_options(
    backend: Harness, tmp_path: Path, change: str
) -> None:
    saved, own, _ = OTHER[change]
    first, second = begin(backend, **saved), begin(backend, **own)
    feed(first, 4)
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.state().optimizer_step == 1
    assert same(second.parameters(), first.parameters())
