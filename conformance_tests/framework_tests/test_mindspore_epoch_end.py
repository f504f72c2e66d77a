"""`FlushAtEpochEnd`: the epoch's last, short window is applied before validation and saving."""

from types import SimpleNamespace

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402
from mindspore.dataset import NumpySlicesDataset  # noqa: E402
from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import BIAS, WEIGHT, X, Y, make_net, pynative_after, set_mode  # noqa: E402, F401
from gradaccum_mindspore import FlushAtEpochEnd, load_checkpoint_into  # noqa: E402

MODES = ("pynative", "graph")


def make(mode):
    set_mode(mode)
    net = make_net()
    optimizer = gradaccum.wrap(nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=4)
    return Model(net, nn.MSELoss(), optimizer, metrics={"loss": nn.Loss()}), net, optimizer


def data():
    """Six micro-batches: a window of four and a tail of two."""
    return NumpySlicesDataset((X[:18], Y[:18]), ["x", "y"], shuffle=False).batch(3)


def saver(directory, steps=6):
    return ModelCheckpoint("run", str(directory), CheckpointConfig(save_checkpoint_steps=steps))


def everything(model):
    return {name: p.asnumpy().tolist() for name, p in model.train_network.parameters_dict().items()}


@pytest.mark.parametrize("sink", [pytest.param(False, id="", marks=pytest.mark.deep), pytest.param(True, id="sink")])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_holds_the_tail(mode, sink, tmp_path):
    """A run that is resumed from the checkpoint equals the uninterrupted run."""
    whole, _, optimizer = make(mode)
    callbacks = [FlushAtEpochEnd(optimizer), saver(tmp_path)]
    whole.train(1, data(), callbacks=callbacks, dataset_sink_mode=sink)
    saved = ms.load_checkpoint(str(tmp_path / "run-1_6.ckpt"))
    assert (saved["gradaccum.optimizer_step"].asnumpy(), saved["gradaccum.micro_step"].asnumpy()) == (2, 0)
    resumed, _, after = make(mode)
    load_checkpoint_into(resumed.train_network, saved)
    np.testing.assert_equal(everything(resumed), everything(whole))
    for model, flush in ((whole, FlushAtEpochEnd(optimizer)), (resumed, FlushAtEpochEnd(after))):
        model.train(1, data(), callbacks=[flush], dataset_sink_mode=sink)
    np.testing.assert_equal(everything(resumed), everything(whole))
    assert after.result.optimizer_step == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("items", [16, 14])
def test_callback_behind_sees_every_update(mode, items):
    """Eight micro-batches are two full windows: the epoch's end finds an empty one. Of seven the flush closes the second window."""
    model, _, optimizer = make(mode)
    seen = []

    class Seeing(Callback):
        def on_train_step_end(self, run_context):
            seen.append(optimizer.result.applied)

    epoch = NumpySlicesDataset((X[:items], Y[:items]), ["x", "y"], shuffle=False).batch(2)
    model.train(3, epoch, callbacks=[FlushAtEpochEnd(optimizer), Seeing()], dataset_sink_mode=False)
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

    model.fit(1, data(), data(), callbacks=[FlushAtEpochEnd(optimizer), Metrics()], dataset_sink_mode=False)
    rows = [np.square(net(Tensor(X[first : first + 3])).asnumpy() - Y[first : first + 3]).mean() for first in range(0, 18, 3)]
    assert seen == [pytest.approx(np.mean(rows), rel=1e-5)]


class Stopping(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 2:
            run_context.request_stop()


def test_stopped_epoch_is_flushed():
    model, _, optimizer = make("pynative")
    model.train(2, data(), callbacks=[FlushAtEpochEnd(optimizer), Stopping()], dataset_sink_mode=False)
    assert (optimizer.result.optimizer_step, optimizer.result.micro_step, optimizer.result.applied) == (1, 0, True)


def test_flush_after_the_saver_is_refused(tmp_path):
    model, _, optimizer = make("pynative")
    with pytest.raises(gradaccum.UsageError, match=r"callbacks.*before ModelCheckpoint"):
        model.train(1, data(), callbacks=[saver(tmp_path), FlushAtEpochEnd(optimizer)], dataset_sink_mode=False)
    assert optimizer.result.micro_step == 0


def test_sinking_many_steps_flushes_once():
    """MindSpore's run context in graph mode on a device with a data queue: one step end per `sink_size` steps."""
    optimizer = make("pynative")[2]
    optimizer((Tensor(WEIGHT), Tensor(BIAS)))
    for step, open_micro_batches in ((3, 1), (6, 0)):
        run = SimpleNamespace(cur_step_num=step, batch_num=6)
        FlushAtEpochEnd(optimizer).on_train_step_end(SimpleNamespace(original_args=lambda run=run: run))
        assert optimizer.result.micro_step == open_micro_batches
