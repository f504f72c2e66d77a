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


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)
def test_opacus_around_a_wrapper_is_refused(options: dict[str, Any]) -> None:
    """Each micro-batch would have the noise of a whole batch. Where ``.grad`` holds the
    sum, an assignment to it is refused anyway. The page has the other way round.
    """
    net = make_net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    model, opt, _ = opacus.PrivacyEngine().make_private(
        module=net,
        optimizer=gradaccum.wrap(inner, steps=4, **options),
        data_loader=DataLoader(TensorDataset(X[:16], Y[:16]), batch_size=2),
        noise_multiplier=0.5,
        max_grad_norm=0.1,
        poisson_sampling=False,
    )
    words = r"make_private: .*BatchMemoryManager" if options else r"\.grad: "
    mean_square(model, X[:2], Y[:2]).backward()
    with pytest.raises(gradaccum.UsageError, match=words):
        opt.step()
    assert distance(net, make_net()) == 0
