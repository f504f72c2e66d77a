"""The get and set functions of `torch.distributed.checkpoint.state_dict`. They keep
only ``"state"`` and ``"param_groups"``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import gradaccum

from .torch_versions import has_torch

ALONE: dict[str, Any] = {"no_dist": True} if has_torch("2.7") else {}
"""Tells `torch.distributed.checkpoint` what it warns of by itself: there are no other
workers.
"""
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:TypedStorage is deprecated:UserWarning"
    ),  # Of torch itself, before torch 2.7.
]
SCALE = gradaccum.DynamicLossScale(init_scale=1024.0, growth_interval=2)
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01),
}
OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "scale": (torch.float32, {"loss_scale": SCALE}),
    "masters": (torch.bfloat16, {"loss_scale": SCALE, "master_weights": True}),
}
by_kind = pytest.mark.parametrize(("dtype", "options"), OPTIONS.values(), ids=OPTIONS)


class Mixed(nn.Module):
    """The last layer stays float32, so that only some parameters have masters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4).to(dtype), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.to(self.first.weight.dtype)).float())


def make(
    inner: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[nn.Module, Any]:
    model = Mixed(dtype)
    return model, gradaccum.wrap(INNER[inner](model.parameters()), steps=2, **options)


def train(model: nn.Module, opt: Any, first: int, last: int) -> None:
    for index in range(first, last):
        generator = torch.Generator().manual_seed(index)
        opt.backward(model(torch.randn(3, 4, generator=generator)).square().mean())
        opt.step()


def through_memory(
    model: nn.Module, opt: Any, other: nn.Module, twin: Any, path: Path
) -> None:
    model_state, optimizer_state = get_state_dict(model, opt)
    torch.save((model_state, optimizer_state), path / "state.pt")
    model_state, optimizer_state = torch.load(path / "state.pt", weights_only=True)
    set_state_dict(
        other, twin, model_state_dict=model_state, optim_state_dict=optimizer_state
    )


def through_files(
    model: nn.Module, opt: Any, other: nn.Module, twin: Any, path: Path
) -> None:
    """`dcp.load` fills the tensors of a state that the new optimizer provides."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
    dcp.save(state, checkpoint_id=path, **ALONE)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, twin), strict=True))
    dcp.load(state, checkpoint_id=path, **ALONE)
    set_state_dict(
        other,
        twin,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


@by_kind
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("way", [through_memory, through_files])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_run_resumes_bitwise(
    way: Any, inner: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    model, opt = make(inner, dtype, options)
    train(model, opt, 0, 6)
    other, twin = make(inner, dtype, options)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    way(model, opt, other, twin, tmp_path)
    assert twin.result.optimizer_step == 3
    assert twin.result.loss_scale == opt.result.loss_scale
    for m, o in ((model, opt), (other, twin)):
        train(m, o, 6, 11)
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert all(
        torch.equal(opt.master_weights[index], master)
        for index, master in twin.master_weights.items()
    )


@by_kind
@pytest.mark.parametrize("first", [1, 3])
def test_open_window_is_refused(
    first: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Before torch makes a state of zeros for an inner optimizer that has none; `flush`
    closes the window.
    """
    model, opt = make("adamw", dtype, options)
    train(model, opt, 0, first)
    with pytest.raises(
        gradaccum.UsageError, match=r"between two windows.*opt\.flush\(\)"
    ):
        get_state_dict(model, opt)
    assert bool(opt.optimizer.state) == (first == 3)
    undisturbed, other = make("adamw", dtype, options)
    train(undisturbed, other, 0, first)
    for m, o in ((model, opt), (undisturbed, other)):
        train(m, o, first, 5)
        o.flush()
    get_state_dict(model, opt)
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), undisturbed.parameters(), strict=True)
    )


def test_flattened_state_is_refused() -> None:
    model, opt = make("adamw", *OPTIONS["float32"])
    with pytest.raises(gradaccum.UsageError, match="flatten_optimizer_state_dict"):
        get_state_dict(
            model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )


@by_kind
def test_get_state_dict_changes_no_weight(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """To fill the state, torch makes a step with a learning rate of 0. That step must
    not count as a micro-batch.
    """
    model, opt = make("adamw", dtype, options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    get_state_dict(model, opt)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
    )
    assert opt.result.micro_step == opt.result.optimizer_step == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert opt.param_groups[0]["lr"] == 0.01


def test_two_optimizers_share_one_model() -> None:
    (model, _), (other, _) = (
        make("adamw", *OPTIONS["float32"]),
        make("adamw", *OPTIONS["float32"]),
    )
    pairs = []
    for m in (model, other):
        parts = (m.first, m.last)
        pairs.append(
            [
                gradaccum.wrap(
                    INNER["adamw"](part.parameters()), steps=2, **OPTIONS["scale"][1]
                )
                for part in parts
            ]
        )
    for count, opt in enumerate(pairs[0], start=1):
        opt.zero_grad()
        train(model, opt, 0, 2 * count)
    model_state, optimizer_state = get_state_dict(model, pairs[0])
    set_state_dict(
        other, pairs[1], model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert [opt.result.optimizer_step for opt in pairs[1]] == [1, 2]
