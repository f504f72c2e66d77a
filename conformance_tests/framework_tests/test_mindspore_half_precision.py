"""Half precision in MindSpore: which sums and losses float16 can hold, and which overflow."""

from functools import cache

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import BFLOAT16, MODES, pynative_after, set_mode  # noqa: E402, F401
from conformance_tests.framework_tests.mindspore_driver import driver  # noqa: E402
from gradaccum_mindspore import load_checkpoint_into  # noqa: E402


def state_of(optimizer):
    return {p.name: Tensor(p.astype(ms.float32).asnumpy(), p.dtype) for p in optimizer.get_parameters()}


@cache
def windows_of_three(mode, dtype):
    """`driver` with masters, compiled once for each mode and dtype, and the state it starts from."""
    made = driver(mode, 3, gradaccum.DynamicLossScale(8.0), dtype, master_weights=True)
    return *made, state_of(made[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16], ids=["float16", "bfloat16"])
def test_overflow_at_every_position_skips(mode, value, dtype):
    """One bad micro-batch, first, second or third, skips its window; the clean window after them is applied."""
    optimizer, call, parameter, start = windows_of_three(mode, dtype)
    set_mode(mode)
    load_checkpoint_into(optimizer, start)
    for bad in range(3):
        for position in range(3):
            call(value if position == bad else 8.0)
        assert (optimizer.result.applied, optimizer.result.overflow) == (False, True)
    assert parameter.astype(ms.float32).asnumpy().tolist() == [1.0, 1.0, 1.0]
    for _ in range(3):
        call(1.0)
    assert optimizer.result.applied
    assert parameter.astype(ms.float32).asnumpy().tolist() == [1.0, 0.0, 1.0]


@cache
def clipped_sums(mode):
    """A wrapped optimizer of one float16 parameter, compiled once for each mode; its call, and the state it starts from."""
    set_mode(mode)
    parameter = Parameter(Tensor(np.zeros(2), ms.float16), name="p")
    optimizer = gradaccum.wrap(
        nn.SGD([parameter], 1.0), steps=2, reduction="sum", loss_scale=gradaccum.DynamicLossScale(1.0), clip_norm=16.0
    )
    optimizer.scale(Tensor(1.0))

    @ms.jit
    def jitted(tree):
        return optimizer((tree,))

    return optimizer, jitted if mode == "jit" else lambda tree: optimizer((tree,)), parameter, state_of(optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("gradient", "applied"), [(65504.0 / 2, True), (32759.0, True), (32760.0, False)], ids=["largest", "rounds down", "rounds up to inf"]
)
def test_sum_at_the_edge_of_float16(mode, gradient, applied):
    """65520, halfway from 65504 to the next step, is inf in float16. The decision precedes the clipping."""
    optimizer, call, parameter, start = clipped_sums(mode)
    set_mode(mode)
    load_checkpoint_into(optimizer, start)
    for _ in range(2):
        call(Tensor(np.array([0.0, gradient]), ms.float32))
    assert (optimizer.result.applied, optimizer.result.overflow) == (applied, not applied)
    assert parameter.asnumpy()[1] == (-16.0 if applied else 0.0)


def test_float64_sum_can_overflow_float32():
    optimizer, call, parameter = driver("pynative", 2, None, reduction="sum", accumulate_dtype="float64")
    call(3e38)
    call(3e38)
    assert (optimizer.result.applied, optimizer.result.overflow) == (False, True)
    assert parameter.asnumpy().tolist() == [1.0, 1.0, 1.0]


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
