"""The loss scale moves as `mindspore.amp.DynamicLossScaler` does, event by event, also
where the user gives one.

Our scale and tracker are its ``scale_value`` and ``counter``, stepped once per window.
We differ by design, outside the comparison:

- the user can set a floor and a ceiling; MindSpore's floor is 1, and both stop at
  float32's range;
- a window of weight 0 is neither clean nor an overflow, so scale and tracker stay;
  MindSpore's caller has to choose;
- the backoff multiplies by ``1 / scale_factor``, MindSpore divides: equal for powers of
  two, an ulp apart for others.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from mindspore.amp import FixedLossScaleManager
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    MODES,
    WEIGHT,
    X,
    Y,
    pynative_after,  # noqa: F401
    set_mode,
    two_parameters,
)
from conformance_tests.framework_tests.mindspore_driver import driver
from gradaccum_conformance.deep import deep_but


@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_result_does_not_count_as_asking(mode):
    """A loop that prints ``result`` has not scaled its loss: its gradients are refused.
    ``loss_scale`` counts.
    """
    (parameter, _) = two_parameters()
    optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=1, loss_scale=8.0)

    def step(gradient):
        return optimizer((gradient,))

    step = ms.jit(step) if mode == "jit" else step
    gradient = Tensor(np.full(3, 8.0, np.float32))
    assert optimizer.result.loss_scale == 8.0
    with pytest.raises(gradaccum.UsageError, match="loss scale"):
        step(gradient)
    assert optimizer.loss_scale == 8.0
    assert step(gradient)
    assert parameter.asnumpy().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("factor", "interval", "init"),
    [(2, 1, 1.0), (2, 2, 2.0**126), (4, 3, 2.0**10), (16, 7, 2.0**16)],
)
def test_scale_moves_as_mindspores(factor, interval, init):
    """On random overflows, up to the ends of float32's range."""
    random = np.random.default_rng([factor, interval])
    theirs, ours = (amp.DynamicLossScaler(init, factor, interval) for _ in range(2))
    _, call, _ = driver("pynative", 1, ours)
    seen = set()
    for overflow in random.random(200) < np.repeat(
        random.choice([0.05, 0.3, 0.8], 20), 10
    ):
        call(np.inf if overflow else 0.0)
        theirs.adjust(Tensor(not overflow))
        assert ours.scale_value.asnumpy() == theirs.scale_value.asnumpy()
        assert ours.counter.asnumpy() == theirs.counter.asnumpy()
        seen.add(float(ours.scale_value))
    assert len(seen) > 1
    assert all(1 <= scale < np.inf for scale in seen)


def test_used_scaler_keeps_its_counter():
    """The state's scale and tracker are the scaler's own Parameters, so that it moves
    with them.
    """
    scaler = amp.DynamicLossScaler(4.0, 2, 3)
    for _ in range(2):
        scaler.adjust(Tensor(True))
    optimizer, call, _ = driver("pynative", 1, scaler)
    assert optimizer.storage.growth_tracker is scaler.counter
    assert optimizer.loss_scale is scaler.scale_value
    call(1.0)
    assert optimizer.result.loss_scale == 8.0
    assert not scaler.scale_value.requires_grad


SCALE = 1024.0


def trained(mode, scale, **options):
    """The weight and the result after two windows of `Model.train`."""
    set_mode(mode)
    net = nn.Dense(4, 2, has_bias=False)
    ops.assign(net.weight, Tensor(WEIGHT))
    inner = nn.SGD(net.trainable_params(), 0.1, loss_scale=scale)
    optimizer = gradaccum.wrap(inner, steps=4, **options)
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(3)
    manager = FixedLossScaleManager(scale, False)
    model = Model(net, nn.MSELoss(), optimizer, loss_scale_manager=manager)
    model.train(1, data, dataset_sink_mode=False)
    assert float(optimizer.loss_scale) == scale
    return net.weight.asnumpy(), optimizer.result


OPTIONS = ({}, {"clip_norm": 0.5}, {"skip_norm": 100.0}, {"skip_norm": 1e-3})


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize("options", deep_but(({"clip_norm": 0.5},), OPTIONS), ids=repr)
def test_fixed_manager_changes_no_result(mode, options):
    """`FixedLossScaleManager` and the optimizer's ``loss_scale`` train, clip and skip
    as no scale does.
    """
    expected, plain = trained("pynative", 1.0, **options)  # the truth for both modes
    got, scaled = trained(mode, SCALE, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    updates = 0 if options.get("skip_norm") == 1e-3 else 2
    assert scaled.optimizer_step == plain.optimizer_step == updates
    assert scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert scaled.loss_scale == SCALE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masters", [False, True])
def test_half_precision_has_the_true_norm(mode, masters):
    optimizer, call, parameter = driver(
        mode, 2, dtype=ms.float16, own=SCALE, clip_norm=1.0, master_weights=masters
    )
    call(SCALE * 2.0)
    call(SCALE * 6.0)
    assert (optimizer.result.grad_norm, optimizer.result.applied) == (4.0, True)
    assert parameter.asnumpy().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_scaled_sum_beyond_float16_overflows(mode):
    """The inner optimizer divides in float16, so the gradient times the scale must be
    finite in float16.
    """
    optimizer, call, parameter = driver(
        mode, 2, dtype=ms.float16, own=SCALE, reduction="sum"
    )
    call(60000.0)
    call(60000.0)
    assert (optimizer.result.applied, optimizer.result.overflow) == (False, True)
    assert parameter.asnumpy().tolist() == [1.0, 1.0, 1.0]


ROWS = np.random.RandomState(0).randn(8, 3).astype(np.float32)


class Loop(nn.Cell):
    """MindSpore's own loop, without its calls of `unscale` and `adjust`, or with the
    one that `left_in` names.
    """

    def __init__(self, left_in=""):
        super().__init__(auto_prefix=False)
        self.parameter, _ = two_parameters()
        self.scaler, self.left_in = amp.DynamicLossScaler(8.0, 2, 1), left_in
        self.optimizer = gradaccum.wrap(
            nn.SGD([self.parameter], 0.125), steps=2, loss_scale=self.scaler
        )
        self.backward = ms.value_and_grad(self.forward, None, self.optimizer.parameters)

    def forward(self, x):
        return self.scaler.scale(ops.square(self.parameter * x).mean())

    def construct(self, x):
        loss, gradients = self.backward(x)
        if self.left_in == "unscale":
            gradients = self.scaler.unscale(gradients)
        self.optimizer(gradients)
        if self.left_in == "adjust":
            self.scaler.adjust(Tensor(True))
        return self.scaler.unscale(loss)


def stepping(mode, cell):
    set_mode(mode)
    return ms.jit(cell.construct) if mode == "jit" else cell


@pytest.mark.parametrize("mode", MODES)
def test_scaled_loop_equals_the_large_batch(mode):
    """The loop neither unscales the gradients nor adjusts the scaler; the optimizer
    does both.
    """
    cell = Loop()
    step = stepping(mode, cell)
    losses = [float(step(Tensor(ROWS[first : first + 2]))) for first in (0, 2)]
    moved = 0.125 * 2 * np.square(ROWS[:4]).mean(0) / 3
    np.testing.assert_allclose(cell.parameter.asnumpy(), 1 - moved, rtol=1e-5)
    assert losses[0] == pytest.approx(float(np.square(ROWS[:2]).mean()), rel=1e-5)
    assert float(cell.optimizer.loss_scale) == float(cell.scaler.scale_value) == 16.0


@pytest.mark.parametrize("mode", ["pynative", "jit"])
@pytest.mark.parametrize("left_in", ["unscale", "adjust"])
def test_unscale_or_adjust_raises(mode, left_in):
    """The optimizer unscales and adjusts; a loop that does so too would do it twice."""
    cell = Loop(left_in)
    with pytest.raises(gradaccum.UsageError, match=rf"scaler\.{left_in}.*left out"):
        stepping(mode, cell)(Tensor(ROWS[:2]))
    assert float(cell.scaler.scale_value) == 8.0
