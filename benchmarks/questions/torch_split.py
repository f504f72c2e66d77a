"""torch, float32: the gradient of a large batch from 8 micro-batches, beside the loop
that people write by hand, and beside one pass.

The last micro-batch is as large as the others, so that both loops may weigh them alike;
gradaccum weighs each by its items and looks for the parameters that took part. One pass
of the large batch has the activations of all items at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import gradaccum_torch
from benchmarks.case import Case
from benchmarks.contestants.torch_loops import DEVICE, Window
from benchmarks.peak import saved_bytes

BASELINE = "hand-written loop"
STEPS, ITEMS, LAYERS = 8, 8, 4
SIZES = {"10 k parameters": 50, "1 M parameters": 512, "10 M parameters": 1600}
"""Width of an MLP of square layers."""


def cases(quick: bool) -> Iterator[Case]:
    for name, width in list(SIZES.items())[: 2 if quick else None]:
        x = torch.randn(STEPS * ITEMS, width, device=DEVICE)
        nets = {way: model(width) for way in WAYS}
        windows = {way: make(nets[way], x) for way, make in WAYS.items()}
        saved = {
            way: saved_bytes(window, [x, *nets[way].parameters()])
            for way, window in windows.items()
        }
        yield Case(
            name,
            BASELINE,
            windows,
            {way: {"saved MiB": size / 2**20} for way, size in saved.items()},
        )


def model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            layer
            for _ in range(LAYERS)
            for layer in (nn.Linear(width, width), nn.Tanh())
        )
    ).to(DEVICE)


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()  # type: ignore[no-any-return]


def by_hand(net: nn.Module, x: Tensor) -> Window:
    def window() -> Tensor:
        net.zero_grad()
        total = torch.zeros((), device=x.device)
        for part in torch.split(x, ITEMS):
            share = loss(net, part) / STEPS
            share.backward()  # type: ignore[no-untyped-call]
            total += share.detach()
        return total

    return window


def ours(net: nn.Module, x: Tensor) -> Window:
    def window() -> object:
        net.zero_grad()
        return gradaccum_torch.backward(
            lambda part: loss(net, part), x, micro_batch_size=ITEMS
        )

    return window


def whole(net: nn.Module, x: Tensor) -> Window:
    def window() -> Tensor:
        net.zero_grad()
        value = loss(net, x)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    return window


WAYS = {BASELINE: by_hand, "gradaccum": ours, "large batch in one pass": whole}
