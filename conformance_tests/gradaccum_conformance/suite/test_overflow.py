"""A gradient that is not finite costs its window, or only its micro-batch. It leaves no
trace in the next window.
"""

import math

import pytest

from gradaccum_conformance.bounds import bound_of_sum, worst
from gradaccum_conformance.harness import Harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    feed_gradients,
    outcome_of,
    poisoned,
    random_tree,
    require_skipped,
    same,
    start,
)
from gradaccum_conformance.specs import LINEAR

TREES = [random_tree(LINEAR, seed) for seed in range(6)]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_overflow_skips_this_window_only(
    backend: Harness, mode: str, value: float
) -> None:
    """In each micro-batch of a window. The next window is, bit for bit, that of a
    session without the overflow.
    """
    clean = start(backend, steps=3, mode=mode)
    feed_gradients(clean, TREES[3:])
    for bad in range(3):
        session = start(backend, steps=3, mode=mode)
        before = session.parameters()
        trees = TREES[:3]
        trees[bad] = poisoned(trees[bad], value)
        feed_gradients(session, trees)
        require_skipped(session, before, "overflow")
        assert session.result().grad_norm == math.inf
        state = session.state()
        assert state.optimizer_step == 0
        assert state.skipped_windows == 1
        assert not state.overflow
        feed_gradients(session, TREES[3:])
        assert same(session.parameters(), clean.parameters())


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
    session.gradients(TREES[0], weight=weight)
    require_skipped(session, before, "overflow")
    assert session.result().grad_norm == math.inf


@pytest.mark.every_mode
def test_drop_in_every_mode(backend: Harness, mode: str, errors: Errors) -> None:
    """Two micro-batches of three, then all, then none but the next window's first."""
    session = start(backend, steps=3, on_overflow="drop_micro_batch", mode=mode)
    bad = poisoned(TREES[0], math.nan)
    feed_gradients(session, [bad, TREES[1], poisoned(TREES[2], -math.inf)])
    assert outcome_of(session.result()) == {"applied", "overflow"}
    errors.check(
        "gradient",
        worst(session.captured().gradient, TREES[1]),
        bound_of_sum([TREES[1]], "float32"),
    )
    feed_gradients(session, [bad, poisoned(TREES[1], math.inf), bad])
    assert outcome_of(session.result()) == {"skipped", "overflow"}
    assert session.captured().calls == 1
    assert session.state().skipped_windows == 1
    assert session.state().micro_step == 0
    feed_gradients(session, [TREES[1]] * 3)
    assert outcome_of(session.result()) == {"applied"}
    session.gradients(bad)
    assert outcome_of(session.result()) == {"overflow"}
