"""Training loops with the wrapped MindSpore optimizer, in every mode: one update per window, equal to the large batch's."""

from functools import cache

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

import gradaccum
from conformance_tests.framework_tests.mindspore_common import BIAS, MODES, WEIGHT, X, Y, make_net, pynative_after, set_mode  # noqa: F401
from gradaccum_mindspore import AccumulatingOptimizer


class TrainStep(nn.Cell):
    def __init__(self, net, optimizer, parameters):
        super().__init__(auto_prefix=False)
        self.net, self.optimizer = net, optimizer
        self.scaled = isinstance(optimizer, AccumulatingOptimizer)
        self.backward = ms.value_and_grad(self.forward, None, parameters)

    def forward(self, x, y):
        loss = ops.square(self.net(x) - y).mean()
        if self.scaled:
            return self.optimizer.scale(loss)
        return loss

    def construct(self, x, y):
        loss, gradients = self.backward(x, y)
        self.optimizer(gradients)
        return loss


def train(make_inner, size, mode, **options):
    """Trains on all 24 rows, `size` at a time; returns the parameters, the wrapped or bare optimizer, and the inner one."""
    set_mode(mode)
    net = make_net()
    inner = make_inner(net)
    optimizer = gradaccum.wrap(inner, **options) if options else inner
    cell = TrainStep(net, optimizer, inner.parameters)
    step = ms.jit(cell.construct) if mode == "jit" else cell
    for start in range(0, 24, size):
        step(Tensor(X[start : start + size]), Tensor(Y[start : start + size]))
    return np.concatenate([p.asnumpy().ravel() for p in inner.parameters]), optimizer, inner


def grouped(net):
    return nn.Momentum([{"params": [net.weight], "lr": 0.05, "weight_decay": 0.1}, {"params": [net.bias]}], 0.1, 0.9)


def dynamic(net):
    return nn.SGD(net.trainable_params(), [0.5, 0.125, 0.25, 0.25])


OPTIMIZERS = {
    "SGD": lambda net: nn.SGD(net.trainable_params(), 0.1),
    "Adam": lambda net: nn.Adam(net.trainable_params(), 0.1),
    "AdamWeightDecay": lambda net: nn.AdamWeightDecay(net.trainable_params(), 0.1, weight_decay=0.1),
    "RMSProp": lambda net: nn.RMSProp(net.trainable_params(), 0.01),
    "grouped Momentum": grouped,
    "dynamic learning rate": dynamic,
    "experimental SGD": lambda net: optim.SGD(net.trainable_params(), 0.1, momentum=0.9),
    "experimental Adam": lambda net: optim.Adam(net.trainable_params(), 0.1),
    "experimental AdamW": lambda net: optim.AdamW(net.trainable_params(), 0.1),
}
JITTED = ("SGD", "grouped Momentum", "dynamic learning rate", "experimental Adam")
GRAPHED = ("SGD", "experimental Adam")
CHOSEN = {"pynative": OPTIMIZERS, "jit": JITTED, "graph": GRAPHED}
CASES = [(kind, mode) for mode in MODES for kind in CHOSEN[mode]]


@cache
def large_batches(kind):
    """The parameters after two large batches, in PyNative for every mode: the truth does not depend on it."""
    return train(OPTIMIZERS[kind], 12, "pynative")[0]


@pytest.mark.every_mode
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_two_windows_equal_two_large_batches(kind, mode):
    expected = large_batches(kind)
    got, optimizer, inner = train(OPTIMIZERS[kind], 3, mode, steps=4)
    assert np.abs(expected - np.concatenate([WEIGHT.ravel(), BIAS])).max() > 1e-3, "the comparison would pass without an update"
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6)
    assert optimizer.result.optimizer_step == 2
    if isinstance(inner, nn.Optimizer) and kind != "AdamWeightDecay":
        assert inner.global_step.asnumpy().item() == 2
