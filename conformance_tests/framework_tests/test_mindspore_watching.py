"""Watching MindSpore: a loop in Python in both modes, a callback of `Model.train`, and
the state in one line.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model, RunContext
from mindspore.train.callback import _InternalCallbackParam

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    X,
    Y,
    make_net,
    pynative_after,
    set_mode,
)
from gradaccum import ArgumentTypeError, UsageError
from gradaccum_mindspore import (
    FlushAtEpochEnd,
    TrainOneStepCell,
    WatchWindows,
    load_checkpoint_into,
)

__all__ = ["pynative_after"]


def made(**options):
    """A network with its loss, and the wrapped optimizer."""
    net = make_net()
    return nn.WithLossCell(net, nn.MSELoss()), gradaccum.wrap(
        nn.SGD(net.trainable_params(), 0.1), **{"steps": 2, **options}
    )


def test_model_train_hears_every_window():
    """24 items by 5: micro-batches of 5, 5, 5, 5 and 4, so windows of 2, 2 and 1 in
    each epoch.
    """
    heard = []
    with_loss, optimizer = made()
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(5)
    callbacks = [WatchWindows(optimizer, heard.append), FlushAtEpochEnd(optimizer)]
    Model(TrainOneStepCell(with_loss, optimizer)).train(
        2, data, callbacks=callbacks, dataset_sink_mode=False
    )
    assert [w.optimizer_step for w in heard] == [1, 2, 3, 4, 5, 6]
    assert [w.micro_batches for w in heard] == [2, 2, 1] * 2
    assert [w.weight for w in heard] == [10, 10, 4] * 2
    assert all(w.applied and w.grad_norm > 0 for w in heard)


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_model_train_of_a_bare_network_hears_every_window(mode):
    """`Model` compiles its own cell whole. 24 items by 3: windows of 3, 3 and 2, and
    one of 3 that goes on without a flush.
    """
    set_mode(mode)
    heard, net = [], make_net()
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=3)
    moved = []
    optimizer.on_update(lambda: moved.append(optimizer.result.optimizer_step))
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(3)
    model = Model(net, nn.MSELoss(), optimizer)
    for callbacks in ([FlushAtEpochEnd(optimizer)], []):
        model.train(
            1,
            data,
            callbacks=[WatchWindows(optimizer, heard.append), *callbacks],
            dataset_sink_mode=False,
        )
    assert [(w.optimizer_step, w.micro_batches) for w in heard] == [
        (1, 3),
        (2, 3),
        (3, 2),
        (4, 3),
        (5, 3),
    ]
    assert moved == [1, 2, 3, 4, 5]
    optimizer.flush()
    assert len(heard) == 5, "the callback listens no more"
    assert moved == [1, 2, 3, 4, 5, 6]


AVERAGE = 0.5


class Average:
    """Of the parameters, over the updates."""

    def __init__(self, optimizer):
        self.parameters = optimizer.parameters
        self.arrays = [p.asnumpy().copy() for p in self.parameters]

    def __call__(self, window):
        if window.applied:
            self.arrays = [
                AVERAGE * a + (1 - AVERAGE) * p.asnumpy()
                for a, p in zip(self.arrays, self.parameters, strict=True)
            ]


@pytest.mark.parametrize(
    "how", ["loop", "graph loop", "cell", "graph cell", "jit", "jitted cell"]
)
def test_a_listener_of_the_optimizer_hears_every_update(how):
    """Windows of 2, 2, 1, 2 and 1 micro-batches, an empty flush, a discard. An average
    of the weights equals that of the large batches.
    """
    set_mode("graph" if "graph" in how else "pynative")
    with_loss, optimizer = made()
    average, heard = Average(optimizer), []
    optimizer.add_listener(average)
    handle = optimizer.add_listener(heard.append)
    gradient, cell = (
        ms.value_and_grad(with_loss, None, optimizer.parameters),
        TrainOneStepCell(with_loss, optimizer),
    )

    def loop(x, y):
        loss, gradients = gradient(x, y)
        optimizer(gradients, 4, loss)

    @ms.jit
    def jitted(x, y):
        loss, gradients = gradient(x, y)
        optimizer(gradients, Tensor(4.0, ms.float32), loss)
        return loss

    steps = {
        "loop": loop,
        "graph loop": loop,
        "jit": jitted,
        "jitted cell": ms.jit(cell.construct),
    }
    step = steps.get(how, cell)
    large, bare = made(steps=1)
    expected, large_cell = Average(bare), TrainOneStepCell(large, bare)
    for first, last in ((0, 8), (8, 16), (16, 20), (0, 8), (20, 24)):
        for start in range(first, last, 4):
            step(Tensor(X[start : start + 4]), Tensor(Y[start : start + 4]))
            if "jit" in how:
                assert optimizer.result.micro_step in (0, 1)
        optimizer.flush()
        large_cell(Tensor(X[first:last]), Tensor(Y[first:last]))
        expected(bare.result)
        assert [w.optimizer_step for w in heard] == list(
            range(1, bare.result.optimizer_step + 1)
        )
        for a, b in zip(average.arrays, expected.arrays, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    if "jit" not in how:
        assert [w.micro_batches for w in heard] == [2, 2, 1, 2, 1]
        assert how != "loop" or [w.weight for w in heard] == [8, 8, 4, 8, 4]
    step(Tensor(X[:4]), Tensor(Y[:4]))
    optimizer.discard()
    handle.remove()
    step(Tensor(X[:4]), Tensor(Y[:4]))
    optimizer.flush()
    assert len(heard) == 5


def test_windows_that_no_listener_could_hear_of_are_named():
    """Nobody looked between two windows of compiled code. A checkpoint's windows closed
    in another run.
    """
    with_loss, optimizer = made()
    heard, cell = [], TrainOneStepCell(with_loss, optimizer)
    step = ms.jit(cell.construct)
    optimizer.add_listener(heard.append)
    for _ in range(4):
        step(Tensor(X[:4]), Tensor(Y[:4]))
    with pytest.raises(
        UsageError,
        match=r"listeners: expected optimizer\.result to be read.*got 2 windows",
    ):
        optimizer.flush()
    saved = {p.name: Tensor(p.asnumpy().copy(), p.dtype) for p in cell.get_parameters()}
    other_loss, other = made()
    other_cell = TrainOneStepCell(other_loss, other)
    other.add_listener(heard.append)
    load_checkpoint_into(other_cell, saved)
    for _ in range(2):
        other_cell(Tensor(X[:4]), Tensor(Y[:4]))
    assert [w.optimizer_step for w in heard] == [3]


def test_a_window_before_an_empty_flush_is_heard():
    """The flush that follows a full window leaves a result without it; the counters
    still tell.
    """
    heard = []
    with_loss, optimizer = made(skip_norm=1e-9)
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(12)
    callbacks = [WatchWindows(optimizer, heard.append), FlushAtEpochEnd(optimizer)]
    Model(TrainOneStepCell(with_loss, optimizer)).train(
        2, data, callbacks=callbacks, dataset_sink_mode=False
    )
    assert [
        (w.applied, w.skipped, w.optimizer_step, w.micro_batches) for w in heard
    ] == [(False, True, 0, 2)] * 2


def test_what_cannot_be_heard_is_refused():
    _, optimizer = made()
    for listen in (
        optimizer.add_listener,
        lambda listener: WatchWindows(optimizer, listener),
    ):
        with pytest.raises(ArgumentTypeError, match="a function of one ClosedWindow"):
            listen(3)
    callback = WatchWindows(optimizer, print)
    # on a CPU MindSpore turns the sink off
    sink = RunContext(
        _InternalCallbackParam(list_callback=[callback], dataset_sink_mode=True)
    )
    with pytest.raises(UsageError, match="dataset_sink_mode=False"):
        callback.on_train_begin(sink)
    with pytest.raises(ArgumentTypeError, match="a wrapped optimizer"):
        WatchWindows(optimizer.inner, print)


def test_repr_is_one_line():
    with_loss, optimizer = made(steps=[(0, 1), (1, 3)], clip_norm=1.0, loss_scale=64.0)
    gradient = ms.value_and_grad(
        lambda x, y: optimizer.scale(with_loss(x, y)), None, optimizer.parameters
    )
    line = (
        "AccumulatingOptimizer(SGD, steps=((0, 1), (1, 3)), clip_norm=1.0,"
        " loss_scale=static | micro-batch {}, scale 64)"
    )
    assert repr(optimizer) == line.format("0 of 1, update 0")
    for _ in range(2):
        optimizer(gradient(Tensor(X), Tensor(Y))[1])
    assert str(optimizer) == line.format("1 of 3, update 1")
    assert "SGD" in repr(optimizer.inner)
