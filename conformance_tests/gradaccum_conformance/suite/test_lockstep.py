"""Each backend runs beside the reference through every event in every state that can be
reached, and through long random sequences.

After each event every field is equal, and every sum is equal exactly.
"""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gradaccum
from gradaccum_conformance.bounds import gamma, unit_roundoff
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.reference.harness import harness as reference
from gradaccum_conformance.scenarios import (
    CAPTURE,
    coarse,
    poisoned,
    same_decision,
    start,
)
from gradaccum_conformance.specs import LINEAR
from gradaccum_conformance.walking import state_of, walk

DYNAMIC = gradaccum.DynamicLossScale(
    init_scale=4.0, growth_interval=2, min_scale=1.0, max_scale=16.0
)
VARIANTS = {
    "skip window": {"steps": 2, "loss_scale": DYNAMIC, "clip_norm": 2.0},
    "drop micro-batch": {
        "steps": 2,
        "loss_scale": DYNAMIC,
        "on_overflow": "drop_micro_batch",
        "reduction": "sum_per_item",
    },
    "schedule and skip norm": {
        "steps": [(0, 1), (1, 3)],
        "skip_norm": 4.0,
        "reduction": "sum",
    },
}
STATES = {
    "skip window": (50, 11),
    "drop micro-batch": (50, 11),
    "schedule and skip norm": (15, 3),
}
"""How many states a variant has, and how many events away the deepest is. Changed
options or events change them.
"""

GOOD = coarse(LINEAR, 0, 2.0**-4)
LARGE = coarse(LINEAR, 1, 1.0)
EVENTS = {
    "good": lambda session, one: session.gradients(GOOD, weight=one),
    "heavy": lambda session, one: session.gradients(LARGE, weight=3.0),
    "empty": lambda session, one: session.gradients(GOOD, weight=0.0),
    "bad": lambda session, one: session.gradients(poisoned(GOOD, math.nan), weight=one),
    "flush": lambda session, one: session.flush(),
    "discard": lambda session, one: session.discard(),
}
"""Functions of a session and of the weight that the default stands for: None where it
may be left out.
"""
LONGEST = 24
ELEMENTS = sum(array.size for array in LARGE.values())
LARGEST = max(float(np.abs(array).max()) for array in LARGE.values())
NORM_ERROR = gamma(2 * ELEMENTS, "float32")
"""The bound of a norm: one square and one addition per element."""
UPDATE_ERROR = CAPTURE.learning_rate * LARGEST * (NORM_ERROR + gamma(4, "float32"))
"""The bound of an update: the errors of the clipping factor, the division and the
learning rate. No gradient element is above `LARGEST`.
"""
by_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


class Pair:
    """A backend's session and the reference's, given the same events."""

    def __init__(
        self, backend: Harness, options: dict[str, Option], mode: str | None = None
    ) -> None:
        self.sessions = (
            start(backend, mode=mode, **options),
            start(reference, **options),
        )
        self.done: Counter[str] = Counter()
        self.one = 1.0 if options.get("reduction") == "sum_per_item" else None

    def do(self, event: str, history: tuple[str, ...]) -> None:
        self.done[event] += 1
        for session in self.sessions:
            EVENTS[event](session, self.one)
        compare(*self.sessions, " ".join((*history, event)))

    def do_all(self, events: Sequence[str]) -> None:
        for index, event in enumerate(events):
            self.do(event, tuple(events[:index]))

    def snapshot(self) -> list[Option]:
        return [session.snapshot() for session in self.sessions]

    def restore(self, snapshots: list[Option]) -> None:
        for session, snapshot in zip(self.sessions, snapshots, strict=True):
            session.restore(snapshot)


def compare(session: Session, truth: Session, history: str) -> None:
    assert session.state() == truth.state(), history
    assert same_decision(session.result(), truth.result(), NORM_ERROR), history
    assert session.captured().calls == truth.captured().calls, history
    for name, array in truth.accumulator().items():
        np.testing.assert_array_equal(
            session.accumulator()[name],
            array,
            err_msg=f"sum of {name} after {history}",
            strict=True,
        )
    updates = truth.state().optimizer_step
    for name, array in truth.parameters().items():
        rounding = unit_roundoff("float32") * float(np.abs(array).max() + LARGEST)
        tolerance = updates * (UPDATE_ERROR + rounding)
        np.testing.assert_allclose(
            session.parameters()[name],
            array,
            rtol=0,
            atol=tolerance,
            err_msg=f"{name} after {history}",
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_event_in_every_state(backend: Harness, variant: str) -> None:
    pair = Pair(backend, VARIANTS[variant])
    depths = walk(pair, EVENTS, lambda: state_of(pair.sessions[1], VARIANTS[variant]))
    assert (len(depths), max(depths.values())) == STATES[variant]
    assert sum(pair.done.values()) == len(EVENTS) * len(depths)


SEQUENCES = st.lists(st.sampled_from(list(EVENTS)), min_size=8, max_size=LONGEST)


@by_variant
def test_long_random_sequences(
    backend: Harness, deep: bool, options: dict[str, Option]
) -> None:
    """Without going back between two events, and always the same ones."""
    pair = Pair(backend, options)
    fresh = pair.snapshot()

    @settings(
        max_examples=200 if deep else 12,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink] if deep else [Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SEQUENCES)
    def run(events: list[str]) -> None:
        pair.restore(fresh)
        pair.do_all(events)

    run()


GROWING = gradaccum.DynamicLossScale(
    init_scale=4.0, growth_interval=5, min_scale=1.0, max_scale=2.0**16
)
LONG = {
    "steps": [(0, 1), (3000, 2), (6000, 3)],
    "loss_scale": GROWING,
    "clip_norm": 2.0,
}


@pytest.mark.deep
def test_ten_thousand_updates(backend: Harness) -> None:
    """The parameters drift within their bound, schedule and loss scale are the
    reference's, and memory stays what it was.
    """
    pair = Pair(backend, LONG)
    peaks = []
    number = 0
    while (updates := pair.sessions[1].state().optimizer_step) < 10_000:
        for index in range(number, number := number + 111):
            event = "bad" if index % 37 == 36 else ("good", "heavy")[index % 2]
            for session in pair.sessions:
                EVENTS[event](session, None)
        compare(*pair.sessions, f"{updates} updates and some")
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[-1] - peaks[len(peaks) // 4] < 4 * 1024, "KiB"


SEQUENCE = (
    "good bad heavy good flush empty heavy discard good good empty flush bad flush"
)


@pytest.mark.every_mode
@pytest.mark.parametrize(
    "options",
    deep_but((VARIANTS["drop micro-batch"],), VARIANTS.values()),
    ids=VARIANTS,
)
def test_one_sequence_in_every_mode(
    backend: Harness, mode: str, options: dict[str, Option]
) -> None:
    Pair(backend, options, mode).do_all(SEQUENCE.split())
