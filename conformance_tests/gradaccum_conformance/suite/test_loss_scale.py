"""The loss scale moves once per window, at its end, between floor and ceiling. It
leaves no trace in the gradient.
"""

import math

import pytest

import gradaccum
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.scenarios import poisoned, random_tree, same, start
from gradaccum_conformance.specs import LINEAR

GOOD = random_tree(LINEAR, 0)
BAD = poisoned(GOOD, math.inf)


def scales(
    backend: Harness,
    rule: Option,
    overflows: str,
    mode: str | None = None,
    **options: Option,
) -> list[float]:
    """The scale after each micro-batch. An ``x`` in `overflows` stands for a gradient
    that is not finite.
    """
    session = start(
        backend, **{"steps": 1, "loss_scale": rule, "mode": mode, **options}
    )
    found = []
    for event in overflows:
        session.gradients(BAD if event == "x" else GOOD)
        found.append(session.state().loss_scale)
        assert session.result().loss_scale == found[-1]
    return found


def test_scale_stops_at_floor(backend: Harness, mode: str) -> None:
    rule = gradaccum.DynamicLossScale(init_scale=8.0, min_scale=2.0)
    assert scales(backend, rule, "xxxx", mode) == [4.0, 2.0, 2.0, 2.0]


def test_scale_stops_at_ceiling(backend: Harness, mode: str) -> None:
    rule = gradaccum.DynamicLossScale(init_scale=8.0, growth_interval=1, max_scale=16.0)
    assert scales(backend, rule, "....", mode) == [16.0, 16.0, 16.0, 16.0]


def test_scale_stays_within_float32(backend: Harness) -> None:
    rule = gradaccum.DynamicLossScale(init_scale=2.0**126, growth_interval=1)
    tiny = {name: array * 2.0**-130 for name, array in GOOD.items()}
    session = start(backend, steps=1, loss_scale=rule)
    for _ in range(4):
        session.gradients(tiny)
    assert session.state().loss_scale == 2.0**127


def test_other_factors_move_the_scale(backend: Harness) -> None:
    rule = gradaccum.DynamicLossScale(
        init_scale=2.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=2,
        min_scale=0.5,
    )
    assert scales(backend, rule, "...x..xxx") == [
        2.0,
        8.0,
        8.0,
        2.0,
        2.0,
        8.0,
        2.0,
        0.5,
        0.5,
    ]


def test_overflow_restarts_the_count(backend: Harness) -> None:
    rule = gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=3)
    assert scales(backend, rule, "..x..x...") == [
        4.0,
        4.0,
        2.0,
        2.0,
        2.0,
        1.0,
        1.0,
        1.0,
        2.0,
    ]


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_scale_moves_once_per_window(
    backend: Harness, mode: str, on_overflow: str
) -> None:
    """It moves at the window's end and nowhere else."""
    rule = gradaccum.DynamicLossScale(init_scale=2.0**10, growth_interval=2)
    found = scales(backend, rule, "xx......", mode, steps=2, on_overflow=on_overflow)
    assert found == [2.0**10, 2.0**9, 2.0**9, 2.0**9, 2.0**9, 2.0**10, 2.0**10, 2.0**10]


def test_static_scale_stays(backend: Harness) -> None:
    assert scales(backend, gradaccum.StaticLossScale(8.0), "x..x") == [8.0] * 4
    assert scales(backend, 8.0, ".x") == [8.0] * 2
    assert scales(backend, None, "x.") == [1.0] * 2


def test_weightless_windows_do_not_count(backend: Harness, mode: str) -> None:
    """Only windows with a weight count towards `growth_interval`. Those without
    overflow by nothing.
    """
    rule = gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=2)
    session = start(backend, steps=1, loss_scale=rule, mode=mode)
    for tree, weight in ((GOOD, 1.0), (GOOD, 0.0), (BAD, 0.0), (GOOD, 1.0)):
        session.gradients(tree, weight=weight)
    assert session.state().loss_scale == 8.0


def test_scale_leaves_no_trace(backend: Harness, mode: str) -> None:
    """A power of two multiplies exactly. So the unscaled gradient is the same, bit for
    bit.
    """
    scaled, plain = (
        start(backend, steps=3, loss_scale=2.0**12, mode=mode),
        start(backend, steps=3, mode=mode),
    )
    for session in (scaled, plain):
        for seed in range(3):
            session.gradients(random_tree(LINEAR, seed))
    assert same(scaled.captured().gradient or {}, plain.captured().gradient or {})
