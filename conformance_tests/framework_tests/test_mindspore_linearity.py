"""`gradaccum_mindspore.verify_loss_scaling` names each custom backward that ignores its
incoming gradient, and no other.
"""

import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import _Function

import gradaccum
from conformance_tests.framework_tests.mindspore_common import pynative_after, set_mode  # noqa: F401
from gradaccum_mindspore import verify_loss_scaling

X = Tensor(np.random.RandomState(0).randn(5, 3), ms.float32)


class Doubling(nn.Cell):
    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (dout * 2,)


class IgnoringCell(nn.Cell):
    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (ops.ones_like(x) * 2,)


class PartlyIgnoringCell(nn.Cell):
    """Two outputs and a plain number as argument. The second input's gradient ignores
    the incoming one.
    """

    def construct(self, x, y, factor):
        return x * factor, x + y

    def bprop(self, x, y, factor, out, dout):
        return dout[0] * factor + dout[1], ops.sign(y), 0.0


class Pair(nn.Cell):
    def __init__(self):
        super().__init__()
        self.part = PartlyIgnoringCell()

    def construct(self, x):
        first, second = self.part(x, x * 3, 2.0)
        return first * second


class DoublingFunction(_Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class IgnoringFunction(_Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return ops.ones_like(gradient) * 2


BLAMED = {
    "a good cell": (Doubling, ()),
    "a bad cell": (IgnoringCell, ("IgnoringCell",)),
    "a cell of two": (Pair, ("PartlyIgnoringCell",)),
    "a good function": (lambda: DoublingFunction.apply, ()),
    "a bad function": (lambda: IgnoringFunction.apply, ("IgnoringFunction",)),
}


class Net(nn.Cell):
    def __init__(self, part):
        super().__init__()
        self.dense, self.norm, self.drop, self.part = (
            nn.Dense(3, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(p=0.5),
            part,
        )

    def construct(self, x):
        return ops.square(
            self.part(self.drop(self.norm(ops.tanh(self.dense(x)))) + 1)
        ).mean()


def make_net(kind):
    ms.set_seed(0)
    net = Net(BLAMED[kind][0]())
    return net.set_train()


def everything(net):
    return (
        {p.name: p.asnumpy().tobytes() for p in net.get_parameters()},
        ms.get_rng_state().asnumpy().tobytes(),
        net.drop.training,
    )


@pytest.mark.parametrize("kind", BLAMED)
def test_culprits_are_named(kind):
    net = make_net(kind)
    before = everything(net)
    report = verify_loss_scaling(net, net.trainable_params(), X)
    assert report.culprits == BLAMED[kind][1], str(report)
    assert report.linear == (not report.culprits)
    assert set(report.errors) == {p.name for p in net.trainable_params()}
    assert everything(net) == before, (
        "parameters, statistics, random state or training mode changed"
    )
    assert type(net.part).__call__ is nn.Cell.__call__ or not isinstance(
        net.part, nn.Cell
    )
    assert "MS_JIT" not in os.environ


@pytest.mark.parametrize("kind", ["a good cell", "a bad cell"])
@pytest.mark.parametrize("how", ["jit", "graph"])
def test_culprits_in_compiled_functions_are_named(kind, how):
    net = make_net(kind)
    set_mode(how)
    report = verify_loss_scaling(
        ms.jit(net.construct) if how == "jit" else net,
        ms.ParameterTuple(net.trainable_params()),
        X,
    )
    assert report.culprits == BLAMED[kind][1]
    assert ms.get_context("mode") == (
        ms.GRAPH_MODE if how == "graph" else ms.PYNATIVE_MODE
    )


def test_errors_alone_show_a_hook():
    """A hook is no custom backward: the report has an error and no culprit."""
    weight = Parameter(Tensor(np.ones(3), ms.float32), name="weight")
    linear = verify_loss_scaling(lambda x: (weight * x).sum(), weight, X)
    assert (linear.linear, linear.errors) == (True, {"weight": 0.0}), (
        "powers of two are exact"
    )

    class Hooked(nn.Cell):
        def construct(self, x):
            return x * 1.0

    hooked = Hooked()
    hooked.register_backward_hook(
        lambda cell, grad_input, grad_output: (ops.sign(grad_output[0]),)
    )
    report = verify_loss_scaling(lambda x: hooked(weight * x).sum(), weight, X)
    assert (report.linear, report.culprits) == (False, ())
    assert report.errors["weight"] > 0.9


OTHERS = {
    "float16": (ms.float16, 2.0**-12),
    "large float16": (ms.float16, 2.0**4),
    "float64": (ms.float64, 2.0**-12),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(("part", "linear"), [(Doubling, True), (IgnoringCell, False)])
def test_culprits_in_other_dtypes_are_named(other, part, linear):
    """float16 gradients vanish at small scales and overflow at large ones, as do their
    squares: the check blames the loss for neither.
    """
    dtype, factor = OTHERS[other]
    weight, cell, factor = (
        Parameter(Tensor(np.linspace(0.5, 1.0, 3), dtype), name="weight"),
        part(),
        Tensor(factor, dtype),
    )
    report = verify_loss_scaling(
        lambda x: ops.square(cell(weight * x * factor)).sum(), weight, X.astype(dtype)
    )
    assert (report.linear, report.culprits) == (
        linear,
        () if linear else ("IgnoringCell",),
    ), str(report)


class RoughCell(nn.Cell):
    """At every other power of two the gradient is off by 2^-7, a unit in bfloat16's
    last place.
    """

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (dout * 2 * (1 + 2.0**-7 * (ops.floor(ops.log2(dout)) % 2)),)


@pytest.mark.parametrize(
    ("part", "dtype", "linear"),
    [
        (Doubling, ms.bfloat16, True),
        (IgnoringCell, ms.bfloat16, False),
        pytest.param(RoughCell, ms.bfloat16, True, id="within bfloat16's rounding"),
        pytest.param(RoughCell, ms.float32, False, id="beyond float32's rounding"),
    ],
)
def test_culprits_in_bfloat16_are_named(part, dtype, linear):
    weight, cell = (
        Parameter(Tensor(np.linspace(0.5, 1.0, 3), dtype), name="weight"),
        part(),
    )
    # cast before the product: MindSpore 2.7 multiplies no bfloat16 on a CPU
    x = Tensor(np.ones(3), dtype)
    report = verify_loss_scaling(
        lambda x: cell(weight.astype(ms.float32) * x.astype(ms.float32)).mean(),
        weight,
        x,
    )
    assert (report.linear, report.culprits) == (
        linear,
        () if linear else (part.__name__,),
    ), str(report)
    assert (report.errors["weight"] > 0) == (part is not Doubling), str(report)


@pytest.mark.parametrize(("part", "linear"), [(Doubling, True), (IgnoringCell, False)])
def test_culprits_in_mixed_precision_are_named(part, linear):
    net = nn.SequentialCell(
        nn.Dense(3, 4).to_float(ms.float16), part().to_float(ms.float16)
    )
    report = verify_loss_scaling(
        lambda x: ops.square(net(x).astype(ms.float32)).mean(),
        net.trainable_params(),
        X,
    )
    assert report.linear == linear
    assert report.culprits == (() if linear else ("IgnoringCell",))


def test_wrong_losses_are_refused():
    """A loss is one floating scalar, the same each time. After a refusal MindSpore's
    own methods are back in place.
    """
    weight = Parameter(Tensor(np.ones(3), ms.float32), name="weight")
    call = nn.Cell.__call__
    for wrong in (
        lambda x: weight * x,
        lambda x: ((weight * x).sum(), x),
        lambda x: x.astype(ms.int32).sum(),
    ):
        with pytest.raises(gradaccum.ArgumentValueError, match="fn"):
            verify_loss_scaling(wrong, weight, X)
    with pytest.raises(gradaccum.ArgumentValueError, match="same loss each time"):
        verify_loss_scaling(lambda x: ops.dropout(weight * x, 0.5).sum(), weight, X)
    assert nn.Cell.__call__ is call
    assert "forward" in vars(DoublingFunction)
