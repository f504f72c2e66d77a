"""The wrapped optimizer in `mindspore.train.Model`, with its callbacks and an epoch's
short tail.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import CheckpointConfig, LambdaCallback, Model, ModelCheckpoint

import gradaccum
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell, load_checkpoint_into

from .mindspore_common import (
    X,
    Y,
    make_net,
    needs_mindspore,
    pynative_after,  # noqa: F401
    set_mode,
)

MODES = ("pynative", "graph")


def cell_of(net, loss, **options):
    inner = nn.SGD(net.trainable_params(), 1.0)
    optimizer = gradaccum.wrap(inner, steps=2, **options)
    return TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)


def line():
    return nn.Dense(3, 1, weight_init="ones", has_bias=False)


@needs_mindspore("2.10", "MindSpore 2.7 raises a TypeError of its own")
def test_sparse_gradient_is_refused():
    set_mode("graph")
    cell = cell_of(nn.EmbeddingLookup(5, 2, sparse=True), nn.MSELoss())
    with pytest.raises(gradaccum.GradientError, match="sparse=False"):
        cell(ops.zeros(3, ms.int32), ops.zeros((3, 2)))


class LossAndOutputs(nn.Cell):
    def construct(self, outputs, y):
        return outputs.mean(), outputs


@pytest.mark.parametrize("mode", MODES)
def test_loss_with_outputs_is_refused(mode):
    set_mode(mode)
    cell = cell_of(line(), LossAndOutputs(), loss_scale=8.0)
    with pytest.raises(gradaccum.ArgumentTypeError, match="sequence of 2 values"):
        cell(ops.ones((4, 3)), ops.zeros((4, 1)))


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_items_are_no_mean(mode):
    """MindSpore differentiates their sum: a mean of sums would be a fraction of the
    large batch's.
    """
    set_mode(mode)
    each = nn.MSELoss(reduction="none")
    rows = (ops.ones((4, 3)), ops.zeros((4, 1)))
    with pytest.raises(
        gradaccum.ArgumentValueError,
        match=r"network: expected a scalar loss.*losses of shape \(4, 1\)",
    ):
        cell_of(line(), each)(*rows)
    net = line()
    cell = cell_of(net, each, reduction="sum_per_item")
    for _ in range(2):
        cell(*rows)
    np.testing.assert_allclose(net.weight.asnumpy(), 1 - 2 * 3.0, rtol=1e-6)


def make(mode):
    set_mode(mode)
    net = make_net()
    optimizer = gradaccum.wrap(nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=4)
    return Model(net, nn.MSELoss(), optimizer), net, optimizer


def data():
    """Six micro-batches: a window of four and a tail of two."""
    return NumpySlicesDataset((X[:18], Y[:18]), ["x", "y"], shuffle=False).batch(3)


def saver(directory):
    return ModelCheckpoint(
        "run", str(directory), CheckpointConfig(save_checkpoint_steps=6)
    )


def everything(model):
    return {
        name: p.asnumpy().tolist()
        for name, p in model.train_network.parameters_dict().items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_holds_the_tail(mode, tmp_path):
    """A run that is resumed from the checkpoint equals the uninterrupted run."""
    models = [make(mode) for _ in range(2)]
    (whole, _, optimizer), (resumed, _, after) = models
    callbacks = [FlushAtEpochEnd(optimizer), saver(tmp_path)]
    whole.train(1, data(), callbacks=callbacks)
    saved = ms.load_checkpoint(str(tmp_path / "run-1_6.ckpt"))
    assert saved["gradaccum.optimizer_step"].asnumpy() == 2
    load_checkpoint_into(resumed.train_network, saved)
    for model, _, wrapped in models:
        model.train(1, data(), callbacks=[FlushAtEpochEnd(wrapped)])
    np.testing.assert_equal(everything(resumed), everything(whole))
    assert after.result.optimizer_step == 4


@pytest.mark.parametrize("items", [16, 14])
def test_callback_behind_sees_every_update(items):
    """Eight micro-batches are two full windows: the epoch's end finds an empty one. Of
    seven the flush closes the second window.
    """
    model, _, optimizer = make("pynative")
    seen = []
    looking = LambdaCallback(
        on_train_step_end=lambda run_context: seen.append(optimizer.result.applied)
    )
    rows = NumpySlicesDataset((X[:items], Y[:items]), ["x", "y"], shuffle=False)
    # On a CPU no data goes through a sink, and `sink_size` cuts no epoch.
    model.train(
        3,
        rows.batch(2),
        callbacks=[FlushAtEpochEnd(optimizer), looking],
        dataset_sink_mode=True,
        sink_size=3,
    )
    between = [False] * (items // 2 - 5)
    assert seen == ([False] * 3 + [True] + between + [True]) * 3


def test_stopped_epoch_is_flushed():
    model, _, optimizer = make("pynative")
    stopping = LambdaCallback(on_train_step_end=lambda run: run.request_stop())
    model.train(2, data(), callbacks=[FlushAtEpochEnd(optimizer), stopping])
    assert optimizer.result.optimizer_step == 1
    assert (optimizer.result.micro_step, optimizer.result.applied) == (0, True)


def test_flush_after_the_saver_is_refused(tmp_path):
    model, _, optimizer = make("pynative")
    callbacks = [saver(tmp_path), FlushAtEpochEnd(optimizer)]
    with pytest.raises(
        gradaccum.UsageError, match=r"callbacks.*before ModelCheckpoint"
    ):
        model.train(1, data(), callbacks=callbacks)
