"""The wrapped optimizer in `mindspore.train.Model`, with its callbacks and an epoch's
short tail.
"""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    BIAS,
    WEIGHT,
    X,
    Y,
    make_net,
    pynative_after,  # noqa: F401
    set_mode,
)
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell, load_checkpoint_into

MODES = ("pynative", "graph")


def logged_warnings(monkeypatch):
    warnings = []
    monkeypatch.setattr(
        ms.log, "warning", lambda message, *rest: warnings.append(message)
    )
    return warnings


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 1e6, "loss_scale": 4.0}],
    ids=["MindSpore's cell", "ours"],
)
@pytest.mark.parametrize("mode", MODES)
def test_epochs_tail_is_an_update(mode, options, monkeypatch):
    """In a cell of MindSpore's and in ours, without a warning: MindSpore warns at each
    call of something that a later version drops.
    """
    warnings = logged_warnings(monkeypatch)
    set_mode(mode)
    net = make_net()
    optimizer = gradaccum.wrap(
        nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=4, **options
    )
    ours = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    model = Model(ours) if options else Model(net, nn.MSELoss(), optimizer)
    model.train(
        2, data(), callbacks=[FlushAtEpochEnd(optimizer)], dataset_sink_mode=False
    )
    assert not warnings
    assert (optimizer.result.optimizer_step, optimizer.result.micro_step) == (4, 0)
    set_mode("pynative")  # the truth for both modes
    large = make_net()
    inner = nn.Momentum(large.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(large, nn.MSELoss()), inner)
    for first, last in ((0, 12), (12, 18)) * 2:
        step(Tensor(X[first:last]), Tensor(Y[first:last]))
    np.testing.assert_allclose(
        net.weight.asnumpy(), large.weight.asnumpy(), rtol=0, atol=3e-6
    )


def update_and_wait(optimizer):
    optimizer((Tensor(WEIGHT), Tensor(BIAS)))
    optimizer.parameters[0].asnumpy()


def test_lamb_has_no_cpu_kernel():
    """A declared gap of MindSpore. If this test fails, the gap is closed: say so in the
    documentation.
    """
    net = make_net()
    if ms.get_context("device_target") != "CPU":
        pytest.skip("a gap of the CPU only")
    optimizer = gradaccum.wrap(nn.Lamb(net.trainable_params(), 0.1), steps=1)
    with pytest.raises((RuntimeError, TypeError)):
        update_and_wait(optimizer)


ROWS = np.random.RandomState(0).randn(8, 3).astype(np.float32) + 5


class Clipping(TrainOneStepCell):
    """A user's step: it counts its calls, and clips each micro-batch."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.calls = ms.Parameter(
            Tensor(0.0, ms.float32), name="calls", requires_grad=False
        )

    def construct(self, x, y):
        ops.assign_add(self.calls, Tensor(1.0, ms.float32))
        loss, gradients, weight = self.differentiated(x, y)
        gradients = ops.clip_by_global_norm(gradients, 0.01)
        return ops.depend(loss, self.optimizer(gradients, weight, loss))


@pytest.mark.parametrize("mode", MODES)
def test_construct_of_a_subclass_runs(mode):
    set_mode(mode)
    net = nn.Dense(3, 1, weight_init="ones", has_bias=False)
    cell = Clipping(
        nn.WithLossCell(net, nn.MSELoss()),
        gradaccum.wrap(nn.SGD(net.trainable_params(), 1.0), steps=2),
    )
    for _ in range(2):
        cell(ops.ones((4, 3)), ops.zeros((4, 1)))
    assert cell.calls.asnumpy() == 2
    np.testing.assert_allclose(
        np.linalg.norm(net.weight.asnumpy() - 1), 0.01, rtol=1e-5
    )


class Normed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm, self.last = (
            nn.BatchNorm1d(3),
            nn.Dense(3, 2, weight_init="ones", has_bias=False),
        )

    def construct(self, x):
        return self.last(self.norm(x))


@pytest.mark.parametrize("mode", MODES)
def test_frozen_layer_stays_frozen(mode):
    """Its statistics do not move, and it normalizes by them: as in MindSpore's own
    cell, after an evaluation too.
    """
    set_mode(mode)
    net = Normed()
    cell = TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()),
        gradaccum.wrap(nn.SGD(net.trainable_params(), 0.0), steps=2),
    )
    losses = []
    for _ in range(2):
        cell.set_train()
        net.norm.set_train(False)
        losses += [
            float(cell(Tensor(ROWS[i : i + 4]), Tensor(ROWS[i : i + 4, :2])).asnumpy())
            for i in (0, 4)
        ]
        assert not net.norm.training
        assert cell.training
        cell.set_train(False)
    assert not net.norm.moving_mean.asnumpy().any()
    wanted = [
        (
            (
                ROWS[i : i + 4].sum(1, keepdims=True) / np.sqrt(1 + 1e-5)
                - ROWS[i : i + 4, :2]
            )
            ** 2
        ).mean()
        for i in (0, 4)
    ]
    np.testing.assert_allclose(losses, wanted * 2, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_items_are_no_mean(mode):
    """MindSpore differentiates their sum: a mean of sums would be a fraction of the
    large batch's.
    """
    set_mode(mode)

    def cell(reduction):
        net = nn.Dense(3, 1, weight_init="ones", has_bias=False)
        optimizer = gradaccum.wrap(
            nn.SGD(net.trainable_params(), 1.0), steps=2, reduction=reduction
        )
        return net, TrainOneStepCell(
            nn.WithLossCell(net, nn.MSELoss(reduction="none")), optimizer
        )

    _, means = cell("mean")
    with pytest.raises(
        gradaccum.ArgumentValueError,
        match=r"network: expected one loss.*losses of shape \(4, 1\)",
    ):
        means(ops.ones((4, 3)), ops.zeros((4, 1)))
    net, items = cell("sum_per_item")
    for _ in range(2):
        items(ops.ones((4, 3)), ops.zeros((4, 1)))
    np.testing.assert_allclose(
        net.weight.asnumpy(), np.full((1, 3), 1 - 2 * 3.0), rtol=1e-6
    )


def make(mode):
    set_mode(mode)
    net = make_net()
    optimizer = gradaccum.wrap(nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=4)
    return (
        Model(net, nn.MSELoss(), optimizer, metrics={"loss": nn.Loss()}),
        net,
        optimizer,
    )


def data():
    """Six micro-batches: a window of four and a tail of two."""
    return NumpySlicesDataset((X[:18], Y[:18]), ["x", "y"], shuffle=False).batch(3)


def saver(directory, steps=6):
    return ModelCheckpoint(
        "run", str(directory), CheckpointConfig(save_checkpoint_steps=steps)
    )


def everything(model):
    return {
        name: p.asnumpy().tolist()
        for name, p in model.train_network.parameters_dict().items()
    }


@pytest.mark.parametrize(
    "sink",
    [pytest.param(False, id="", marks=pytest.mark.deep), pytest.param(True, id="sink")],
)
@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_holds_the_tail(mode, sink, tmp_path):
    """A run that is resumed from the checkpoint equals the uninterrupted run."""
    whole, _, optimizer = make(mode)
    callbacks = [FlushAtEpochEnd(optimizer), saver(tmp_path)]
    whole.train(1, data(), callbacks=callbacks, dataset_sink_mode=sink)
    saved = ms.load_checkpoint(str(tmp_path / "run-1_6.ckpt"))
    assert (
        saved["gradaccum.optimizer_step"].asnumpy(),
        saved["gradaccum.micro_step"].asnumpy(),
    ) == (2, 0)
    resumed, _, after = make(mode)
    load_checkpoint_into(resumed.train_network, saved)
    np.testing.assert_equal(everything(resumed), everything(whole))
    for model, flush in (
        (whole, FlushAtEpochEnd(optimizer)),
        (resumed, FlushAtEpochEnd(after)),
    ):
        model.train(1, data(), callbacks=[flush], dataset_sink_mode=sink)
    np.testing.assert_equal(everything(resumed), everything(whole))
    assert after.result.optimizer_step == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("items", [16, 14])
def test_callback_behind_sees_every_update(mode, items):
    """Eight micro-batches are two full windows: the epoch's end finds an empty one. Of
    seven the flush closes the second window.
    """
    model, _, optimizer = make(mode)
    seen = []

    class Seeing(Callback):
        def on_train_step_end(self, run_context):
            seen.append(optimizer.result.applied)

    epoch = NumpySlicesDataset((X[:items], Y[:items]), ["x", "y"], shuffle=False).batch(
        2
    )
    model.train(
        3,
        epoch,
        callbacks=[FlushAtEpochEnd(optimizer), Seeing()],
        dataset_sink_mode=False,
    )
    steps = items // 2
    assert seen == ([False] * 3 + [True] + [False] * (steps - 5) + [True]) * 3
    assert optimizer.result.optimizer_step == 6


@pytest.mark.parametrize("mode", MODES)
def test_fit_validates_the_flushed_model(mode):
    model, net, optimizer = make(mode)
    seen = []

    class Metrics(Callback):
        def on_train_epoch_end(self, run_context):
            seen.append(run_context.original_args().eval_results["loss"])

    model.fit(
        1,
        data(),
        data(),
        callbacks=[FlushAtEpochEnd(optimizer), Metrics()],
        dataset_sink_mode=False,
    )
    rows = [
        np.square(
            net(Tensor(X[first : first + 3])).asnumpy() - Y[first : first + 3]
        ).mean()
        for first in range(0, 18, 3)
    ]
    assert seen == [pytest.approx(np.mean(rows), rel=1e-5)]


class Stopping(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 2:
            run_context.request_stop()


def test_stopped_epoch_is_flushed():
    model, _, optimizer = make("pynative")
    model.train(
        2,
        data(),
        callbacks=[FlushAtEpochEnd(optimizer), Stopping()],
        dataset_sink_mode=False,
    )
    assert (
        optimizer.result.optimizer_step,
        optimizer.result.micro_step,
        optimizer.result.applied,
    ) == (1, 0, True)


def test_flush_after_the_saver_is_refused(tmp_path):
    model, _, optimizer = make("pynative")
    with pytest.raises(
        gradaccum.UsageError, match=r"callbacks.*before ModelCheckpoint"
    ):
        model.train(
            1,
            data(),
            callbacks=[saver(tmp_path), FlushAtEpochEnd(optimizer)],
            dataset_sink_mode=False,
        )
    assert optimizer.result.micro_step == 0


def test_sinking_many_steps_flushes_once():
    """MindSpore's run context in graph mode on a device with a data queue: one step end
    per `sink_size` steps.
    """
    optimizer = make("pynative")[2]
    optimizer((Tensor(WEIGHT), Tensor(BIAS)))
    for step, open_micro_batches in ((3, 1), (6, 0)):
        run = SimpleNamespace(
            cur_step_num=step, batch_num=6, train_dataset_element=None
        )
        FlushAtEpochEnd(optimizer).on_train_step_end(
            SimpleNamespace(original_args=lambda run=run: run)
        )
        assert optimizer.result.micro_step == open_micro_batches
