"""A `mindspore.amp.DynamicLossScaler` given as ``loss_scale=``: one optimizer unscales by it and adjusts it, and nothing else may."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, amp, nn, ops  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import MODES, pynative_after, set_mode  # noqa: E402, F401
from gradaccum_mindspore import TrainOneStepCell  # noqa: E402

X = np.random.RandomState(0).randn(8, 3).astype(np.float32)


def wrapped(scaler, name="p"):
    parameter = Parameter(Tensor(np.ones(3, np.float32)), name=name)
    return gradaccum.wrap(nn.SGD([parameter], 0.125), steps=2, loss_scale=scaler), parameter


class Loop(nn.Cell):
    """MindSpore's own loop, without its calls of `unscale` and `adjust`, or with the one that `left_in` names."""

    def __init__(self, scaler, left_in=""):
        super().__init__(auto_prefix=False)
        self.optimizer, self.parameter = wrapped(scaler)
        self.scaler, self.left_in = scaler, left_in
        self.backward = ms.value_and_grad(self.forward, None, self.optimizer.parameters)

    def forward(self, x):
        return self.scaler.scale(ops.square(self.parameter * x).mean())

    def construct(self, x):
        loss, gradients = self.backward(x)
        loss = self.scaler.unscale(loss)
        if self.left_in == "unscale":
            gradients = self.scaler.unscale(gradients)
        self.optimizer(gradients)
        if self.left_in == "adjust":
            self.scaler.adjust(Tensor(True))
        return loss


def stepping(mode, cell):
    set_mode(mode)
    return ms.jit(cell.construct) if mode == "jit" else cell


@pytest.mark.parametrize("mode", MODES)
def test_scaled_loop_equals_the_large_batch(mode):
    """The loop neither unscales the gradients nor adjusts the scaler; the optimizer does both."""
    cell = Loop(amp.DynamicLossScaler(8.0, 2, 1))
    step = stepping(mode, cell)
    losses = [step(Tensor(X[first : first + 2])).asnumpy().item() for first in (0, 2)]
    np.testing.assert_allclose(cell.parameter.asnumpy(), 1 - 0.125 * 2 * np.square(X[:4]).mean(0) / 3, rtol=1e-5)
    assert losses[0] == pytest.approx(float(np.square(X[:2]).mean()), rel=1e-5)
    assert float(cell.optimizer.loss_scale) == float(cell.scaler.scale_value) == 16.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("left_in", ["unscale", "adjust"])
def test_unscale_or_adjust_raises(mode, left_in):
    """The optimizer unscales and adjusts; a loop that does so too would do it twice."""
    cell = Loop(amp.DynamicLossScaler(8.0, 2, 1), left_in)
    with pytest.raises(gradaccum.UsageError, match=rf"scaler\.{left_in}.*left out"):
        stepping(mode, cell)(Tensor(X[:2]))
    assert float(cell.scaler.scale_value) == 8.0


class Square(nn.Cell):
    def __init__(self, parameter):
        super().__init__()
        self.parameter = parameter

    def construct(self, x):
        return ops.square(self.parameter * x).mean()


@pytest.mark.parametrize("mode", MODES)
def test_unscaled_loss_is_refused(mode):
    optimizer, parameter = wrapped(amp.DynamicLossScaler(8.0, 2, 1))
    backward = ms.value_and_grad(Square(parameter), None, optimizer.parameters)

    def step(x):
        return optimizer(backward(x)[1])

    set_mode(mode)
    with pytest.raises(gradaccum.UsageError, match="loss scale"):
        (ms.jit(step) if mode == "jit" else step)(Tensor(X[:2]))


def test_training_cell_drives_the_scaler():
    scaler = amp.DynamicLossScaler(8.0, 2, 1)
    optimizer, parameter = wrapped(scaler)
    cell = TrainOneStepCell(Square(parameter), optimizer)
    for first in (0, 2):
        cell(Tensor(X[first : first + 2]))
    assert float(scaler.scale_value) == 16.0
    np.testing.assert_allclose(parameter.asnumpy(), 1 - 0.125 * 2 * np.square(X[:4]).mean(0) / 3, rtol=1e-5)


def test_scaler_for_two_optimizers_is_refused():
    """Each optimizer would move the scaler inside the other's windows, and two Parameters would have one name."""
    scaler = amp.DynamicLossScaler(8.0, 2, 1)
    first, _ = wrapped(scaler)
    names = scaler.scale_value.name, scaler.counter.name
    inner = nn.SGD([Parameter(Tensor(np.ones(3, np.float32)), name="q")], 0.125)
    with pytest.raises(gradaccum.ArgumentValueError, match=r"loss_scale.*drives.*of its own"):
        gradaccum.wrap(inner, steps=2, loss_scale=scaler, name="other")
    assert (scaler.scale_value.name, scaler.counter.name) == names
    assert first.loss_scale is scaler.scale_value
