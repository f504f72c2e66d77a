"""The loss scale moves as `mindspore.amp.DynamicLossScaler` does, event by event, also where the user gives one.

Our scale and tracker are its ``scale_value`` and ``counter``, stepped once per window. We differ by design, outside the comparison:

- the user can set a floor and a ceiling; MindSpore's floor is 1, and both stop at float32's range;
- a window of weight 0 is neither clean nor an overflow, so scale and tracker stay; MindSpore's caller has to choose;
- the backoff multiplies by ``1 / scale_factor``, MindSpore divides: equal for powers of two, an ulp apart for others.
"""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, amp, nn  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import MODES, pynative_after, set_mode  # noqa: E402, F401
from conformance_tests.framework_tests.mindspore_driver import driver  # noqa: E402
from gradaccum.kit import State, close, make_options  # noqa: E402
from gradaccum_mindspore import backend  # noqa: E402

PATTERNS, WINDOWS = 400, 40
CONSTANTS = [
    (factor, interval, init) for factor in (2, 4, 16) for interval, init in ((1, 1.0), (2, 2.0**126), (3, 2.0**10), (7, 2.0**16), (40, 8.0))
]


def theirs_for_many(scale, factor, interval):
    """MindSpore's scaler, unchanged, on a vector: its arithmetic is elementwise, so each element is a run of its own."""
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
    set_mode(mode)
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
def test_trace_equals_mindspores_on_random_overflows(factor, interval, init):
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
    assert all(1 <= scale < np.inf for scale in seen), "a scale became 0, inf or NaN"


def test_other_factors_differ_by_ulps():
    scaler, ours = theirs_for_many(1000.0, 3, 2), ours_for_many(1000.0)
    options = make_options(1, loss_scale=amp.DynamicLossScaler(1000.0, 3, 2), driver=backend)
    rng = np.random.default_rng(3)
    for _ in range(WINDOWS):
        overflow = rng.random(PATTERNS) < 0.5
        scaler.adjust(Tensor(~overflow))
        ours = State(*close(ours, ~overflow, overflow, options, np.where))._replace(micro_step=ours.micro_step, weight=ours.weight)
        np.testing.assert_array_almost_equal_nulp(ours.loss_scale, scaler.scale_value.asnumpy(), WINDOWS)
        np.testing.assert_array_equal(ours.growth_tracker, scaler.counter.asnumpy())


@pytest.mark.parametrize("mode", MODES)
def test_scale_moves_once_per_window(mode):
    """It moves as MindSpore's scaler does when adjusted after each window, and moves the scaler that was given."""
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
        assert given.scale(Tensor(1.0)).asnumpy().item() == trace[-1], "the scaler that was given did not move"
    assert len(set(trace)) > 2


def test_used_scaler_keeps_its_counter():
    scaler = amp.DynamicLossScaler(4.0, 2, 3)
    scaler.adjust(Tensor(True))
    scaler.adjust(Tensor(True))
    optimizer, call, _ = driver("pynative", 1, scaler)
    assert optimizer.storage.growth_tracker.asnumpy().item() == 2
    call(1.0)
    assert optimizer.result.loss_scale == 8.0
    assert {"gradaccum.loss_scale", "gradaccum.growth_tracker"} <= {p.name for p in optimizer.get_parameters()}
