"""`mindspore.train.Model` on the regression of `mindspore_runs`, bare on the large
batches or wrapped on their micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

import gradaccum
from conformance_tests.integration_tests.mindspore_runs import (
    PART,
    START,
    STEPS,
    X,
    Y,
    make_net,
    values,
)
from gradaccum_mindspore import TrainOneStepCell

WHOLE = 12
"""Rows of two windows."""


def data(size: int, first: int = 0, end: int = WHOLE) -> NumpySlicesDataset:
    """Batches of these rows, in order; the last may be short."""
    return NumpySlicesDataset(
        (X[first:end], Y[first:end]), ["x", "y"], shuffle=False
    ).batch(size)


def momentum(net: nn.Cell, rate: Any = 0.01) -> nn.Momentum:
    """The inner optimizer."""
    return nn.Momentum(net.trainable_params(), rate, 0.9)


class Run:
    """A model to train, and what it is made of.

    Args:
        wrapped: on micro-batches, by a wrapped optimizer; else on the large batches, by
            the bare one.
        make: the inner optimizer.
        cell: train by `gradaccum_mindspore.TrainOneStepCell` where wrapped, which
            weighs a micro-batch by its items.
        options: of `mindspore.train.Model`.
    """

    def __init__(
        self,
        wrapped: bool,
        make: Callable[[nn.Cell], Any] = momentum,
        cell: bool = False,
        net: nn.Cell | None = None,
        **options: Any,
    ) -> None:
        self.net = make_net() if net is None else net
        inner = make(self.net)
        self.opt = gradaccum.wrap(inner, steps=STEPS) if wrapped else inner
        self.size = PART if wrapped else PART * STEPS
        if cell and wrapped:
            self.model = Model(
                TrainOneStepCell(nn.WithLossCell(self.net, nn.MSELoss()), self.opt),
                **options,
            )
        else:
            self.model = Model(self.net, nn.MSELoss(), self.opt, **options)

    def train(
        self, epochs: int = 1, callbacks: Any = (), end: int = WHOLE, **options: Any
    ) -> Any:
        """Train on the first `end` rows; returns the parameters."""
        self.model.train(
            epochs,
            data(self.size, end=end),
            callbacks=list(callbacks),
            **{"dataset_sink_mode": False, **options},
        )
        return values(self.net)


def by_hand(epochs: int, *windows: tuple[int, int]) -> Any:
    """The parameters after the bare optimizer's updates with these rows, in each
    epoch.
    """
    net = make_net()
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), momentum(net))
    for first, end in windows * epochs:
        step(Tensor(X[first:end]), Tensor(Y[first:end]))
    return values(net)


def same(got: Any, wanted: Any, within: float = 1e-6) -> None:
    """The parameters are those, and have moved."""
    assert np.abs(wanted - START).max() > 1e-3
    np.testing.assert_allclose(got, wanted, rtol=0, atol=within)


def everything(model: Model) -> dict[str, Any]:
    """All Parameters of its training network."""
    return {
        name: p.asnumpy().tolist()
        for name, p in model.train_network.parameters_dict().items()
    }


def set_mode(graph: bool) -> None:
    """Graph mode, or PyNative."""
    ms.set_context(mode=ms.GRAPH_MODE if graph else ms.PYNATIVE_MODE)


@pytest.fixture(autouse=True)
def pynative_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For each test of a module that imports it."""
    monkeypatch.chdir(tmp_path)
    yield
    set_mode(graph=False)
