"""`gradaccum_mindspore.TrainOneStepCell`, alone and compiled: the cell scales the loss
and weighs the micro-batch.
"""

from functools import cache

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from numpy.testing import assert_allclose

import gradaccum
from gradaccum_mindspore import TrainOneStepCell

from .mindspore_common import (
    WEIGHT,
    X,
    Y,
    by_mode,
    make_net,
    pynative_after,  # noqa: F401
    set_mode,
)

SCALE = gradaccum.DynamicLossScale(1024.0, growth_interval=1)


@cache
def large_batches():
    """The weight after two plain updates; in PyNative, the truth for every mode."""
    set_mode("pynative")
    net = make_net()
    inner = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), inner)
    for first in (0, 12):
        step(*rows(first, 12))
    return net.weight.asnumpy()


def rows(first, size):
    return Tensor(X[first : first + size]), Tensor(Y[first : first + size])


def made(mode, **options):
    """A network with its loss, and the wrapped optimizer."""
    set_mode(mode)
    net = make_net()
    inner = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    return net, nn.WithLossCell(net, nn.MSELoss()), gradaccum.wrap(inner, **options)


def called(mode, cell):
    return ms.jit(cell.construct) if mode == "jit" else cell


def require_large_batches(net):
    expected = large_batches()
    assert_allclose(net.weight.asnumpy(), expected, rtol=0, atol=3e-6)
    assert np.abs(expected - WEIGHT).max() > 1e-3


def first_of(x, y):
    return ops.abs(x[0, 0])


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(first_of, np.abs(X[[0, 2], 0]).sum()), (None, 2.0)],
    ids=["a function", "none"],
)
@by_mode
def test_weights_of_the_users(mode, weight, expected):
    """With None each micro-batch weighs 1."""
    _, with_loss, optimizer = made(mode, steps=None)
    step = called(mode, TrainOneStepCell(with_loss, optimizer, weight))
    for first in (0, 2):
        step(*rows(first, 2))
    assert_allclose(optimizer.storage.weight.asnumpy(), expected, rtol=1e-6)


@by_mode
def test_unscaled_loss_is_refused(mode):
    """By MindSpore's cell: the first micro-batch raises before it adds anything, and so
    does each further try. To print ``result`` is not to ask for the scale.
    """
    _, with_loss, optimizer = made(mode, steps=2, loss_scale=SCALE)
    step = called(mode, nn.TrainOneStepCell(with_loss, optimizer))
    for _ in range(2):
        assert optimizer.result.loss_scale == 1024.0
        with pytest.raises(
            gradaccum.UsageError,
            match=r"loss scale.*TrainOneStepCell.*scale\(loss\).*sens",
        ):
            step(*rows(0, 3))
    assert optimizer.storage.micro_step.asnumpy() == 0


@by_mode
def test_current_scale_is_passed_as_sens(mode):
    net, with_loss, optimizer = made(mode, steps=2, loss_scale=SCALE)
    with_sens = ops.GradOperation(get_by_list=True, sens_param=True)(
        with_loss, optimizer.parameters
    )

    def step(x, y):
        return optimizer(with_sens(x, y, optimizer.loss_scale))

    step = ms.jit(step) if mode == "jit" else step
    for first in range(0, 24, 6):
        step(*rows(first, 6))
    assert float(optimizer.loss_scale) == 4096.0
    require_large_batches(net)


def test_cell_holds_normalization_statistics():
    """A saved optimizer would not."""
    net = nn.SequentialCell(nn.BatchNorm1d(4), make_net())
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=2)
    cell = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    kept = {id(parameter) for parameter in cell.get_parameters()}
    assert {id(parameter) for parameter in net.get_parameters()} <= kept
