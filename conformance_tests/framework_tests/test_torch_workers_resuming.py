"""A window that two workers saved goes on with one, two or four. Here no process is
started: the state dicts say it all.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import gradaccum
from conformance_tests.framework_tests.torch_workers.common import (
    alone,
    build,
    learn,
    micro_batches,
    require_equal,
    sgd,
)
from gradaccum_torch import redistributed

HALF = {"dtype": torch.bfloat16, "master_weights": True}
ROOT = Path(__file__).parents[2]


def saved(
    rank: int, dtype: torch.dtype = torch.float64, count: int = 2, **options: Any
) -> Any:
    """What worker number `rank` saves in mid-window, after an update that all workers
    have made alike.
    """
    model = build(dtype)
    opt = gradaccum.wrap(sgd(model), **{"steps": 4} | options)
    for batch in micro_batches(0, dtype)[:4]:
        learn(model, opt, batch)
    opt.flush()
    for batch in micro_batches(rank, dtype)[:count]:
        learn(model, opt, batch)
    states = copy.deepcopy((model.state_dict(), opt.state_dict()))
    states[1]["gradaccum"]["worker"] = [rank, 2]  # As with module=.
    return states


def loaded(state: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = build(dtype)
    opt = gradaccum.wrap(sgd(model), **{"steps": 4} | options)
    model.load_state_dict(state[0])
    opt.load_state_dict(state[1])
    return model, opt


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"clip_norm": 0.05},
        {"on_overflow": "drop_micro_batch"},
        {"loss_scale": gradaccum.DynamicLossScale(1024.0)},
        HALF,
    ],
    ids=str,
)
def test_window_ends_as_the_large_batch(workers: int, options: Any) -> None:
    """The first worker goes on with all, and the others with nothing; that window is
    ended here by the first alone.
    """
    states = [saved(rank, **options) for rank in range(2)]
    new = redistributed([state for _, state in states], workers)
    entries = [state["gradaccum"] for state in new]
    assert [entry["worker"] for entry in entries] == [
        [rank, workers] for rank in range(workers)
    ]
    assert [(entry["weight"], entry["sums"]) for entry in entries[1:]] == [(0, {})] * (
        workers - 1
    )
    entries[0]["worker"] = [0, 1]  # It is loaded here by a process alone.
    model, opt = loaded((states[0][0], new[0]), **options)
    dtype = options.get("dtype", torch.float64)
    rest = micro_batches(0, dtype)[2:4]
    for batch in rest:
        learn(model, opt, batch)
    assert opt.result.applied
    both = [*micro_batches(0, dtype)[:2], *micro_batches(1, dtype)[:2]]
    reference, other = alone([micro_batches(0, dtype)[:4], [*both, *rest]], **options)
    half = dtype is torch.bfloat16
    require_equal(model, reference, off=0 if half else 1e-13)
    for name in ("grad_norm", "loss"):
        mine, wanted = getattr(opt.result, name), getattr(other.result, name)
        assert mine == pytest.approx(wanted, rel=1e-6 if half else 1e-12)
