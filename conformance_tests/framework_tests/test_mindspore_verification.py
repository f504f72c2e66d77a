"""`verify` names the mistake planted in each model, and passes the sound ones. Nothing
of the user's is changed.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import mindspore as ms
import mindspore.common.seed  # the module; `mindspore.common` has functions of its name
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from gradaccum import verify
from gradaccum_conformance.deep import deep_but

from .mindspore_common import pynative_after  # noqa: F401

ITEMS = 8
RNG = np.random.default_rng(0)
X = Tensor(RNG.normal(size=(ITEMS, 4)), ms.float32)
Y = Tensor(RNG.normal(size=(ITEMS, 1)), ms.float32)


def net(*between: nn.Cell) -> nn.Cell:
    """A model in training, with the same weights in every process."""
    cell = nn.SequentialCell(nn.Dense(4, 3), *between, nn.Tanh(), nn.Dense(3, 1))
    generator = np.random.default_rng(1)
    for parameter in cell.trainable_params():
        values = generator.normal(size=parameter.shape)
        ops.assign(parameter, Tensor(values, ms.float32))
    return cell.set_train(True)


def plain(model: nn.Cell, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).mean()


def seeding(model: nn.Cell, x: Tensor, y: Tensor) -> Tensor:
    ms.set_seed(1)
    return plain(model, ops.dropout(x, 0.5, True), y)


class MeanInAnAttribute(nn.Cell):
    """A running mean of the inputs is subtracted, and kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 0.0

    def construct(self, x: Tensor) -> Tensor:
        out = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(x.mean().asnumpy())
        return out


class MeanInAParameter(nn.Cell):
    """The same as a Parameter that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        zeros = Tensor(np.zeros(1, np.float32))
        self.moving = Parameter(zeros, name="moving", requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        out = x - self.moving.value()
        ops.assign(self.moving, 0.9 * self.moving + 0.1 * ops.stop_gradient(x).mean())
        return out


PLANTED: dict[str, Any] = {
    "batch norm": (lambda: net(nn.BatchNorm1d(3)), plain, "batch_statistics", "1"),
    "attribute": (lambda: net(MeanInAnAttribute()), plain, "hidden_state", "1.mean"),
    "Parameter": (lambda: net(MeanInAParameter()), plain, "hidden_state", "moving"),
    "seed": (net, seeding, "not_repeatable", "the loss"),
}
CLOSED_OVER = net()
SOUND: dict[str, Any] = {
    "dropout": (lambda: net(nn.Dropout(p=0.5), nn.Dropout(p=0.2)), plain),
    "criterion": (net, nn.MSELoss()),
    "closing over": (lambda: CLOSED_OVER, lambda x, y: plain(CLOSED_OVER, x, y)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", deep_but(("batch norm", "seed"), PLANTED))
def test_mistake_is_named(name: str) -> None:
    model, loss_fn, kind, where = PLANTED[name]
    report = verify(model(), loss_fn, (X, Y), 4)
    assert not report.equivalent
    (cause,) = report.causes
    assert cause.kind == kind, str(report)
    assert where in cause.where, str(report)


@pytest.mark.parametrize("name", SOUND)
def test_sound_model_passes(name: str) -> None:
    model, loss_fn = SOUND[name]
    report = verify(model(), loss_fn, (X, Y), 4)
    assert report.equivalent, str(report)
    assert not report.causes


def gradients_of_two_sizes(reduction: str) -> list[float]:
    """For batches of four elements and of two."""
    loss_fn = nn.BCEWithLogitsLoss(reduction=reduction)
    backward = ms.grad(lambda x: loss_fn(x, ops.zeros_like(x)).mean())
    return [backward(ops.zeros(size))[0].item() for size in (4, 2)]


def test_mean_of_binary_cross_entropy_is_wrong_in_mindspore() -> None:
    """It divides both by the size of the process's first call. When MindSpore mends
    this, take the fault out of INTEGRATIONS.md and of TROUBLESHOOTING.md.
    """
    four, two = gradients_of_two_sizes("mean")
    assert four == two
    assert gradients_of_two_sizes("none") == [0.125, 0.25]


def state_of(model: Any) -> list[Any]:
    seeds = sys.modules["mindspore.common.seed"]
    cells = [cell for _, cell in model.cells_and_names()]
    return [
        [parameter.asnumpy().tobytes() for parameter in model.get_parameters()],
        [(cell.training, getattr(cell, "mean", None)) for cell in cells],
        [id(cell.dropout) for cell in cells if isinstance(cell, nn.Dropout)],
        (ms.get_seed(), dict(seeds._KERNEL_SEED)),
        (random.getstate(), repr(np.random.get_state())),
        (ms.get_context("mode"), ms.get_context("pynative_synchronize")),
    ]


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_the_users_changes(raises: bool, mode: int) -> None:
    """Parameters, statistics, attributes, modes, dropouts, random states and the
    context, also if the loss raises in the middle. Then MindSpore records no operators
    any more: else a gradient of layer norm would be taken for a second derivative,
    which MindSpore has not.
    """
    model = net(
        nn.BatchNorm1d(3), MeanInAParameter(), nn.Dropout(p=0.5), MeanInAnAttribute()
    )
    model[3].set_train(False)

    def loss_fn(model, x, y):
        np.random.random()
        random.random()
        loss = plain(model, ops.dropout(x, 0.5, True), y)
        if raises and x.shape[0] != ITEMS:
            raise ZeroDivisionError
        return loss

    ms.set_context(mode=mode)
    before = state_of(model)
    if raises:
        with pytest.raises(ZeroDivisionError):
            verify(model, loss_fn, (X, Y), 2)
    else:
        assert not verify(model, loss_fn, (X, Y), 2).equivalent
    assert state_of(model) == before
    ms.set_context(mode=ms.PYNATIVE_MODE)
    layer = nn.LayerNorm((4,))
    _, gradients = ms.value_and_grad(
        lambda: (layer(X) ** 3).sum(), None, layer.trainable_params()
    )()
    assert all(np.isfinite(gradient.asnumpy()).all() for gradient in gradients)
