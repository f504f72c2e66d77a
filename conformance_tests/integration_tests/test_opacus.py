"""Opacus clips each sample's gradient and adds noise to the batch's: the large batch is
its own ``BatchMemoryManager``'s to add up.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import (
    SUMS,
    Loop,
    X,
    Y,
    furthest,
)

opacus = pytest.importorskip("opacus", reason="needs Opacus")


pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing when gradients are computed with respect"
        " to module outputs:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning"),
]


def private(
    size: int, wrap: dict[str, Any] | None = None
) -> tuple[nn.Module, Any, Any, DataLoader[Any]]:
    """The model, Opacus' model, its optimizer and its loader of 16 rows in batches of
    `size`.
    """
    model = Loop().model()
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = opt if wrap is None else gradaccum.wrap(opt, **wrap)
    made = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=opt,
        data_loader=DataLoader(TensorDataset(X[:16], Y[:16]), batch_size=size),
        noise_multiplier=0.5,
        max_grad_norm=0.1,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(5),
    )
    return (model, *made)


def train(model: nn.Module, opt: Any, loader: Any) -> None:
    for x, y in loader:
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_both_ways_round_are_refused(options: dict[str, Any]) -> None:
    """Each micro-batch would have the noise of a whole batch. Where ``.grad`` holds the
    sum, an assignment to it is refused anyway.
    """
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"optimizer: .*DPOptimizer of Opacus.*BatchMemoryManager",
    ):
        gradaccum.wrap(private(2)[2], steps=4, **options)
    plain, *rest = private(2, {"steps": 4, **options})
    words = r"make_private: .*BatchMemoryManager" if options else r"\.grad: "
    with pytest.raises(gradaccum.UsageError, match=words):
        train(*rest)
    assert furthest(plain, Loop().model()) == 0
