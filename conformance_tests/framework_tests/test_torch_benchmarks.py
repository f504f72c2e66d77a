"""The torch questions about the large batch: all contestants give the same gradient, so that their times can be compared."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from benchmarks.contestants.bert import LARGE, TINY, WAYS
from benchmarks.questions import torch_memory, torch_split


def test_splitting_contestants_agree() -> None:
    x, gradients = torch.randn(torch_split.STEPS * torch_split.ITEMS, 16), {}
    for name, make in torch_split.WAYS.items():
        net = torch_split.model(16)
        loss = make(net, x)()
        gradients[name] = [loss, *(p.grad for p in net.parameters())]
    for own in gradients.values():
        for a, b in zip(own, gradients[torch_split.BASELINE], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_memory_contestants_run() -> None:
    """Dropout draws other numbers in each, so only their shapes are the same."""
    assert WAYS[0] == LARGE
    for way in WAYS:
        torch_memory.window(way, 4, TINY.layers, TINY)()
