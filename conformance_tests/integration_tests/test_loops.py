"""A loop of others that accumulates by itself: nanoGPT's."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import gradaccum
from conformance_tests.framework_tests.refusing import refused

from .regression import X, Y, distance, make_net, mean_square


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
