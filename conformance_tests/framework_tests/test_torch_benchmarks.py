"""The torch questions about the large batch: all contestants give the same gradient, so
that their times can be compared.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.contestants.torch_least import least, least_separate
from benchmarks.contestants.torch_loops import hand_written, wrapped
from benchmarks.peak import live_bytes
from benchmarks.questions import torch_layered, torch_split


def test_splitting_contestants_agree() -> None:
    x, gradients = torch.randn(torch_split.STEPS * torch_split.ITEMS, 16), {}
    for name, make in torch_split.WAYS.items():
        net = torch_split.model(16)
        loss = make(net, x)()
        gradients[name] = [loss, *(p.grad for p in net.parameters())]
    for own in gradients.values():
        for a, b in zip(own, gradients[torch_split.BASELINE], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_layered_contestants_agree() -> None:
    """And the layered windows have one layer's gradients alive at a time."""
    trained, of_gradients = {}, {}
    for way in torch_layered.ways(1):
        run, optimizers = torch_layered.window(way, 4, 16, 1)
        run()
        held = [each for inner in optimizers for each in torch_layered.held_by(inner)]
        of_gradients[way] = live_bytes(run, held)[1]
        groups = [group for inner in optimizers for group in inner.param_groups]
        trained[way] = [p.detach() for group in groups for p in group["params"]]
    for own in trained.values():
        torch.testing.assert_close(own, trained[torch_layered.BASELINE])
    layer = 4 * (16 * 16 + 16)
    assert of_gradients[torch_layered.BASELINE] == 4 * layer
    for way in (torch_layered.KEPT, torch_layered.RECOMPUTED):
        assert of_gradients[way] == layer


@pytest.mark.parametrize("fused", [False, True])
def test_loops_make_the_same_updates(fused: bool) -> None:
    x, trained = torch.randn(4, 16), list[list[torch.Tensor]]()
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
        torch.testing.assert_close(own, trained[0])
