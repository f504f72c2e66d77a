"""Watching MindSpore: a listener of the optimizer in every mode, and a callback of
`Model.train`.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

import gradaccum
from gradaccum import UsageError
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell

from .mindspore_common import (
    X,
    Y,
    by_loader,
    entries_of,
    make_net,
    pynative_after,  # noqa: F401
    set_mode,
)


def made(**options):
    """A training cell; its micro-batches have four items."""
    net = make_net()
    inner = nn.SGD(net.trainable_params(), 0.1)
    optimizer = gradaccum.wrap(inner, **{"steps": 2, **options})
    return TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)


def rows(first, last):
    return Tensor(X[first:last]), Tensor(Y[first:last])


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_model_train_of_a_bare_network_hears_every_window(mode):
    """`Model` compiles its own cell whole. 24 items by 3: windows of 3, 3 and 2."""
    set_mode(mode)
    heard = []
    moved = []
    weights = []
    net = make_net()
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=3)
    optimizer.on_update(lambda: moved.append(optimizer.result.optimizer_step))
    optimizer.on_update(lambda: weights.append(net.weight.asnumpy().copy()))
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(3)
    optimizer.add_listener(heard.append)
    model = Model(net, nn.MSELoss(), optimizer)
    model.train(1, data, callbacks=[FlushAtEpochEnd(optimizer)])
    assert [window.optimizer_step for window in heard] == moved == [1, 2, 3]
    assert [window.micro_batches for window in heard] == [3, 3, 2]
    np.testing.assert_array_equal(weights[-1], net.weight.asnumpy())
    assert np.abs(weights[-1] - weights[0]).max() > 1e-4


@by_loader
def test_windows_that_no_listener_could_hear_of_are_named(load):
    """Nobody looked between two windows of compiled code. A checkpoint's windows closed
    in another run.
    """
    heard = []
    cell = made()
    other = made()
    step = ms.jit(cell.construct)
    cell.optimizer.add_listener(heard.append)
    for _ in range(4):
        step(*rows(0, 4))
    with pytest.raises(
        UsageError,
        match=r"listeners: expected optimizer\.result to be read.*got 2 windows",
    ):
        cell.optimizer.flush()
    saved = entries_of(cell)
    other.optimizer.add_listener(heard.append)
    load(other, saved)
    for _ in range(2):
        other(*rows(0, 4))
    assert [w.optimizer_step for w in heard] == [3]


def test_a_window_before_an_empty_flush_is_heard():
    """The flush that follows a full window leaves a result without it; the counters
    still tell.
    """
    heard = []
    cell = made(skip_norm=1e-9)
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(12)
    cell.optimizer.add_listener(heard.append)
    Model(cell).train(2, data, callbacks=[FlushAtEpochEnd(cell.optimizer)])
    assert [(w.applied, w.skipped, w.micro_batches) for w in heard] == [
        (False, True, 2)
    ] * 2
