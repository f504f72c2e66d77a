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

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    MODES,
    pynative_after,  # noqa: F401
    set_mode,
    two_parameters,
)
from conformance_tests.framework_tests.mindspore_driver import driver


@pytest.mark.parametrize(
    ("factor", "interval", "init"),
    [(2, 1, 1.0), (2, 2, 2.0**126), (16, 7, 2.0**16)],
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
