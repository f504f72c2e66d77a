"""The loop check in MindSpore: a recorder in the optimizer's place."""

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    MODES,
    make_net,
    pynative_after,  # noqa: F401
    set_mode,
)
from gradaccum_mindspore import LoopRecorder

SIZES = (5, 3, 4, 2)
generator = np.random.default_rng(0)
DATA = [
    (
        Tensor(generator.normal(size=(size, 4)).astype(np.float32)),
        Tensor(generator.normal(size=(size, 2)).astype(np.float32)),
    )
    for size in SIZES
]
EVEN = [(x[:2], y[:2]) for x, y in DATA]


class Accumulator(nn.Cell):
    """The published tutorial's accumulator: a sum, a counter and a condition."""

    def __init__(self, optimizer, steps, divisor=1.0, clears=True):
        super().__init__()
        self.optimizer = optimizer
        self.sums = optimizer.parameters.clone(prefix="sums", init="zeros")
        self.counter = Parameter(Tensor(0, ms.int32), name="counter")
        self.steps = steps
        self.divisor = divisor
        self.clears = clears

    def construct(self, gradients):
        for total, gradient in zip(self.sums, gradients):  # noqa: B905
            ops.assign_add(total, gradient / self.divisor)
        ops.assign_add(self.counter, Tensor(1, ms.int32))
        if self.counter % self.steps == 0:
            self.optimizer(self.sums)
            if self.clears:
                for total in self.sums:
                    ops.assign(total, ops.zeros_like(total))
        return True


class Step(nn.Cell):
    def __init__(self, net, optimizer, weighs):
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.weighs = weighs
        parameters = net.trainable_params()
        self.grad = ms.value_and_grad(self.loss, None, parameters, has_aux=True)

    def loss(self, x, y):
        outputs = self.net(x)
        return ops.square(outputs - y).mean(), outputs

    def construct(self, x, y):
        _, gradients = self.grad(x, y)
        if self.weighs:
            return self.optimizer(gradients, x.shape[0])
        return self.optimizer(gradients)


def report_of(
    mode, make_optimizer: Callable, data, weighs=False, loss_scale=1.0, **options
):
    set_mode(mode)
    net = make_net()
    recorder = LoopRecorder(net.trainable_params(), loss_scale=loss_scale)
    optimizer = make_optimizer(recorder)
    step = Step(net, optimizer, weighs)
    run = ms.jit(step.construct) if mode == "jit" else step

    def train():
        for x, y in data:
            run(x, y)
        if weighs:
            optimizer.flush()

    return gradaccum.check_loop(
        train, recorder, lambda *batch: step.loss(*batch), data, **options
    )


def kinds(report):
    return [problem.kind for problem in report.problems]


@pytest.mark.parametrize("mode", MODES)
def test_tutorials_accumulator_does_not_divide(mode):
    report = report_of(mode, lambda inner: Accumulator(inner, 2), EVEN)
    assert kinds(report) == ["not_divided"] * 2, report
    assert len(report.updates) == 2


@pytest.mark.parametrize("mode", MODES)
def test_wrapped_loop_is_right(mode):
    report = report_of(
        mode, lambda inner: gradaccum.wrap(inner, steps=3), DATA, weighs=True, steps=3
    )
    assert report.right, report
    assert len(report.updates) == 2


MISTAKES = {
    "mean_of_means": lambda inner: Accumulator(inner, 4, 4.0),
    "lost": lambda inner: Accumulator(inner, 3, 3.0),
    "leaked": lambda inner: Accumulator(inner, 2, 2.0, clears=False),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistake_is_named(kind):
    data = DATA if kind == "mean_of_means" else EVEN
    assert kinds(report_of("pynative", MISTAKES[kind], data)) == [kind]


def test_recorder_divides_by_its_loss_scale():
    report = report_of("graph", lambda inner: Accumulator(inner, 2), EVEN, False, 2.0)
    assert report.right, report


def test_more_updates_than_recorded_are_refused():
    with pytest.raises(gradaccum.ArgumentValueError, match="updates=12"):
        report_of("pynative", lambda inner: inner, EVEN * 3)
