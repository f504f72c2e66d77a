"""Backward passes that are not plain: hooks that replace or delay a gradient, a bprop
that hands over strange tensors.

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


def expanded(parameter, value):
    return ops.broadcast_to(value, parameter.shape)


def float64(parameter, value):
    return expanded(parameter, value).astype(ms.float64)


def every_other(parameter, value):
    whole = value * ops.ones_like(parameter)
    return ops.stack([whole, 7 * whole], -1)[..., 0]


def none(parameter, value):
    return expanded(parameter, value) if parameter.ndim > 1 else None


def itself(parameter, value):
    return parameter


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
    optimizer = nn.SGD(net.trainable_params(), 1.0)
    if options is not None:
        optimizer = gradaccum.wrap(optimizer, steps=len(inputs), **options)
    gradient = ms.grad(net, None, optimizer.parameters)

    def micro_batch(x):
        if weighted:
            return optimizer(gradient(x), weight=x)
        return optimizer(gradient(x))

    step = ms.jit(micro_batch) if compiled else micro_batch
    for x in inputs:
        step(Tensor(x, ms.float32))
    return [parameter.asnumpy() for parameter in net.trainable_params()]


def check(found, wanted):
    for mine, bare in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, bare, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", [float64, every_other, none, itself])
def test_bprop_is_the_large_batch(make, options):
    check(
        updated(Loss(make), FACTORS, options, weighted=True),
        updated(Loss(make), [LARGE]),
    )


@needs_mindspore(
    "2.8", "before it the compiler refuses a bprop that returns another dtype"
)
@pytest.mark.parametrize("make", [float64, itself])
def test_bprop_in_compiled_code(make):
    check(
        updated(Loss(make), FACTORS, HALF, weighted=True, compiled=True),
        updated(Loss(make), [LARGE]),
    )


X = np.random.default_rng(0).standard_normal((3, 4, 3))
"""Three micro-batches of four items."""


class Net(nn.Cell):
    """The mean square of what two layers give."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Dense(3, 3, "ones", "ones") for _ in range(2))

    def construct(self, x):
        return ops.square(self.second(self.first(x))).mean()


def hooked(make):
    net = Net()
    for parameter in net.trainable_params():
        parameter.register_hook(make())
    return net


def replaced():
    return lambda gradient: 3 * gradient


def dropped():
    return lambda gradient: None


def delayed():
    """A hook that holds each gradient back until the last micro-batch, as a compressor
    does.
    """
    held = []

    def hook(gradient):
        held.append(gradient)
        return sum(held) if len(held) == len(X) else ops.zeros_like(gradient)

    return hook


def other_dtype():
    return lambda gradient: gradient.astype(ms.float64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", [replaced, dropped, delayed])
def test_hook_of_a_parameter(make, options):
    bare = Net() if make is delayed else hooked(make)
    check(updated(hooked(make), X, options), updated(bare, [X.reshape(-1, 3)]))


def test_hook_that_changes_the_dtype_is_refused():
    with pytest.raises(
        GradientError, match=r"expected shape .* and dtype Float32; got"
    ):
        updated(hooked(other_dtype), X, {})
