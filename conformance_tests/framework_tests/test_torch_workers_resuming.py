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


def open_window(opt: Any) -> Any:
    entry = opt.state_dict()["gradaccum"]
    return entry["weight"], {
        index: total.clone() for index, total in entry["sums"].items()
    }


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"loss_scale": gradaccum.DynamicLossScale(1024.0)},
        HALF,
    ],
    ids=str,
)
def test_sum_and_weight_stay(workers: int, options: Any) -> None:
    """All sums of those that go on, and of those that saved, make the same; the first
    has everything.
    """
    states = [saved(rank, **options) for rank in range(2)]
    entries = [state["gradaccum"] for _, state in states]
    new = redistributed([state for _, state in states], workers)
    assert [state["gradaccum"]["worker"] for state in new] == [
        [rank, workers] for rank in range(workers)
    ]
    for state in new:
        state["gradaccum"]["worker"] = [0, 1]  # Each is loaded here by a process alone.
    held = [
        open_window(loaded((states[0][0], copy.deepcopy(state)), **options)[1])
        for state in new
    ]
    assert [weight for weight, _ in held] == [
        sum(entry["weight"] for entry in entries)
    ] + [0.0] * (workers - 1)
    assert [sorted(sums) for _, sums in held] == [list(range(6))] + [[]] * (
        workers - 1
    ), "the second worker alone has the rare branch"
    for index, total in held[0][1].items():
        parts = [entry["sums"][index] for entry in entries if index in entry["sums"]]
        assert total.dtype is parts[0].dtype
        torch.testing.assert_close(total, sum(parts), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.05}, {"on_overflow": "drop_micro_batch"}, HALF],
    ids=str,
)
def test_window_ends_as_the_large_batch_on_one_worker(options: Any) -> None:
    states = [saved(rank, **options) for rank in range(2)]
    model, opt = loaded(
        (states[0][0], redistributed([state for _, state in states], 1)[0]), **options
    )
    dtype = options.get("dtype", torch.float64)
    rest = micro_batches(0, dtype)[2:4]
    for batch in rest:
        learn(model, opt, batch)
    assert opt.result.applied
    both = [*micro_batches(0, dtype)[:2], *micro_batches(1, dtype)[:2]]
    reference, other = alone([micro_batches(0, dtype)[:4], [*both, *rest]], **options)
    require_equal(model, reference, off=0 if dtype is torch.bfloat16 else 1e-13)
    assert opt.result.grad_norm == pytest.approx(
        other.result.grad_norm, rel=1e-6 if dtype is torch.bfloat16 else 1e-12
    )
    assert opt.result.loss == pytest.approx(
        other.result.loss, rel=1e-6 if dtype is torch.bfloat16 else 1e-12
    )
