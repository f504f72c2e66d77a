"""The training cell beside the user's own: a subclass's construct, layers frozen by ``set_train(False)``, a network of several losses."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, nn, ops  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import set_mode  # noqa: E402
from gradaccum_mindspore import TrainOneStepCell  # noqa: E402

X = np.random.RandomState(0).randn(8, 3).astype(np.float32) + 5
MODES = ["pynative", "graph"]


class Clipping(TrainOneStepCell):
    """A user's step: it counts its calls, and clips each micro-batch."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.calls = ms.Parameter(Tensor(0.0, ms.float32), name="calls", requires_grad=False)

    def construct(self, x, y):
        ops.assign_add(self.calls, Tensor(1.0, ms.float32))
        loss, gradients, weight = self.differentiated(x, y)
        gradients = ops.clip_by_global_norm(gradients, 0.01)
        return ops.depend(loss, self.optimizer(gradients, weight, loss))


@pytest.mark.parametrize("mode", MODES)
def test_construct_of_a_subclass_runs(mode):
    set_mode(mode)
    net = nn.Dense(3, 1, weight_init="ones", has_bias=False)
    cell = Clipping(nn.WithLossCell(net, nn.MSELoss()), gradaccum.wrap(nn.SGD(net.trainable_params(), 1.0), steps=2))
    for _ in range(2):
        cell(ops.ones((4, 3)), ops.zeros((4, 1)))
    assert cell.calls.asnumpy() == 2
    np.testing.assert_allclose(np.linalg.norm(net.weight.asnumpy() - 1), 0.01, rtol=1e-5)


class Normed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Dense(3, 2, weight_init="ones", has_bias=False)

    def construct(self, x):
        return self.last(self.norm(x))


@pytest.mark.parametrize("mode", MODES)
def test_frozen_layer_stays_frozen(mode):
    """Its statistics do not move, and it normalizes by them: as in MindSpore's own cell, after an evaluation too."""
    set_mode(mode)
    net = Normed()
    cell = TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), gradaccum.wrap(nn.SGD(net.trainable_params(), 0.0), steps=2))
    losses = []
    for _ in range(2):
        cell.set_train()
        net.norm.set_train(False)
        losses += [float(cell(Tensor(X[i : i + 4]), Tensor(X[i : i + 4, :2])).asnumpy()) for i in (0, 4)]
        assert not net.norm.training
        assert cell.training
        cell.set_train(False)
    assert not net.norm.moving_mean.asnumpy().any()
    wanted = [((X[i : i + 4].sum(1, keepdims=True) / np.sqrt(1 + 1e-5) - X[i : i + 4, :2]) ** 2).mean() for i in (0, 4)]
    np.testing.assert_allclose(losses, wanted * 2, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_items_are_no_mean(mode):
    """MindSpore differentiates their sum: a mean of sums would be a fraction of the large batch's."""
    set_mode(mode)

    def cell(reduction):
        net = nn.Dense(3, 1, weight_init="ones", has_bias=False)
        optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 1.0), steps=2, reduction=reduction)
        return net, TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss(reduction="none")), optimizer)

    _, means = cell("mean")
    with pytest.raises(gradaccum.ArgumentValueError, match=r"network: expected one loss.*losses of shape \(4, 1\)"):
        means(ops.ones((4, 3)), ops.zeros((4, 1)))
    net, items = cell("item_mean")
    for _ in range(2):
        items(ops.ones((4, 3)), ops.zeros((4, 1)))
    np.testing.assert_allclose(net.weight.asnumpy(), np.full((1, 3), 1 - 2 * 3.0), rtol=1e-6)
