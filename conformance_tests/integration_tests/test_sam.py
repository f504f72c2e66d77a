"""Sharpness-aware minimization of pytorch_optimizer: two updates a batch, each of them
a window of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import SUMS, Loop, furthest

library = pytest.importorskip("pytorch_optimizer", reason="needs pytorch_optimizer")

LOOP = Loop()
MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "SAM": lambda model: library.SAM(
        model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, rho=0.1
    ),
    "adaptive SAM": lambda model: library.SAM(
        model.parameters(), torch.optim.AdamW, lr=0.1, rho=0.5, adaptive=True
    ),
    "WSAM": lambda model: library.WSAM(
        model, model.parameters(), torch.optim.SGD, lr=0.1, rho=0.1
    ),
    "FriendlySAM": lambda model: library.FriendlySAM(
        model.parameters(), torch.optim.SGD, lr=0.1, rho=0.1
    ),
    "LookSAM": lambda model: library.LookSAM(
        model.parameters(), torch.optim.SGD, lr=0.1, rho=0.1, k=2
    ),
}


class Update(torch.optim.Optimizer):
    """One of the two updates, as the ``step`` of an optimizer that can be wrapped."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, method: Callable[[], object]
    ) -> None:
        super().__init__(
            [{"params": group["params"]} for group in optimizer.param_groups], {}
        )
        self.method = method

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.method()


def closure_of(model: nn.Module, rows: int = 8, start: int = 0) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = LOOP.loss(model, start, rows)
        loss.backward()
        return loss

    return closure


def large(name: str, batches: int = 3) -> nn.Module:
    model = LOOP.model()
    opt = MAKERS[name](model)
    for _ in range(batches):
        opt.zero_grad()
        if name != "WSAM":  # It calls the closure twice.
            closure_of(model)()
        opt.step(closure_of(model))
    return model


@pytest.mark.parametrize("options", SUMS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_window_for_each_update_equals_large_batches(
    name: str, options: dict[str, Any]
) -> None:
    """As RECIPES.md has it, An optimizer with two updates."""
    model = LOOP.model()
    sam = MAKERS[name](model)
    up, down = (
        gradaccum.wrap(Update(sam, method), steps=4, **options)
        for method in (sam.first_step, sam.second_step)
    )
    for _ in range(3):
        for opt in (up, down):
            for start in range(0, 8, 2):
                opt.zero_grad()
                LOOP.loss(model, start, 2).backward()
                opt.step()
            assert opt.result.applied
    assert furthest(large(name), LOOP.model()) > 1e-3
    assert furthest(model, large(name)) < 1e-11


def test_closure_is_its_own_error() -> None:
    """pytorch_optimizer says that it wants a closure; a note says that the closure was
    run once, and what to write.
    """
    model, before = LOOP.model(), LOOP.model()
    opt = gradaccum.wrap(MAKERS["SAM"](model), steps=2)
    opt.step(closure_of(model))
    with pytest.raises(Exception, match="SAM requires closure") as raised:
        opt.step(closure_of(model))
    assert any("used bare" in note for note in raised.value.__notes__)
    assert furthest(model, before) == 0
    opt.discard()
    assert opt.result.micro_step == 0
