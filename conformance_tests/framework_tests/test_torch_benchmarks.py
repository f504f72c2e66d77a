"""The torch questions about the large batch: all contestants give the same gradient, so
that their times can be compared.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from benchmarks.contestants.torch_least import least, least_separate
from benchmarks.contestants.torch_loops import hand_written, wrapped
from benchmarks.questions import torch_split


def test_splitting_contestants_agree() -> None:
    x = torch.randn(torch_split.STEPS * torch_split.ITEMS, 16)
    gradients = {}
    for name, make in torch_split.WAYS.items():
        net = torch_split.model(16)
        loss = make(net, x)()
        gradients[name] = [loss, *(p.grad for p in net.parameters())]
    for own in gradients.values():
        for a, b in zip(own, gradients[torch_split.BASELINE], strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_loops_make_the_same_updates(fused: bool) -> None:
    x = torch.randn(4, 16)
    trained = []
    for recipe in (hand_written, least, least_separate, wrapped):
        net = torch_split.model(16)
        window = recipe(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1, fused=fused),
            lambda net: torch_split.loss(net, x),
        )
        for _ in range(2):
            window()
        trained.append([p.detach() for p in net.parameters()])
    for own in trained[1:]:
        assert_close(own, trained[0])
