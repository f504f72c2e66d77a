"""The streaming questions of the benchmarks: all contestants end with the same
parameters, and the counters are right.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from benchmarks.case import Case
from benchmarks.contestants.jax_mlp import make_params
from benchmarks.questions import jax_streaming

from .jax_versions import needs_microbatch

WIDTH = 16
WINDOWS = 3
DISTANCE = {"Keras": 3e-5}
"""How far a contestant's parameters may be from the others', 2e-6 elsewhere. Keras's
Adam adds epsilon to the root of the uncorrected second moment, where it weighs
1 / sqrt(1 - 0.999) = 32 times as much in the first update: for a gradient of 3e-6, 1e-8
applies the update of 1e-4 a tenth smaller, by 1e-5.
"""


def trained(case: Case) -> dict[str, Any]:
    """Return the parameters of each contestant but the floor, which uses the last
    gradient of a window alone.
    """
    ends = {}
    for name, run in case.contestants.items():
        if not name.startswith("floor"):
            for _ in range(WINDOWS):
                params = run()
            ends[name] = [np.asarray(leaf) for leaf in params]
    return ends


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras reads its backend from the environment."""
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "jax"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            lambda: jax_streaming.streaming("small", WIDTH, whole=True),
            marks=needs_microbatch,
        ),
        lambda: jax_streaming.clipping("small", WIDTH),
    ],
    ids=["streaming", "clipping"],
)
def test_all_contestants_agree(case: Any) -> None:
    ends = trained(case())
    assert len(ends) >= 3
    expected = ends[jax_streaming.BASELINE]
    start = make_params(WIDTH)
    for name, params in ends.items():
        for own, theirs, before in zip(params, expected, start, strict=True):
            atol = DISTANCE.get(name, 2e-6)
            np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=atol, err_msg=name)
            assert np.abs(own - np.asarray(before)).max() > 1e-4
