"""Each backend runs beside the reference through every short sequence of events, and through long random ones.

After each event every field is equal, and every sum is equal exactly.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gradaccum
from gradaccum_conformance.bounds import gamma, unit_roundoff
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.reference.harness import harness as reference
from gradaccum_conformance.scenarios import CAPTURE, coarse, poisoned, start
from gradaccum_conformance.specs import LINEAR

DYNAMIC = gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=2, min_scale=1.0, max_scale=16.0)
VARIANTS: dict[str, dict[str, Option]] = {
    "skip window": {"steps": 2, "loss_scale": DYNAMIC, "clip_norm": 2.0},
    "drop micro-batch": {"steps": 2, "loss_scale": DYNAMIC, "on_overflow": "drop_micro_batch", "reduction": "item_mean"},
    "schedule and skip norm": {"steps": [(0, 1), (1, 3)], "skip_norm": 4.0, "reduction": "sum"},
}


GOOD, LARGE = coarse(LINEAR, 0, 2.0**-4), coarse(LINEAR, 1, 1.0)
EVENTS = {
    "good": lambda session: session.gradients(GOOD),
    "heavy": lambda session: session.gradients(LARGE, weight=3.0),
    "empty": lambda session: session.gradients(GOOD, weight=0.0),
    "bad": lambda session: session.gradients(poisoned(GOOD, math.nan)),
    "flush": lambda session: session.flush(),
    "discard": lambda session: session.discard(),
}
LENGTH = 3
DEEP_LENGTH = 5
LONGEST = 24
ELEMENTS = sum(array.size for array in LARGE.values())
LARGEST = max(float(np.abs(array).max()) for array in LARGE.values())
NORM_ERROR = gamma(2 * ELEMENTS, "float32")
"""The bound of a norm: one square and one addition per element."""
UPDATE_ERROR = CAPTURE.learning_rate * LARGEST * (NORM_ERROR + gamma(4, "float32"))
"""The bound of an update: the errors of the clipping factor, the division and the learning rate. No gradient element is above `LARGEST`."""
by_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


class Pair:
    """A backend's session and the reference's, given the same events."""

    def __init__(self, backend: Harness, options: dict[str, Option], mode: str | None = None) -> None:
        self.sessions = start(backend, mode=mode, **options), start(reference, **options)

    def do(self, event: str, history: tuple[str, ...]) -> None:
        for session in self.sessions:
            EVENTS[event](session)
        compare(*self.sessions, " ".join((*history, event)))

    def snapshot(self) -> list[Option]:
        return [session.snapshot() for session in self.sessions]

    def restore(self, snapshots: list[Option]) -> None:
        for session, snapshot in zip(self.sessions, snapshots, strict=True):
            session.restore(snapshot)


def compare(session: Session, truth: Session, history: str) -> None:
    assert session.state() == truth.state(), history
    ours, theirs = session.result(), truth.result()
    measured = {"grad_norm": 0.0, "loss": 0.0, "noise_scale": 0.0}  # Rounded, or told to some backends only.
    assert ours._replace(**measured) == theirs._replace(**measured), history
    assert ours.grad_norm == theirs.grad_norm or math.isclose(ours.grad_norm, theirs.grad_norm, rel_tol=NORM_ERROR), history
    assert session.captured().calls == truth.captured().calls, history
    for name, array in truth.accumulator().items():
        np.testing.assert_array_equal(session.accumulator()[name], array, err_msg=f"sum of {name} after {history}", strict=True)
    updates = truth.state().optimizer_step
    for name, array in truth.parameters().items():
        rounding = unit_roundoff("float32") * float(np.abs(array).max() + LARGEST)
        tolerance = updates * (UPDATE_ERROR + rounding)
        np.testing.assert_allclose(session.parameters()[name], array, rtol=0, atol=tolerance, err_msg=f"{name} after {history}")


def walk(pair: Pair, history: tuple[str, ...], length: int) -> int:
    """Depth first over all sequences, so that each prefix runs once."""
    if len(history) == length:
        return 1
    here, count = pair.snapshot(), 0
    for event in EVENTS:
        pair.do(event, history)
        count += walk(pair, (*history, event), length)
        pair.restore(here)
    return count


@by_variant
def test_every_short_sequence(backend: Harness, deep: bool, options: dict[str, Option]) -> None:
    length = DEEP_LENGTH if deep else LENGTH
    assert walk(Pair(backend, options), (), length) == len(EVENTS) ** length


@by_variant
def test_long_random_sequences(backend: Harness, deep: bool, options: dict[str, Option]) -> None:
    pair = Pair(backend, options)
    fresh = pair.snapshot()

    @settings(
        max_examples=200 if deep else 12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.sampled_from(list(EVENTS)), min_size=8, max_size=LONGEST))
    def run(events: list[str]) -> None:
        pair.restore(fresh)
        for index, event in enumerate(events):
            pair.do(event, tuple(events[:index]))

    run()


@pytest.mark.every_mode
@pytest.mark.parametrize("options", deep_but((VARIANTS["drop micro-batch"],), VARIANTS.values()), ids=VARIANTS)
def test_one_sequence_in_every_mode(backend: Harness, mode: str, options: dict[str, Option]) -> None:
    pair = Pair(backend, options, mode)
    events = ("good", "bad", "heavy", "good", "flush", "empty", "heavy", "discard", "good", "good", "empty", "flush", "bad", "flush")
    for index, event in enumerate(events):
        pair.do(event, events[:index])
