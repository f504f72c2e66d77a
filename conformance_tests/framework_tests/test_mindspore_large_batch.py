"""`gradaccum_mindspore.value_and_grad`: the large batch's loss and gradients, in
float64, in every mode.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from numpy.testing import assert_allclose

import gradaccum
from gradaccum_mindspore.large_batch.value_and_grad import (
    value_and_grad,
    value_and_update,
)

from .mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)
from .mindspore_large_batch import (
    Net,
    X,
    Y,
    by_mode,
    distance,
    in_mode,
    tensors,
    trained,
)

TOLERANCE = 1e-13


def squared(net):
    """The mean of squares."""

    def mean(x, y):
        return ((net(x) - y) ** 2).mean()

    return mean


def require_large(found, net, batch=None, forward=None):
    """What MindSpore itself gives for the whole batch."""
    call = ms.value_and_grad(forward or squared(net), None, trained(net))
    assert distance(found, call(*(batch or tensors(X, Y)))) <= TOLERANCE


def test_arrays_by_keyword_are_cut():
    net = Net()
    x, y = tensors(X, Y)
    made = value_and_grad(squared(net), None, trained(net), steps=3)
    require_large(made(x, y=y), net)
    require_large(made(y=y, x=x), net)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        made(x, z=y)

    def forward(x, *, y):
        return squared(net)(x, y)

    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match="y: expected a parameter that can also be passed",
    ):
        value_and_grad(forward, None, trained(net), steps=3)(x, y=y)


def test_jitted_function_from_python():
    """One compiled micro-batch, called again and again, with an aux of each."""
    net = Net()

    def forward(x, y):
        return squared(net)(x, y), y

    made = value_and_grad(ms.jit(forward), None, trained(net), True, steps=3)
    (loss, labels), gradients = made(*tensors(X, Y))
    require_large((loss, gradients), net)
    assert np.array_equal(np.concatenate([each.asnumpy() for each in labels]), Y)
    assert not made.trainable_params(), "the user's network is no part of the call"


@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_wider_sums(mode):
    """Added up in the gradient's own dtype the 1 would be lost."""
    weight = Parameter(Tensor(0.0, ms.float32), name="w")

    def forward(x):
        return (weight * x).sum()

    made = value_and_grad(
        forward,
        None,
        weight,
        micro_batch_size=1,
        reduction="sum",
        accumulate_dtype="float64",
    )
    _, gradient = in_mode(mode, made)(Tensor([1e8, 1.0, -1e8], ms.float32))
    assert gradient.dtype == ms.float32
    assert gradient.asnumpy() == 1.0


@by_mode
def test_axes(mode):
    """Items along another axis, a leaf given whole, and a plain number."""
    net = Net()
    batch = tensors(X.T, Y)
    scale = Tensor([0.5, 1.0, 1.5, 2.0], ms.float64)

    def forward(batch, scale, power):
        return (scale.sum() * (net(batch["x"].T) - batch["y"][0]) ** power).mean()

    def whole(x, y):
        return forward({"x": x, "y": [y]}, scale, 2)

    made = value_and_grad(
        forward, None, trained(net), steps=3, axes=({"x": 1, "y": 0}, None, None)
    )

    def call(x, y):
        return made({"x": x, "y": [y]}, scale, 2)

    found = in_mode(mode, call)(*batch)
    set_mode("pynative")
    require_large(found, net, batch, forward=whole)


def test_batch_is_not_written():
    """The gradient of sum(w * x) by w is x itself, which a sum in place would
    change.
    """
    weight = Parameter(Tensor(np.zeros((1, 4)), ms.float64), name="w")
    x = Tensor(X)
    made = value_and_grad(
        lambda x: (weight * x).sum(), None, weight, micro_batch_size=1, reduction="sum"
    )
    _, gradient = made(x)
    np.testing.assert_array_equal(x.asnumpy(), X)
    assert_allclose(gradient.asnumpy()[0], X.sum(0), rtol=1e-13)


@by_mode
def test_open_window_belongs_to_the_update(mode):
    """Two items came before; the call brings three more, and ends the window of five."""
    weight = Parameter(Tensor(1.0), name="w")
    optimizer = gradaccum.wrap(nn.SGD([weight], 1.0), steps=None)

    def forward(x):
        return (weight * x).mean()

    made = value_and_update(forward, optimizer, micro_batch_size=2)
    optimizer((Tensor(5.0, ms.float32),), weight=2)
    loss = in_mode(mode, made)(Tensor([1.0, 2.0, 6.0]))
    assert_allclose(loss.asnumpy(), 3)
    assert_allclose(weight.asnumpy(), 1 - (2 * 5 + 9) / 5, rtol=1e-6)
    assert optimizer.result.micro_step == 0
    assert optimizer.result.optimizer_step == 1
