"""MindSpore's static loss scale, set in the inner optimizer and in `FixedLossScaleManager`: norms are those of the true gradient."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402
from mindspore.amp import FixedLossScaleManager  # noqa: E402
from mindspore.dataset import NumpySlicesDataset  # noqa: E402
from mindspore.train import Model  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import MODES, WEIGHT, X, Y, pynative_after, set_mode  # noqa: E402, F401
from gradaccum_conformance.deep import deep_but  # noqa: E402

SCALE = 1024.0


def trained(mode, scale, **options):
    """The weight and the wrapped optimizer after two windows of `Model.train`."""
    set_mode(mode)
    net = nn.Dense(4, 2, has_bias=False)
    ops.assign(net.weight, Tensor(WEIGHT))
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1, loss_scale=scale), steps=4, **options)
    data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False).batch(3)
    manager = {"loss_scale_manager": FixedLossScaleManager(scale, False)} if scale != 1 else {}
    Model(net, nn.MSELoss(), optimizer, **manager).train(1, data, dataset_sink_mode=False)
    return net.weight.asnumpy(), optimizer


OPTIONS = ({}, {"clip_norm": 0.5}, {"skip_norm": 100.0}, {"skip_norm": 1e-3})


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize("options", deep_but(({"clip_norm": 0.5},), OPTIONS), ids=repr)
def test_fixed_manager_changes_no_result(mode, options):
    """`FixedLossScaleManager` and the optimizer's ``loss_scale`` train, clip and skip as no scale does."""
    expected, plain = trained("pynative", 1.0, **options)  # the truth for both modes
    got, scaled = trained(mode, SCALE, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert scaled.result.optimizer_step == plain.result.optimizer_step == (0 if options.get("skip_norm") == 1e-3 else 2)
    assert scaled.result.grad_norm == pytest.approx(plain.result.grad_norm, rel=1e-5)
    assert (scaled.result.loss_scale, float(scaled.loss_scale)) == (SCALE, SCALE)


def driver(mode, dtype, **options):
    set_mode(mode)
    parameter = Parameter(Tensor(np.ones(3), dtype), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0, loss_scale=SCALE), steps=2, **options)

    @ms.jit
    def jitted(gradient):
        return optimizer((gradient,))

    def call(value):
        gradient = Tensor(np.array([0.0, value, 0.0]), dtype)
        return jitted(gradient) if mode == "jit" else optimizer((gradient,))

    return optimizer, call, parameter


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["float16", "masters"])
def test_half_precision_has_the_true_norm(mode, options):
    optimizer, call, parameter = driver(mode, ms.float16, clip_norm=1.0, **options)
    call(SCALE * 2.0)
    call(SCALE * 6.0)
    assert (optimizer.result.grad_norm, optimizer.result.applied) == (4.0, True)
    assert parameter.asnumpy().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_scaled_sum_beyond_float16_overflows(mode):
    """The inner optimizer divides in float16, so the gradient times the scale must be finite in float16."""
    optimizer, call, parameter = driver(mode, ms.float16, reduction="sum")
    call(60000.0)
    call(60000.0)
    assert (optimizer.result.applied, optimizer.result.overflow) == (False, True)
    assert parameter.asnumpy().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("scale", [SCALE, 8.0, gradaccum.DynamicLossScale()], ids=["the same", "another", "dynamic"])
def test_two_loss_scales_are_refused(scale):
    inner = nn.SGD([Parameter(Tensor(np.ones(3, np.float32)), name="p")], 1.0, loss_scale=SCALE)
    with pytest.raises(gradaccum.ArgumentValueError, match=r"loss_scale.*1024.*Leave loss_scale out of the optimizer"):
        gradaccum.wrap(inner, steps=2, loss_scale=scale)
