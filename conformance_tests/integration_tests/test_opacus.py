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

from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402

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
def test_its_optimizer_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"optimizer: .*DPOptimizer of Opacus.*BatchMemoryManager",
    ):
        gradaccum.wrap(private(2)[2], steps=4, **options)


def test_wrapped_optimizer_in_make_private_is_refused() -> None:
    """Each micro-batch would have the noise of a whole batch. Where ``.grad`` holds the
    sum, an assignment to it is refused anyway.
    """
    for options, words in (
        ({}, r"\.grad: "),
        ({"separate_sums": True}, r"make_private: .*BatchMemoryManager"),
    ):
        plain, model, opt, loader = private(2, {"steps": 4, **options})
        with pytest.raises(gradaccum.UsageError, match=words):
            train(model, opt, loader)
        assert furthest(plain, Loop().model()) == 0


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_window_of_one_is_opacus_own(options: dict[str, Any]) -> None:
    """There the wrapper may clip, skip and count, and adds nothing up."""
    mine, model, opt, loader = private(8, {"steps": 1, **options})
    train(model, opt, loader)
    bare, *rest = private(8)
    train(rest[0], rest[1], rest[2])
    assert furthest(mine, bare) == 0
    assert furthest(mine, Loop().model()) > 1e-3


def test_virtual_batches_equal_the_large_ones() -> None:
    """What both refusals name: clipped gradients of two rows at a time, and the noise
    of eight once.
    """
    mine, model, opt, loader = private(8)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=opt
    ) as parts:
        assert len(list(loader)) == 2
        train(model, opt, parts)
    bare, *rest = private(8)
    train(rest[0], rest[1], rest[2])
    assert furthest(mine, bare) < 1e-12
    assert furthest(mine, Loop().model()) > 1e-3
