"""The loss scale beside `mindspore.amp.DynamicLossScaler`'s, event by event, and given one.

Our scale and tracker are its ``scale_value`` and ``counter``, stepped once per window. Differences by design, kept out of the comparison or
shown below:

- a floor and a ceiling can be chosen; MindSpore's floor is 1, and it has no ceiling but float32's range, where both stay;
- a window of weight 0 is neither clean nor an overflow: scale and tracker stay, where MindSpore's caller would have to choose;
- the backoff is a multiplication by ``1 / scale_factor``, MindSpore divides: the same for powers of two, an ulp apart for others.
"""

import os

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, amp, nn, ops  # noqa: E402

import gradaccum  # noqa: E402
from gradaccum.kit import State, close, make_options  # noqa: E402
from gradaccum_mindspore import backend  # noqa: E402

MODES = ("pynative", "jit", "graph")
PATTERNS, WINDOWS = 400, 40
CONSTANTS = [
    (factor, interval, init) for factor in (2, 4, 16) for interval, init in ((1, 1.0), (2, 2.0**126), (3, 2.0**10), (7, 2.0**16), (40, 8.0))
]


@pytest.fixture(autouse=True)
def pynative_after():
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def theirs_for_many(scale, factor, interval):
    """Their scaler, unchanged, over a vector of independent runs: its arithmetic is elementwise."""
    scaler = amp.DynamicLossScaler(scale, factor, interval)
    scaler.scale_value = Parameter(Tensor(np.full(PATTERNS, scale, np.float32)), name="scale_value")
    scaler.counter = Parameter(Tensor(np.zeros(PATTERNS, np.int32)), name="counter")
    return scaler


def ours_for_many(scale):
    zeros = np.zeros(PATTERNS, np.int32)
    return State(zeros + 1, zeros, zeros, zeros + np.float32(1), zeros > 0, np.full(PATTERNS, scale, np.float32), zeros)


@pytest.mark.parametrize("mode", MODES)
def test_result_does_not_count_as_asking(mode, monkeypatch, tmp_path):
    """A loop that prints ``result`` has not scaled its loss: its gradients are refused. ``loss_scale`` counts."""
    monkeypatch.chdir(tmp_path)  # a failed compilation writes a folder into the current one
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    parameter = Parameter(Tensor(np.ones(3, np.float32)), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=1, loss_scale=8.0)

    @ms.jit
    def jitted(gradient):
        return optimizer((gradient,))

    call = jitted if mode == "jit" else lambda gradient: optimizer((gradient,))
    assert optimizer.result.loss_scale == 8.0
    with pytest.raises(gradaccum.UsageError, match="loss scale"):
        call(Tensor(np.full(3, 8.0, np.float32)))
    assert optimizer.loss_scale == 8.0
    assert call(Tensor(np.full(3, 8.0, np.float32)))
    assert parameter.asnumpy().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("factor", "interval", "init"), CONSTANTS)
def test_trace_equality_on_random_overflows(factor, interval, init):
    rng = np.random.default_rng([factor, interval])
    scaler, ours = theirs_for_many(init, factor, interval), ours_for_many(init)
    options = make_options(1, loss_scale=amp.DynamicLossScaler(init, factor, interval), driver=backend)
    seen = set()
    for chance in rng.choice([0.05, 0.3, 0.8], WINDOWS):
        overflow = rng.random(PATTERNS) < chance
        scaler.adjust(Tensor(~overflow))
        with np.errstate(over="ignore"):
            closed = State(*close(ours, ~overflow, overflow, options, np.where))
        ours = closed._replace(micro_step=ours.micro_step, weight=ours.weight)
        np.testing.assert_array_equal(ours.loss_scale, scaler.scale_value.asnumpy())
        np.testing.assert_array_equal(ours.growth_tracker, scaler.counter.asnumpy())
        seen |= set(ours.loss_scale.tolist())
    assert len(seen) > 1, "the scale never moved"
    assert all(1 <= scale < np.inf for scale in seen), "no scale ever becomes 0, inf or NaN"


def test_other_factors_are_an_ulp_apart():
    scaler, ours = theirs_for_many(1000.0, 3, 2), ours_for_many(1000.0)
    options = make_options(1, loss_scale=amp.DynamicLossScaler(1000.0, 3, 2), driver=backend)
    rng = np.random.default_rng(3)
    for _ in range(WINDOWS):
        overflow = rng.random(PATTERNS) < 0.5
        scaler.adjust(Tensor(~overflow))
        ours = State(*close(ours, ~overflow, overflow, options, np.where))._replace(micro_step=ours.micro_step, weight=ours.weight)
        np.testing.assert_array_almost_equal_nulp(ours.loss_scale, scaler.scale_value.asnumpy(), WINDOWS)
        np.testing.assert_array_equal(ours.growth_tracker, scaler.counter.asnumpy())


def driver(mode, steps, loss_scale, dtype=None, **options):
    """A wrapped SGD over one parameter of ones, and a call that takes one gradient value and, if wanted, a weight."""
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    parameter = Parameter(Tensor(np.ones(3), dtype or ms.float32), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=steps, loss_scale=loss_scale, **options)
    optimizer.scale(Tensor(1.0))  # the gradients below stand for those of a loss that was scaled

    @ms.jit
    def jitted(gradient, weight):
        return optimizer((gradient,), weight)

    def call(value, weight=1.0):
        gradient, amount = Tensor(np.array([0.0, value, 0.0]), parameter.dtype), Tensor(weight, ms.float32)
        return jitted(gradient, amount) if mode == "jit" else optimizer((gradient,), amount)

    return optimizer, call, parameter


@pytest.mark.parametrize("mode", MODES)
def test_a_wrapped_run_moves_the_scale_once_per_window_as_theirs(mode):
    reference, given = amp.DynamicLossScaler(4.0, 2, 3), amp.DynamicLossScaler(4.0, 2, 3)
    optimizer, call, _ = driver(mode, 2, given)
    rng = np.random.default_rng(0)
    trace = []
    for _ in range(12):
        overflow = rng.random() < 0.3
        bad = rng.integers(2)
        for position in range(2):
            before = optimizer.result.loss_scale
            call(rng.choice([np.inf, -np.inf, np.nan]) if overflow and position == bad else 1.0)
            assert position or optimizer.result.loss_scale == before, "the scale moved in mid-window"
        reference.adjust(Tensor(not overflow))
        trace.append(optimizer.result.loss_scale)
        assert optimizer.result.loss_scale == reference.scale_value.asnumpy().item()
        assert optimizer.storage.growth_tracker.asnumpy().item() == reference.counter.asnumpy().item()
        assert given.scale(Tensor(1.0)).asnumpy().item() == trace[-1], "the scaler that was given is driven"
    assert len(set(trace)) > 2


def test_a_scaler_that_has_run_goes_on_from_where_it_is():
    scaler = amp.DynamicLossScaler(4.0, 2, 3)
    scaler.adjust(Tensor(True))
    scaler.adjust(Tensor(True))
    optimizer, call, _ = driver("pynative", 1, scaler)
    assert optimizer.storage.growth_tracker.asnumpy().item() == 2
    call(1.0)
    assert optimizer.result.loss_scale == 8.0
    assert {"gradaccum.loss_scale", "gradaccum.growth_tracker"} <= {p.name for p in optimizer.get_parameters()}


@pytest.mark.parametrize("mode", MODES)
def test_a_window_of_weight_zero_moves_nothing(mode):
    optimizer, call, _ = driver(mode, 1, gradaccum.DynamicLossScale(8.0, growth_interval=2))
    call(1.0)
    call(np.nan, 0.0)
    assert (optimizer.result.loss_scale, optimizer.result.skipped) == (8.0, True)
    assert optimizer.storage.growth_tracker.asnumpy().item() == 1


@pytest.mark.parametrize("mode", MODES)
def test_floor_and_ceiling(mode):
    scale = gradaccum.DynamicLossScale(4.0, growth_interval=1, min_scale=2.0, max_scale=8.0)
    optimizer, call, parameter = driver(mode, 1, scale)
    trace = []
    for value in (1.0, 1.0, np.inf, np.nan, -np.inf, np.inf, 1.0):
        call(value)
        trace.append(optimizer.result.loss_scale)
    assert trace == [8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0]
    assert np.isfinite(parameter.asnumpy()).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16], ids=["float16", "bfloat16"])
def test_the_first_window_and_every_position(mode, value, dtype):
    optimizer, call, parameter = driver(mode, 3, gradaccum.DynamicLossScale(8.0), dtype, master_weights=True)
    for bad in range(3):
        for position in range(3):
            call(value if position == bad else 8.0)
        assert (optimizer.result.applied, optimizer.result.overflow) == (False, True)
    assert parameter.astype(ms.float32).asnumpy().tolist() == [1.0, 1.0, 1.0]
    for _ in range(3):
        call(1.0)
    assert optimizer.result.applied
    assert parameter.astype(ms.float32).asnumpy().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("gradient", "applied"), [(65504.0 / 2, True), (32759.0, True), (32760.0, False)], ids=["largest", "rounds down", "rounds up to inf"]
)
def test_a_sum_at_the_edge_of_float16(mode, gradient, applied):
    """Halfway from 65504 to what would be the next number, 65520, the cast gives inf. Clipping comes after the decision."""
    parameter = Parameter(Tensor(np.zeros(2), ms.float16), name="p")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    optimizer = gradaccum.wrap(
        nn.SGD([parameter], 1.0), steps=2, reduction="sum", loss_scale=gradaccum.DynamicLossScale(1.0), clip_norm=16.0
    )
    optimizer.scale(Tensor(1.0))

    @ms.jit
    def jitted(tree):
        return optimizer((tree,))

    for _ in range(2):
        tensor = Tensor(np.array([0.0, gradient]), ms.float32)
        _ = jitted(tensor) if mode == "jit" else optimizer((tensor,))
    assert (optimizer.result.applied, optimizer.result.overflow) == (applied, not applied)
    assert parameter.asnumpy()[1] == (-16.0 if applied else 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_with_masters_a_sum_beyond_float16_is_no_overflow(mode):
    optimizer, call, _ = driver(mode, 2, gradaccum.DynamicLossScale(1.0), ms.float16, reduction="sum", master_weights=True)
    call(60000.0)
    call(60000.0)
    assert (optimizer.result.applied, optimizer.result.overflow, optimizer.result.grad_norm) == (True, False, 120000.0)


def test_float64_sums_of_float32_parameters_can_leave_their_range_too():
    optimizer, call, parameter = driver("pynative", 2, None, reduction="sum", accumulate_dtype="float64")
    call(3e38)
    call(3e38)
    assert (optimizer.result.applied, optimizer.result.overflow) == (False, True)
    assert parameter.asnumpy().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16], ids=["float16", "bfloat16"])
def test_a_half_precision_sum_is_divided_by_more_than_it_could_hold(mode, dtype):
    """2^16 x 2 is no float16 number; dividing by it in float16 would make every gradient 0."""
    optimizer, call, parameter = driver(mode, 2, 2.0**16, dtype, accumulate_dtype=dtype, master_weights=True)
    call(2.0**14)
    call(2.0**14)
    assert optimizer.storage.sums[0].dtype == dtype
    assert parameter.astype(ms.float32).asnumpy().tolist() == [1.0, 0.75, 1.0]


class Step(nn.Cell):
    """A loss of one float16 parameter, computed and scaled in float16 or, cast before, in float32."""

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
def test_a_float16_loss_cannot_hold_the_default_scale(mode, loss_dtype, applied):
    """2^16 is an inf there: the first window overflows, 2^15 fits. The gradients, 2^14 and less, fit either way."""
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    parameter = Parameter(Tensor(np.ones(8), ms.float16), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 0.5), steps=2, loss_scale=gradaccum.DynamicLossScale(), master_weights=True)
    cell = Step(parameter, optimizer, loss_dtype)
    step = ms.jit(cell.construct) if mode == "jit" else cell
    for _ in range(4):
        step(Tensor(np.ones(8), ms.float16))
    assert (optimizer.result.optimizer_step, optimizer.result.loss_scale) == (applied, 2.0**15 if applied == 1 else 2.0**16)
    assert parameter.asnumpy()[0] == np.float16((1 - 0.125) ** applied)


class TorchScaler:
    def get_scale(self):
        return 65536.0

    def get_growth_factor(self):
        return 2.0

    def get_backoff_factor(self):
        return 0.5

    def get_growth_interval(self):
        return 2000


def test_another_frameworks_scaler_is_refused():
    parameter = Parameter(Tensor(np.ones(2), ms.float16), name="p")
    inner = nn.SGD([parameter], 1.0)
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"loss_scale.*TorchScaler.*gradaccum.DynamicLossScale\(\)"):
        gradaccum.wrap(inner, steps=2, loss_scale=TorchScaler(), master_weights=True)
    assert inner.parameters[0] is parameter, "refused before anything was changed"
