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


@pytest.mark.parametrize("counts", [(2, 2), (2, 0)])
def test_noise_scale_goes_on(counts: tuple[int, int]) -> None:
    """The means go on; of a window that others began, the next micro-batch counts as
    the first, with all that the sum holds.
    """
    states = [
        saved(rank, count=count, noise_scale=0.5) for rank, count in enumerate(counts)
    ]
    shared = redistributed([state for _, state in states], 2)[1]["gradaccum"]
    assert (shared["loss"], shared["noise"][:2]) == (0.0, [0.0, 0.0])
    model, opt = loaded(
        (states[0][0], redistributed([state for _, state in states], 1)[0]),
        noise_scale=0.5,
    )
    *means, third, fourth = shared["noise"][2:], *micro_batches(0)[2:4]
    learn(model, opt, third)
    learn(model, opt, fourth)
    small = [*micro_batches(0)[: counts[0]], *micro_batches(1)[: counts[1]], third]
    items, squares = zip(*map(items_and_square, (small, [*small, fourth])), strict=True)
    # McCandlish et al. (2018), appendix A.1.
    trace = (squares[0] - squares[1]) / (1 / items[0] - 1 / items[1])
    square = (items[1] * squares[1] - items[0] * squares[0]) / (items[1] - items[0])
    trace, square = (
        (old + new) / 2 for old, new in zip(means[0], (trace, square), strict=True)
    )
    assert square > 0
    assert opt.result.noise_scale == pytest.approx(max(trace, 0.0) / square, rel=1e-9)


def items_and_square(window: list[Any]) -> tuple[int, float]:
    """Those of the gradient of a window after that which `saved` ended."""
    _, opt = alone([micro_batches(0)[:4], window])
    return sum(len(x) for x, _, _ in window), opt.result.grad_norm**2


def test_grad_scaler_goes_on() -> None:
    """Its scale and tracker in mid-window are the window's, also in a scaler that is
    new.
    """
    states = [
        saved(
            rank,
            loss_scale=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        )
        for rank in range(2)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2)
    model, opt = loaded(
        (states[0][0], redistributed([state for _, state in states], 1)[0]),
        loss_scale=scaler,
    )
    assert scaler.get_scale() == 8.0
    for batch in micro_batches(0)[2:4]:
        learn(model, opt, batch)
    assert (opt.result.applied, scaler.get_scale()) == (True, 16.0), (
        "the second clean window"
    )


def test_worker_without_a_window_takes_part() -> None:
    """It saved between two windows, and so has no size of one."""
    states = [saved(0)[1], saved(1, count=0)[1]]
    for order in (states, states[::-1]):
        entry = redistributed(order, 1)[0]["gradaccum"]
        assert (entry["micro_step"], entry["terms"]["steps"]) == (2, 4)
        assert entry["weight"] == states[0]["gradaccum"]["weight"]


def test_overflow_of_one_worker_is_kept() -> None:
    options: Any = {
        "on_overflow": "drop_micro_batch",
        "loss_scale": gradaccum.DynamicLossScale(64.0),
    }
    states = [saved(rank, **options)[1] for rank in range(2)]
    states[1]["gradaccum"]["overflow"] = True
    assert [state["gradaccum"]["overflow"] for state in redistributed(states, 2)] == [
        True,
        False,
    ]


def test_given_state_dicts_stay() -> None:
    states = [saved(rank)[1] for rank in range(2)]
    before = copy.deepcopy(states)
    new = redistributed(states, 1)[0]
    new["gradaccum"]["sums"][0].zero_()
    for state, old in zip(states, before, strict=True):
        for index, total in old["gradaccum"]["sums"].items():
            assert torch.equal(state["gradaccum"]["sums"][index], total)


def _spoil(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


SPOILED = {
    "optimizer_step": (("gradaccum", "optimizer_step"), 7),
    "loss_scale": (("gradaccum", "loss_scale"), 2.0),
    "reduction": (("gradaccum", "terms", "reduction"), "sum"),
    "on_overflow": (("gradaccum", "terms", "on_overflow"), "skip"),
    "steps": (("gradaccum", "terms", "steps"), 8),
    "parameters": (("gradaccum", "parameters", 0, 0), [9, 9]),
    "param_groups": (("param_groups", 0, "lr"), 0.25),
    "state": (("state", 0, "momentum_buffer"), torch.zeros(8, 4, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", SPOILED)
def test_other_runs_are_refused(name: str) -> None:
    states = [saved(0)[1], _spoil(saved(1)[1], *SPOILED[name])]
    with pytest.raises(gradaccum.CheckpointError, match=f"^{name}: "):
        redistributed(states, 1)


def test_part_of_a_window_is_not_the_window() -> None:
    """Every worker saves its own sum: the first one's alone, or twice, would pass for
    that of all.
    """
    states = [saved(rank)[1] for rank in range(2)]
    with pytest.raises(
        gradaccum.CheckpointError,
        match=r"^worker: .* rank 0 of 1; got that of rank 1 of 2",
    ):
        loaded(saved(1))
    for given in (states[:1], states[:1] * 2):
        with pytest.raises(
            gradaccum.CheckpointError, match=r"^state_dicts: .* ranks \[0"
        ):
            redistributed(given, 1)
    whole = redistributed(states, 1)
    assert redistributed(whole, 2)[1]["gradaccum"]["worker"] == [1, 2]
    between = saved(0, count=0)
    assert loaded(between)[1].result.optimizer_step == 1, (
        "between two windows any worker's state will do"
    )


def test_bad_arguments_are_refused() -> None:
    state = saved(0)[1]
    with pytest.raises(gradaccum.ArgumentValueError, match="states, workers"):
        redistributed([], 1)
    with pytest.raises(gradaccum.ArgumentValueError, match="states, workers"):
        redistributed([state, state], 0)
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"^workers"):
        redistributed([state], 2.0)  # type: ignore[arg-type]
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"^state_dicts"):
        redistributed(state, 2)
    with pytest.raises(gradaccum.CheckpointError, match=r"^gradaccum"):
        redistributed([sgd(build()).state_dict()], 2)
