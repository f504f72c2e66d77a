"""The wrapped optimizer in `mindspore.train.Model`, with its callbacks and an epoch's short tail."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402
from mindspore.dataset import NumpySlicesDataset  # noqa: E402
from mindspore.train import CheckpointConfig, LearningRateScheduler, LossMonitor, Model, ModelCheckpoint  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import BIAS, WEIGHT, X, Y, make_net, pynative_after, set_mode  # noqa: E402, F401
from gradaccum_conformance.deep import deep_but  # noqa: E402
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell  # noqa: E402

MODES = ("pynative", "graph")


def fit(size, rows, epochs=1, callbacks=(), **options):
    net = make_net()
    inner = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    optimizer = gradaccum.wrap(inner, **options) if options else inner
    data = NumpySlicesDataset((X[:rows], Y[:rows]), ["x", "y"], shuffle=False).batch(size)
    own = [make(optimizer) for make in callbacks]
    model = Model(net, nn.MSELoss(), optimizer)
    if "loss_scale" in options:
        model = Model(TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer))
    model.train(epochs, data, callbacks=own, dataset_sink_mode=False)
    return net, optimizer


@pytest.mark.parametrize("mode", MODES)
def test_model_trains_with_callbacks(mode, tmp_path):
    set_mode(mode)
    halved = lambda optimizer: LearningRateScheduler(lambda rate, step: rate * 0.5 if step == 4 else rate)  # noqa: E731
    saver = lambda optimizer: ModelCheckpoint("run", str(tmp_path), CheckpointConfig(save_checkpoint_steps=3))  # noqa: E731
    net, optimizer = fit(3, 24, callbacks=[lambda optimizer: LossMonitor(4), halved, saver], steps=4)
    set_mode("pynative")  # the truth for both modes
    large, _ = fit(12, 24, callbacks=[lambda optimizer: LearningRateScheduler(lambda rate, step: rate * 0.5 if step == 1 else rate)])
    np.testing.assert_allclose(net.weight.asnumpy(), large.weight.asnumpy(), rtol=0, atol=3e-6)
    assert (optimizer.result.optimizer_step, optimizer.learning_rate.asnumpy().item()) == (2, pytest.approx(0.05))
    assert np.abs(net.weight.asnumpy() - WEIGHT).max() > 1e-3
    saved = ms.load_checkpoint(str(tmp_path / "run-1_6.ckpt"))
    assert saved["gradaccum.micro_step"].asnumpy() == 2
    assert saved["weight.gradaccum.grad_sum"].asnumpy().any()


def logged_warnings(monkeypatch):
    warnings = []
    monkeypatch.setattr(ms.log, "warning", lambda message, *rest: warnings.append(message))
    return warnings


@pytest.mark.parametrize("mode", MODES)
def test_epochs_tail_is_an_update(mode, monkeypatch):
    warnings = logged_warnings(monkeypatch)
    set_mode(mode)
    net, optimizer = fit(3, 18, epochs=2, callbacks=[FlushAtEpochEnd], steps=4)
    assert not warnings
    assert (optimizer.result.optimizer_step, optimizer.result.micro_step) == (4, 0)
    set_mode("pynative")  # the truth for both modes
    large = make_net()
    inner = nn.Momentum(large.trainable_params(), 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(large, nn.MSELoss()), inner)
    for first, last in ((0, 12), (12, 18)) * 2:
        step(Tensor(X[first:last]), Tensor(Y[first:last]))
    np.testing.assert_allclose(net.weight.asnumpy(), large.weight.asnumpy(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("mode", deep_but(("pynative",), MODES))
def test_training_logs_no_warning(mode, monkeypatch):
    """MindSpore warns at each call of something that a later version drops."""
    warnings = logged_warnings(monkeypatch)
    set_mode(mode)
    _, optimizer = fit(3, 18, callbacks=[FlushAtEpochEnd], steps=4, clip_norm=1.0, loss_scale=4.0)
    assert optimizer.result.optimizer_step == 2
    assert not warnings


def update_and_wait(optimizer):
    optimizer((Tensor(WEIGHT), Tensor(BIAS)))
    optimizer.parameters[0].asnumpy()


def test_lamb_has_no_cpu_kernel():
    """A declared gap of MindSpore. If this test fails, the gap is closed: say so in the documentation."""
    net = make_net()
    if ms.get_context("device_target") != "CPU":
        pytest.skip("a gap of the CPU only")
    optimizer = gradaccum.wrap(nn.Lamb(net.trainable_params(), 0.1), steps=1)
    with pytest.raises((RuntimeError, TypeError)):
        update_and_wait(optimizer)
