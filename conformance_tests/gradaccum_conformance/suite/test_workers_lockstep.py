"""Several workers run beside one reference that has the micro-batches of all: after
each random window everything is equal.

The workers get each event in a random order and after random delays, both from the
seed.
"""

import math
import random

import numpy as np
import pytest

from gradaccum_conformance.bounds import gamma
from gradaccum_conformance.harness import Option, Session
from gradaccum_conformance.reference.harness import harness as reference
from gradaccum_conformance.scenarios import coarse, poisoned, same_decision, start
from gradaccum_conformance.specs import MLP
from gradaccum_conformance.workers import Crew, Crews
from gradaccum_conformance.workers.options import DROPPING
from gradaccum_conformance.workers.shares import Share, Shares, feed, require_equal

VARIANTS = {"skip window": {}, "drop micro-batch": DROPPING}
GOOD = coarse(MLP, 0, 2.0**-4)
LARGE = coarse(MLP, 1, 1.0)
KINDS = {
    "good": (Share(GOOD), 8),
    "heavy": (Share(LARGE, 3.0), 4),
    "empty": (Share(GOOD, 0.0), 2),
    "partial": (Share({**GOOD, next(iter(GOOD)): None}, 2.0), 4),
    "bad": (Share(poisoned(GOOD, math.nan)), 1),
}
"""Micro-batches and how often each is drawn."""
MOST = 3
WINDOWS = 10
SEEDS = 1
DEEP_SEEDS = 25
NORM_ERROR = gamma(2 * sum(array.size for array in LARGE.values()), "float32")


def draw(chance: random.Random, workers: int) -> Shares:
    """From none to `MOST` micro-batches on each worker."""
    shares, odds = zip(*KINDS.values(), strict=True)
    return [
        chance.choices(shares, odds, k=chance.randint(0, MOST)) for _ in range(workers)
    ]


def compare(crew: Crew, truth: Session, seed: int, window: int) -> None:
    where = f"seed {seed}, window {window}"
    result = require_equal(crew)
    assert crew.ask("state")[0] == truth.state(), where
    assert same_decision(result, truth.result(), NORM_ERROR), where
    captured = crew.ask("captured")[0]
    expected = truth.captured()
    assert captured.calls == expected.calls, where
    for name, array in expected.gradient.items():
        # The sums are exact, so that only their division is rounded.
        np.testing.assert_allclose(
            captured.gradient[name],
            array,
            rtol=gamma(3, "float32"),
            atol=0,
            err_msg=f"{name}, {where}",
        )


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_random_windows_beside_the_reference(
    crews: Crews, deep: bool, options: dict[str, Option]
) -> None:
    crew = crews(**options)
    fresh = crew.snapshot()
    for seed in range(DEEP_SEEDS if deep else SEEDS):
        crew.restore(fresh)
        crew.pool.reseed(seed)
        chance = random.Random(seed)
        alone = start(reference, MLP, **options)
        for window in range(WINDOWS):
            shares = draw(chance, crew.workers)
            feed(crew, shares)
            for share in (share for worker in shares for share in worker):
                alone.gradients(share.tree, weight=share.weight)
            forgotten = chance.random() < 0.2
            for one in (crew, alone):
                one.discard() if forgotten else one.flush()
            compare(crew, alone, seed, window)
        assert alone.state().optimizer_step > 1, "too few updates to compare"
