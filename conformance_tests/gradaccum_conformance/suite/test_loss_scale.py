"""The loss scale moves once per window, at its end, between floor and ceiling. It
leaves no trace in the gradient.
"""

import math
from typing import NamedTuple

import pytest

from gradaccum import DynamicLossScale
from gradaccum_conformance.harness import Harness
from gradaccum_conformance.scenarios import (
    feed_gradients,
    poisoned,
    random_tree,
    same,
    start,
)
from gradaccum_conformance.specs import LINEAR

GOOD = random_tree(LINEAR, 0)
GRADIENTS = {".": GOOD, "x": poisoned(GOOD, math.inf)}
"""By the letters of a case."""


class Case(NamedTuple):
    rule: DynamicLossScale
    micro_batches: str
    scales: list[float]
    """After each micro-batch."""
    steps: int = 1


CASES = {
    "factors, floor and ceiling": Case(
        DynamicLossScale(
            init_scale=2.0,
            growth_factor=4.0,
            backoff_factor=0.25,
            growth_interval=2,
            min_scale=0.5,
            max_scale=8.0,
        ),
        "...x....xxx",
        [2.0, 8.0, 8.0, 2.0, 2.0, 8.0, 8.0, 8.0, 2.0, 0.5, 0.5],
    ),
    "once per skipped window": Case(
        DynamicLossScale(init_scale=8.0, growth_interval=2),
        "xx......",
        [8.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0],
        steps=2,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scale_after_each_micro_batch(backend: Harness, mode: str, case: Case) -> None:
    session = start(backend, steps=case.steps, loss_scale=case.rule, mode=mode)
    scales = []
    for letter in case.micro_batches:
        session.gradients(GRADIENTS[letter])
        scales.append(session.state().loss_scale)
        assert session.result().loss_scale == scales[-1]
    assert scales == case.scales


def test_scale_leaves_no_trace(backend: Harness, mode: str) -> None:
    """A power of two multiplies exactly. So the unscaled gradient is the same, bit for
    bit.
    """
    scaled, plain = (
        start(backend, steps=3, loss_scale=scale, mode=mode)
        for scale in (2.0**12, None)
    )
    for session in (scaled, plain):
        feed_gradients(session, [random_tree(LINEAR, seed) for seed in range(3)])
    assert same(scaled.captured().gradient, plain.captured().gradient)
