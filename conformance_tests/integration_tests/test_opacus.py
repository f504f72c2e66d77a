"""Opacus clips each sample's gradient and adds noise to the batch's: the large batch is
its own ``BatchMemoryManager``'s to add up.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch.utils.data import DataLoader, TensorDataset

import gradaccum
from conformance_tests.integration_tests.regression import (
    X,
    Y,
    distance,
    make_net,
    mean_square,
)

opacus = pytest.importorskip("opacus", reason="needs Opacus")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning"),
]


def make_private(net: Any, opt: Any) -> Any:
    """Opacus' model, its optimizer and its loader of 16 rows in batches of two."""
    return opacus.PrivacyEngine().make_private(
        module=net,
        optimizer=opt,
        data_loader=DataLoader(TensorDataset(X[:16], Y[:16]), batch_size=2),
        noise_multiplier=0.5,
        max_grad_norm=0.1,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(5),
    )


def train(model: Any, opt: Any, loader: Any) -> None:
    for x, y in loader:
        opt.zero_grad()
        mean_square(model, x, y).backward()
        opt.step()


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)
def test_both_ways_round_are_refused(options: dict[str, Any]) -> None:
    """Each micro-batch would have the noise of a whole batch. Where ``.grad`` holds the
    sum, an assignment to it is refused anyway.
    """
    net = make_net()
    _, private, _ = make_private(net, torch.optim.SGD(net.parameters(), lr=0.1))
    words = "optimizer: .*DPOptimizer of Opacus.*BatchMemoryManager"
    with pytest.raises(gradaccum.ArgumentTypeError, match=words):
        gradaccum.wrap(private, steps=4, **options)
    net = make_net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    made = make_private(net, gradaccum.wrap(inner, steps=4, **options))
    words = r"make_private: .*BatchMemoryManager" if options else r"\.grad: "
    with pytest.raises(gradaccum.UsageError, match=words):
        train(*made)
    assert distance(net, make_net()) == 0
