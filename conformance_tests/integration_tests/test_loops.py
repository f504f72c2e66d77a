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

    def loss(named: dict[str, Tensor], net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(net, named, x) - y).square().mean()

    gradients_of_items = torch.func.vmap(torch.func.grad(loss), (None, None, 0, 0))

    def train(rows: int, wrap: Callable[..., Any]) -> nn.Module:
        net = make_net()
        opt = wrap(torch.optim.Adam(net.parameters(), lr=0.05))
        for x, y in zip(X[:24].split(rows), Y[:24].split(rows), strict=True):
            named = {name: p.detach() for name, p in net.named_parameters()}
            of_items = gradients_of_items(named, net, x, y)
            norms = [each.flatten(1).norm(dim=1) for each in of_items.values()]
            factors = (0.5 / torch.stack(norms).norm(dim=0)).clamp(max=1)
            for name, each in of_items.items():
                clipped = torch.einsum("i,i...->...", factors, each)
                net.get_parameter(name).grad = clipped / rows
            opt.step()
        return net

    wrapped = partial(gradaccum.wrap, steps=4, separate_sums=True)
    large = train(8, lambda optimizer: optimizer)
    assert distance(train(2, wrapped), large) < 1e-12


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
