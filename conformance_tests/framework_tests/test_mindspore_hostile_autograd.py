"""Backward passes that are not plain: hooks that replace, drop or delay a gradient, a
bprop that hands over strange tensors.

Each window makes the update that the bare optimizer makes for the large batch, or is
refused.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    needs_mindspore,
    pynative_after,  # noqa: F401
)
from gradaccum import GradientError

FACTORS = (1.0, 2.0, 5.0)
"""The micro-batches, and their weights. All sums of them are float16 numbers."""
LARGE = sum(factor**2 for factor in FACTORS) / sum(FACTORS)
OPTIONS = {
    "plain": {},
    "dropping": {"on_overflow": "drop_micro_batch"},
    "float64": {"accumulate_dtype": "float64"},
}
HALF = {"accumulate_dtype": "float16"}


def float16(parameter, value):
    return expanded(parameter, value).astype(ms.float16)


def float64(parameter, value):
    return expanded(parameter, value).astype(ms.float64)


def expanded(parameter, value):
    return ops.broadcast_to(value, parameter.shape)


def transposed(parameter, value):
    return (value * ops.ones(parameter.shape[::-1], ms.float32)).T


def every_other(parameter, value):
    whole = value * ops.ones_like(parameter)
    return ops.stack([whole, 7 * whole], -1)[..., 0]


def zeros(parameter, value):
    return (
        expanded(parameter, value) if parameter.ndim > 1 else ops.zeros_like(parameter)
    )


def none(parameter, value):
    return expanded(parameter, value) if parameter.ndim > 1 else None


def itself(parameter, value):
    return parameter


def one_row(parameter, value):
    return expanded(parameter, value)[:1]


class Handed(nn.Cell):
    """A factor times all elements of three parameters; `make` makes their gradients,
    one for the last two.
    """

    def __init__(self, make):
        super().__init__()
        self.make = make

    def construct(self, matrix, vector, other, factor):
        return factor * (matrix.sum() + vector.sum() + other.sum())

    def bprop(self, matrix, vector, other, factor, out, dout):
        shared = self.make(vector, factor * dout)
        return self.make(matrix, factor * dout), shared, shared, ops.zeros_like(factor)


class Loss(nn.Cell):
    def __init__(self, make):
        super().__init__()
        self.handed = Handed(make)
        self.matrix, self.vector, self.other = (
            Parameter(Tensor(np.full(s, 0.5, np.float32))) for s in ((2, 3), (3,), (3,))
        )

    def construct(self, factor):
        return self.handed(self.matrix, self.vector, self.other, factor)


def updated(net, inputs, options=None, *, weighted=False, compiled=False):
    """The parameters after one window; without options, of the bare optimizer."""
    inner = nn.SGD(net.trainable_params(), 1.0)
    optimizer = (
        inner
        if options is None
        else gradaccum.wrap(inner, steps=len(inputs), **options)
    )
    value_and_grad = ms.value_and_grad(net, None, optimizer.parameters)

    def micro_batch(x):
        loss, gradients = value_and_grad(x)
        if weighted:
            optimizer(gradients, weight=x)
        else:
            optimizer(gradients)
        return loss

    step = ms.jit(micro_batch) if compiled else micro_batch
    for x in inputs:
        step(Tensor(x, ms.float32))
    return [parameter.asnumpy() for parameter in net.trainable_params()]


def check(found, wanted):
    for mine, bare in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, bare, rtol=3e-7, atol=3e-7)


MAKES = (float16, float64, expanded, transposed, every_other, zeros, none, itself)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", MAKES)
def test_bprop_is_the_large_batch(make, options):
    check(
        updated(Loss(make), FACTORS, options, weighted=True),
        updated(Loss(make), [LARGE]),
    )


@needs_mindspore(
    "2.8", "before it the compiler refuses a bprop that returns another dtype"
)
@pytest.mark.parametrize("make", [float16, float64, every_other, itself])
def test_bprop_in_compiled_code(make):
    check(
        updated(Loss(make), FACTORS, HALF, weighted=True, compiled=True),
        updated(Loss(make), [LARGE]),
    )


@pytest.mark.parametrize(
    ("options", "compiled"),
    [({}, False), ({}, True), (HALF, True)],
    ids=["pynative", "jit", "half sums"],
)
def test_gradient_of_another_shape_is_not_broadcast(options, compiled):
    """MindSpore refuses it: PyNative the bprop, the compiler what adds it, which must
    not broadcast.
    """
    net = Loss(one_row)
    with pytest.raises((RuntimeError, ValueError), match="shape"):
        updated(net, FACTORS, options, compiled=compiled)
    assert net.matrix.asnumpy().tolist() == [[0.5] * 3] * 2


X = np.random.default_rng(0).standard_normal((3, 4, 3))
"""Three micro-batches of four items."""


class Net(nn.Cell):
    """The mean square of what two layers give."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Dense(3, 3, "ones", "ones"),
            nn.Dense(3, 2, "ones", "ones"),
        )

    def construct(self, x):
        return ops.square(self.second(self.first(x))).mean()


def delayed():
    """Return a hook that holds each gradient back until the last micro-batch, as a
    compressor does.
    """
    held = []

    def hook(gradient):
        held.append(gradient)
        return sum(held) if len(held) == len(X) else ops.zeros_like(gradient)

    return hook


HOOKS = {
    "replaced": lambda gradient: 3 * gradient,
    "dropped": ops.zeros_like,
    "none": lambda gradient: None,
    "expanded": lambda gradient: ops.broadcast_to(gradient.sum(), gradient.shape),
    "other dtype": lambda gradient: gradient.astype(ms.float64),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("hook", [*HOOKS, "delayed"])
def test_hook_of_a_parameter(hook, options):
    def hooked(make):
        net = Net()
        for parameter in net.trainable_params():
            parameter.register_hook(make())
        return net

    if hook == "other dtype":
        with pytest.raises(GradientError, match="let a hook"):
            updated(hooked(lambda: HOOKS[hook]), X, options)
        return
    bare = Net() if hook == "delayed" else hooked(lambda: HOOKS[hook])
    mine = hooked(delayed if hook == "delayed" else lambda: HOOKS[hook])
    check(updated(mine, X, options), updated(bare, [X.reshape(-1, 3)]))


def replaced(cell, inner, outer):
    return (3 * inner[0],)


def dropped(cell, inner, outer):
    return (ops.zeros_like(inner[0]),)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("hook", [replaced, dropped])
def test_hook_of_a_cell(hook, compiled):
    """It changes what the first layer gets, and leaves the second alone."""
    mine, bare = Net(), Net()
    for net in (mine, bare):
        net.second.register_backward_hook(hook)
    check(updated(mine, X, {}, compiled=compiled), updated(bare, [X.reshape(-1, 3)]))


@pytest.mark.filterwarnings("ignore:vjp_fn has been called multiple times")
def test_further_backward_passes_are_micro_batches():
    """Each counts: a gradient that is added twice, and four times the gradient, are
    twice the gradient in a window of three.
    """
    net = Net()
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 1.0), steps=3)
    loss, pull = ms.vjp(net, Tensor(X[0], ms.float32), weights=optimizer.parameters)
    once, four = (pull(factor * ops.ones_like(loss))[-1] for factor in (1, 4))
    assert [optimizer(each) for each in (once, once, four)] == [False, False, True]
    bare = Net()
    for parameter in bare.trainable_params():
        parameter.register_hook(lambda gradient: 2 * gradient)
    check([each.asnumpy() for each in net.trainable_params()], updated(bare, X[:1]))
