"""bitsandbytes, whose optimizers have a state of 8 bits: the same bits as on the large
batches, where float32 adds up exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import SUMS

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")

ROWS = (
    torch.randint(-16, 17, (24, 64, 64), generator=torch.Generator().manual_seed(1))
    / 16
)
"""Sixteenths: sums and means of two, four and eight rows are exact, so that no rounding
moves a state into another of its 256 steps.
"""
NAMES = ("AdamW", "AdamW8bit", "AdEMAMix8bit", "Lion", "Lion8bit", "SGD", "SGD8bit")


def make(name: str) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.linspace(-1, 1, 4096).view(64, 64))
    momentum = {"momentum": 0.9} if name.startswith("SGD") else {}
    return parameter, getattr(bitsandbytes.optim, name)(
        [parameter], lr=0.01, **momentum
    )


def train(
    parameter: nn.Parameter, opt: Any, size: int, start: int = 0, stop: int = 24
) -> None:
    for rows in ROWS[start:stop].split(size):
        opt.zero_grad()
        (parameter * rows.mean(dim=0)).sum().backward()
        opt.step()


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_same_bits_as_large_batches(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    bare, reference = make(name)
    before = bare.detach().clone()
    train(bare, reference, 8)
    assert not torch.equal(bare, before)
    parameter, inner = make(name)
    opt = gradaccum.wrap(inner, steps=4, **options)
    train(parameter, opt, 2, stop=12)
    torch.save([parameter.detach(), opt.state_dict()], tmp_path / "state.pt")
    train(parameter, opt, 2, start=12)
    assert torch.equal(parameter, bare)
    resumed, inner = make(name)
    opt = gradaccum.wrap(inner, steps=4, **options)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.data.copy_(weights)
    opt.load_state_dict(state)
    train(resumed, opt, 2, start=12)
    assert torch.equal(resumed, bare)
    state_of = next(iter(opt.state.values()))
    assert any(
        value.dtype == torch.uint8
        for value in state_of.values()
        if isinstance(value, torch.Tensor)
    ) == name.endswith("8bit")
