"""Watching MindSpore: a loop in Python in both modes, a callback of `Model.train`, and the state in one line."""

import math

import pytest

pytest.importorskip("mindspore", reason="needs MindSpore")

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model, RunContext
from mindspore.train.callback import _InternalCallbackParam

import gradaccum
from conformance_tests.framework_tests.mindspore_common import X, Y, make_net, pynative_after, set_mode
from gradaccum import ArgumentTypeError, UsageError
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell, WatchWindows

__all__ = ["pynative_after"]


def made(**options):
    """A network with its loss, and the wrapped optimizer."""
    net = make_net()
    return nn.WithLossCell(net, nn.MSELoss()), gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), **{"steps": 2, **options})


def test_a_loop_hears_the_large_batch():
    heard = []
    with_loss, optimizer = made()
    watch, gradient = gradaccum.Watch(heard.append), ms.value_and_grad(with_loss, None, optimizer.parameters)
    large = float(with_loss(Tensor(X[:20]), Tensor(Y[:20])))
    _, gradients = gradient(Tensor(X[:20]), Tensor(Y[:20]))
    norm = math.sqrt(sum(float((g.asnumpy() ** 2).sum()) for g in gradients))
    for rows in (slice(0, 12), slice(12, 20)):
        assert not heard
        loss, gradients = gradient(Tensor(X[rows]), Tensor(Y[rows]))
        optimizer(gradients, rows.stop - rows.start)
        watch(optimizer.result, loss=loss, weight=rows.stop - rows.start)
    (window,) = heard
    assert (window.optimizer_step, window.applied, window.weight, window.micro_batches) == (1, True, 20, 2)
    np.testing.assert_allclose((window.loss, window.grad_norm), (large, norm), rtol=1e-6)
    optimizer(gradients)
    watch(optimizer.result)
    optimizer.discard()
    watch(optimizer.result)
    assert len(heard) == 1
    assert all(type(value) in (int, float, bool) for value in window)


def test_compiled_steps_are_watched_from_python():
    set_mode("graph")
    heard = []
    with_loss, optimizer = made()
    step, watch = TrainOneStepCell(with_loss, optimizer), gradaccum.Watch(heard.append)
    for rows in (slice(0, 12), slice(12, 24)):
        loss = step(Tensor(X[rows]), Tensor(Y[rows]))
        watch(optimizer.result, loss=loss, weight=12)
    assert [(w.applied, w.weight, w.micro_batches) for w in heard] == [(True, 24, 2)]


def test_model_train_hears_every_window():
    """24 items by 5: micro-batches of 5, 5, 5, 5 and 4, so windows of 2, 2 and 1 in each epoch."""
    heard = []
    with_loss, optimizer = made()
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(5)
    callbacks = [WatchWindows(optimizer, heard.append), FlushAtEpochEnd(optimizer)]
    Model(TrainOneStepCell(with_loss, optimizer)).train(2, data, callbacks=callbacks, dataset_sink_mode=False)
    assert [w.optimizer_step for w in heard] == [1, 2, 3, 4, 5, 6]
    assert [w.micro_batches for w in heard] == [2, 2, 1] * 2
    assert all(w.applied and w.grad_norm > 0 and math.isnan(w.weight) for w in heard)


def test_a_window_before_an_empty_flush_is_heard():
    """The flush that follows a full window leaves a result without it; the counters still tell."""
    heard = []
    with_loss, optimizer = made(skip_norm=1e-9)
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(12)
    callbacks = [WatchWindows(optimizer, heard.append), FlushAtEpochEnd(optimizer)]
    Model(TrainOneStepCell(with_loss, optimizer)).train(2, data, callbacks=callbacks, dataset_sink_mode=False)
    assert [(w.applied, w.skipped, w.optimizer_step, w.micro_batches) for w in heard] == [(False, True, 0, 2)] * 2


def test_what_cannot_be_heard_is_refused():
    with_loss, optimizer = made()
    with pytest.raises(UsageError, match=r"add_listener: .*gradaccum\.Watch.*WatchWindows"):
        optimizer.add_listener(print)
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(12)
    callbacks = [FlushAtEpochEnd(optimizer), WatchWindows(optimizer, print)]
    with pytest.raises(UsageError, match="WatchWindows before FlushAtEpochEnd"):
        Model(TrainOneStepCell(with_loss, optimizer)).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    callback = WatchWindows(optimizer, print)
    sink = RunContext(_InternalCallbackParam(list_callback=[callback], dataset_sink_mode=True))  # on a CPU MindSpore turns the sink off
    with pytest.raises(UsageError, match="dataset_sink_mode=False"):
        callback.on_train_begin(sink)
    with pytest.raises(ArgumentTypeError, match="the wrapped optimizer"):
        WatchWindows(optimizer.inner, print)


def test_repr_is_one_line():
    with_loss, optimizer = made(steps=[(0, 1), (1, 3)], clip_norm=1.0, loss_scale=64.0)
    gradient = ms.value_and_grad(lambda x, y: optimizer.scale(with_loss(x, y)), None, optimizer.parameters)
    line = "AccumulatingOptimizer(SGD, steps=((0, 1), (1, 3)), clip_norm=1.0, loss_scale=static | micro-batch {}, scale 64)"
    assert repr(optimizer) == line.format("0 of 1, update 0")
    for _ in range(2):
        optimizer(gradient(Tensor(X), Tensor(Y))[1])
    assert str(optimizer) == line.format("1 of 3, update 1")
    assert "SGD" in repr(optimizer.inner)
