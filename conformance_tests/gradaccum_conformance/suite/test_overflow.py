"""A gradient that is not finite costs its window, or only its micro-batch. It leaves no
trace in the next window.
"""

import math
from collections.abc import Sequence

import pytest

import gradaccum
from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.harness import Harness, Session
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import mean_of, poisoned, random_tree, same, start
from gradaccum_conformance.specs import LINEAR

VALUES = pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan], ids=["inf", "-inf", "nan"]
)
POSITIONS = pytest.mark.parametrize("position", [0, 1, 2])
STEPS = 3


def window(
    session: Session, seeds: Sequence[int], bad: dict[int, float] | None = None
) -> None:
    for index, seed in enumerate(seeds):
        tree = random_tree(LINEAR, seed)
        session.gradients(poisoned(tree, bad[index]) if bad and index in bad else tree)


@VALUES
@POSITIONS
def test_overflow_skips_this_window_only(
    backend: Harness, value: float, position: int
) -> None:
    """The next window is, bit for bit, that of a session without the overflow."""
    hurt, clean = start(backend, steps=STEPS), start(backend, steps=STEPS)
    before = hurt.parameters()
    window(hurt, (0, 1, 2), {position: value})
    result, state = hurt.result(), hurt.state()
    assert (result.applied, result.skipped, result.overflow, result.grad_norm) == (
        False,
        True,
        True,
        math.inf,
    )
    assert (
        state.optimizer_step,
        state.skipped_windows,
        state.overflow,
        hurt.captured().calls,
    ) == (0, 1, False, 0)
    assert same(hurt.parameters(), before)
    for session in (hurt, clean):
        window(session, (3, 4, 5))
    assert same(hurt.parameters(), clean.parameters()), "the overflow left a trace"


@VALUES
def test_overflow_in_every_mode(backend: Harness, mode: str, value: float) -> None:
    hurt, clean = (
        start(backend, steps=STEPS, mode=mode),
        start(backend, steps=STEPS, mode=mode),
    )
    window(hurt, (0, 1, 2), {1: value})
    assert hurt.captured().calls == 0
    for session in (hurt, clean):
        window(session, (3, 4, 5))
    assert same(hurt.parameters(), clean.parameters())


@pytest.mark.parametrize(
    ("scale", "weight"),
    [(2.0**112, 2.0**17), (2.0**-100, 2.0**-40)],
    ids=["beyond", "below"],
)
def test_divisor_outside_float32_overflows(
    backend: Harness, mode: str, scale: float, weight: float
) -> None:
    """Divided by it, the gradient would become 0 or inf and count as applied."""
    session = start(
        backend, steps=1, loss_scale=scale, reduction="sum_per_item", mode=mode
    )
    before = session.parameters()
    session.gradients(random_tree(LINEAR, 0), weight=weight)
    result = session.result()
    assert (result.applied, result.overflow, result.grad_norm) == (
        False,
        True,
        math.inf,
    )
    assert same(session.parameters(), before)


def test_scale_recovers_from_divisor_overflow(backend: Harness) -> None:
    """Each lost window lowers the scale, until the divisor is a float32 number
    again.
    """
    rule = gradaccum.DynamicLossScale(init_scale=2.0**112, growth_interval=1)
    session = start(backend, steps=1, loss_scale=rule, reduction="sum_per_item")
    for seed in range(3):
        session.gradients(random_tree(LINEAR, seed), weight=2.0**17)
    assert session.state().optimizer_step == 1
    assert session.state().skipped_windows == 2


@VALUES
def test_flush_reports_the_overflow(backend: Harness, value: float) -> None:
    session = start(backend, steps=8)
    window(session, (0, 1), {0: value})
    session.flush()
    assert session.result().overflow
    assert session.captured().calls == 0


@VALUES
@POSITIONS
def test_dropped_micro_batch_adds_nothing(
    backend: Harness, errors: Errors, value: float, position: int
) -> None:
    session = start(backend, steps=STEPS, on_overflow="drop_micro_batch")
    window(session, (0, 1, 2), {position: value})
    good = [
        random_tree(LINEAR, seed)
        for index, seed in enumerate((0, 1, 2))
        if index != position
    ]
    errors.check(
        "gradient of the good ones",
        worst(session.captured().gradient or {}, mean_of(good)),
        bound_of_sum(good, "float32"),
    )
    assert session.result().overflow
    assert session.result().applied


@pytest.mark.every_mode
def test_drop_in_every_mode(backend: Harness, mode: str, errors: Errors) -> None:
    session = start(backend, steps=STEPS, on_overflow="drop_micro_batch", mode=mode)
    window(session, (0, 1, 2), {0: math.nan, 2: math.inf})
    errors.check(
        "gradient",
        worst(session.captured().gradient or {}, random_tree(LINEAR, 1)),
        gamma(8, "float32"),
    )


def test_dropping_all_makes_no_update(backend: Harness, mode: str) -> None:
    session = start(backend, steps=2, on_overflow="drop_micro_batch", mode=mode)
    window(session, (0, 1), {0: math.inf, 1: math.nan})
    result, state = session.result(), session.state()
    assert (result.applied, result.skipped, result.overflow) == (False, True, True)
    assert (state.skipped_windows, state.micro_step, session.captured().calls) == (
        1,
        0,
        0,
    )


@VALUES
@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_clean_window_after_twenty_overflows(
    backend: Harness, value: float, on_overflow: str
) -> None:
    """Nothing moves in the twenty lost windows, the scale stops at its floor. The clean
    window then equals a first one at that scale.
    """
    rule = gradaccum.DynamicLossScale(init_scale=2.0**8, min_scale=2.0)
    hurt = start(backend, steps=2, loss_scale=rule, on_overflow=on_overflow)
    clean = start(
        backend,
        steps=2,
        loss_scale=gradaccum.DynamicLossScale(init_scale=2.0),
        on_overflow=on_overflow,
    )
    before = hurt.parameters()
    for _ in range(20):
        window(hurt, (0, 1), {0: value, 1: value})
    state = hurt.state()
    assert (
        state.optimizer_step,
        state.skipped_windows,
        state.loss_scale,
        hurt.captured().calls,
    ) == (0, 20, 2.0, 0)
    assert same(hurt.parameters(), before)
    for session in (hurt, clean):
        window(session, (3, 4))
    assert same(hurt.parameters(), clean.parameters())
    assert hurt.state() == clean.state()._replace(skipped_windows=20)
