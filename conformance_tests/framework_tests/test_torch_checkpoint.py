"""Saving, loading, copying and pickling a wrapped optimizer in the middle of a
window.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradaccum

from .torch_model import PLACES, loss_of, make, rows_of, same

KINDS: dict[str, dict[str, Any]] = {
    **PLACES,
    "loss scale": {
        "loss_scale": gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=2)
    },
}
by_kind = pytest.mark.parametrize("kind", KINDS)
Run = tuple[Any, Any]
"""A model and its optimizer."""


def backward(run: Run, index: int, weight: float | None = None) -> None:
    model, opt = run
    opt.backward(loss_of(model, rows_of(index % 4)), weight=weight or 1 + index % 3)


def feed(run: Run, first: int, last: int) -> None:
    for index in range(first, last):
        backward(run, index)
        run[1].step()


def trained(last: int, kind: str = "in .grad") -> Run:
    run = make(steps=3, inner=lambda ps: torch.optim.AdamW(ps, lr=0.1), **KINDS[kind])
    feed(run, 0, last)
    return run


def assert_same(run: Run, other: Run) -> None:
    assert run[1].result == other[1].result
    assert same(run[0], other[0])
    ours, theirs = ([*each[1].state.values()] for each in (run, other))
    for entries, wanted in zip(ours, theirs, strict=True):
        assert all(torch.equal(entries[name], wanted[name]) for name in wanted)


@by_kind
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))]
)
def test_copy_with_its_model_trains_alike(
    kind: str, copied: Callable[[Run], Run]
) -> None:
    run = trained(4, kind)
    twin = copied(run)
    pairs = zip(twin[0].parameters(), twin[1].param_groups[0]["params"], strict=True)
    assert all(p is q for p, q in pairs)
    for each in (run, twin):
        feed(each, 5, 12)
    assert_same(run, twin)
    assert run[1].result.optimizer_step >= 3


@pytest.mark.parametrize("kind", ["in .grad", "kept apart"])
def test_bare_state_loads_as_empty_window(kind: str) -> None:
    """A bare optimizer loads the wrapper's state, too."""
    model, opt = run = trained(4, kind)
    backward(run, 1)
    _, other = trained(3)
    bare = copy.deepcopy(other.optimizer)
    opt.load_state_dict(copy.deepcopy(bare.state_dict()))
    assert opt.result.micro_step == 0
    assert opt.result.grad_norm == 0
    assert opt.state_dict()["gradaccum"]["loss"] == 0
    assert all(p.grad is None for p in model.parameters())
    feed(run, 0, 4)
    bare.load_state_dict(opt.state_dict())
    assert [state["step"] for state in bare.state.values()] == [2] * 4


def test_state_dict_hooks_run_in_order() -> None:
    _, opt = trained(0)
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append(state["extra"]))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("post"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", 1, "post"]
