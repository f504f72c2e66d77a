"""Weights in compiled code: the length of a dynamic axis, and numbers of another dtype than the state's."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: E402, F401


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_length_of_a_dynamic_axis(on_overflow):
    """It is no constant while MindSpore compiles: windows of 4 and 3 items, and of 2 and 5."""
    net = nn.Dense(4, 2, weight_init="ones", has_bias=False)
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=2, on_overflow=on_overflow)

    def forward(x):
        return net(x).mean()

    value_and_grad = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit(dynamic=1)
    def step(x):
        loss, gradients = value_and_grad(x)
        optimizer(gradients, x.shape[0])
        return loss

    for value, items in enumerate((4, 3, 2, 5), 1):
        step(Tensor(np.full((items, 4), value, np.float32)))
    moved = 0.1 * 0.5 * ((4 * 1 + 3 * 2) / 7 + (2 * 3 + 5 * 4) / 7)
    np.testing.assert_allclose(net.weight.asnumpy(), np.full((2, 4), 1 - moved), rtol=1e-6)
    assert optimizer.result.optimizer_step == 2


@pytest.mark.parametrize(("reduction", "moved", "loss"), [("mean", 1.0, 2.5), ("sum", 2.0, 4.0), ("item_mean", 0.5, 1.0)])
def test_float64_weight_beside_a_told_loss(reduction, moved, loss):
    parameter = Parameter(Tensor([1.0, 2.0], ms.float32), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=2, reduction=reduction)

    @ms.jit
    def step(gradient, weight, told):
        optimizer((gradient,), weight, told)
        return gradient

    for number in (3.0, 1.0):
        step(Tensor([1.0, 1.0], ms.float32), Tensor(number, ms.float64), Tensor(number, ms.float32))
    np.testing.assert_allclose(parameter.asnumpy(), [1 - moved, 2 - moved], rtol=1e-6)
    assert optimizer.result.loss == loss


class Descent(nn.Optimizer):
    """Plain gradient descent in the gradient's own dtype."""

    def construct(self, gradients):
        return ops.assign_sub(self.parameters[0], gradients[0])


@pytest.mark.parametrize(("limit", "weights"), [(0.1, (1, 1)), (None, (0.1, 0.3))], ids=["clip_norm", "weights"])
def test_constants_beside_float64_sums_are_float64(limit, weights):
    """MindSpore rounds a Python number to float32 in compiled code: an error of 1e-8."""
    parameter = Parameter(Tensor([0.0, 0.0], ms.float64), name="p")
    optimizer = gradaccum.wrap(Descent(1.0, [parameter]), steps=2, clip_norm=limit)

    @ms.jit
    def step(first, second):
        optimizer((first,), weights[0], 0.1)
        optimizer((second,), weights[1], 0.1)
        return first

    gradients = np.array([[3.0, 4.0], [1.0, 7.0]])
    step(*(Tensor(gradient) for gradient in gradients))
    mean = np.average(gradients, axis=0, weights=weights)
    norm = np.linalg.norm(mean)
    np.testing.assert_allclose(parameter.asnumpy(), -mean * (1 if limit is None else limit / norm), rtol=1e-14)
    np.testing.assert_allclose([optimizer.result.grad_norm, optimizer.result.loss], [norm, 0.1], rtol=1e-14)
