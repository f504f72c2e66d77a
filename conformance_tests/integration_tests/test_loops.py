"""Loops of others that keep ``.grad`` for themselves or accumulate by themselves: a
generative adversarial network's, nanoGPT's, and gradients per item.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import (
    X,
    Y,
    distance,
    make_net,
    mean_square,
)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
def test_gradients_clipped_per_item_equal_large_batch() -> None:
    """As in private training: `torch.func` makes them, and the loop assigns them."""

    def loss(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (x @ weight - y).square().sum()

    gradients_of_items = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    def train(rows: int, wrap: Callable[..., Any]) -> Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 5).double())
        opt = wrap(torch.optim.Adam([weight], lr=0.05))
        for x, y in zip(X[:24].split(rows), Y[:24].split(rows), strict=True):
            of_items = gradients_of_items(weight.detach(), x, y)
            factors = (0.5 / of_items.norm(dim=1, keepdim=True)).clamp(max=1)
            weight.grad = (of_items * factors).mean(0)
            opt.step()
        return weight.detach()

    wrapped = partial(gradaccum.wrap, steps=4, separate_sums=True)
    large = train(8, lambda optimizer: optimizer)
    torch.testing.assert_close(train(2, wrapped), large, rtol=1e-12, atol=0)


def test_loop_that_accumulates_is_refused() -> None:
    """nanoGPT's, as it stands: a second window around its own would hold sixteen
    micro-batches.
    """
    net = make_net()
    scaler = torch.amp.GradScaler("cpu")
    inner = torch.optim.AdamW(net.parameters())
    opt = gradaccum.wrap(inner, 4, clip_norm=1.0, loss_scale=scaler)
    for x, y in zip(X[:8].split(2), Y[:8].split(2), strict=True):
        scaler.scale(mean_square(net, x, y) / 4).backward()
    with refused(gradaccum.UsageError, "clip_norm="):
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
    assert distance(net, make_net()) == 0
