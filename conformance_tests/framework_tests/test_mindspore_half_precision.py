"""Half precision in MindSpore: which sums and losses float16 can hold, and which overflow."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import BFLOAT16, MODES, pynative_after, set_mode  # noqa: F401
from conformance_tests.framework_tests.mindspore_driver import driver


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [pytest.param(ms.float16, id="float16"), pytest.param(ms.bfloat16, id="bfloat16", marks=BFLOAT16)])
def test_half_sum_is_divided_in_float32(mode, dtype):
    """The divisor, 2^16 x 2, is no float16 number: a division in float16 would make every gradient 0."""
    optimizer, call, parameter = driver(mode, 2, 2.0**16, dtype, accumulate_dtype=dtype, master_weights=True)
    call(2.0**14)
    call(2.0**14)
    assert optimizer.storage.sums[0].dtype == dtype
    assert parameter.astype(ms.float32).asnumpy().tolist() == [1.0, 0.75, 1.0]


class Step(nn.Cell):
    """A loss of one float16 parameter; its mean and scaling are in `loss_dtype`."""

    def __init__(self, parameter, optimizer, loss_dtype):
        super().__init__(auto_prefix=False)
        self.parameter, self.optimizer, self.loss_dtype = parameter, optimizer, loss_dtype
        self.backward = ms.value_and_grad(self.forward, None, optimizer.parameters)

    def forward(self, x):
        return self.optimizer.scale(ops.square(self.parameter * x).astype(self.loss_dtype).mean())

    def construct(self, x):
        loss, gradients = self.backward(x)
        self.optimizer(gradients)
        return loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("loss_dtype", "applied"), [(ms.float16, 1), (ms.float32, 2)], ids=["float16", "float32"])
def test_default_scale_overflows_float16_loss(mode, loss_dtype, applied):
    """2^16 is inf in float16: the first window overflows, and 2^15 fits. The gradients, 2^14 and less, fit either way."""
    set_mode(mode)
    parameter = Parameter(Tensor(np.ones(8), ms.float16), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 0.5), steps=2, loss_scale=gradaccum.DynamicLossScale(), master_weights=True)
    cell = Step(parameter, optimizer, loss_dtype)
    step = ms.jit(cell.construct) if mode == "jit" else cell
    for _ in range(4):
        step(Tensor(np.ones(8), ms.float16))
    assert (optimizer.result.optimizer_step, optimizer.result.loss_scale) == (applied, 2.0**15 if applied == 1 else 2.0**16)
    assert parameter.asnumpy()[0] == np.float16((1 - 0.125) ** applied)
