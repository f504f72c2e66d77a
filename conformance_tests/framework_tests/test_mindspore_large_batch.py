"""`gradaccum_mindspore.value_and_grad`: the large batch's loss and gradients, in
float64, in every mode.
"""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)
from conformance_tests.framework_tests.mindspore_large_batch import (
    COMPILED,
    FROM_PYTHON,
    ITEMS,
    MODES,
    Net,
    X,
    Y,
    distance,
    in_mode,
    tensors,
    trained,
)
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad
from gradaccum_mindspore.large_batch.value_and_update import value_and_update

TOLERANCE = 1e-13


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    note: str


def squared(net):
    """The mean of squares."""

    def mean(x, y):
        return ((net(x) - y) ** 2).mean()

    return mean


def require_large(found, net, batch=None, forward=None):
    """What MindSpore itself gives for the whole batch."""
    call = ms.value_and_grad(forward or squared(net), None, trained(net))
    assert distance(found, call(*(batch or tensors(X, Y)))) <= TOLERANCE


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_nests(kind):
    net, (x, y) = Net(), tensors(X, Y)
    batch = {"x": x, "y": [y, y]} if kind == "dict" else Record(x, y, "kept")

    def forward(batch):
        if kind == "dict":
            return squared(net)(batch["x"], batch["y"][1])
        assert batch.note == "kept"
        return squared(net)(batch.x, batch.y)

    found = value_and_grad(forward, None, trained(net), steps=3)(batch)
    require_large(found, net)
    whole = batch["x"] if kind == "dict" else batch.x
    assert whole.shape == (ITEMS, 4), "the user's batch is as it was"


@pytest.mark.parametrize("mode", MODES)
def test_axes(mode):
    """Items along another axis, a leaf given whole, and a plain number."""
    net, batch = Net(), tensors(X.T, Y)
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
    weight, x = Parameter(Tensor(np.zeros((1, 4)), ms.float64), name="w"), Tensor(X)
    made = value_and_grad(
        lambda x: (weight * x).sum(), None, weight, micro_batch_size=1, reduction="sum"
    )
    _, gradient = made(x)
    np.testing.assert_array_equal(x.asnumpy(), X)
    np.testing.assert_allclose(gradient.asnumpy()[0], X.sum(0), rtol=1e-13)


def test_jitted_function_from_python():
    """One compiled micro-batch, called again and again."""
    net = Net()
    made = value_and_grad(ms.jit(squared(net)), None, trained(net), steps=3)
    require_large(made(*tensors(X, Y)), net)
    assert not made.trainable_params(), "the user's network is no part of the call"


@pytest.mark.parametrize("mode", FROM_PYTHON)
def test_aux_beside_an_update(mode):
    """One aux per micro-batch, in order; the labels come back as they went in."""
    weight, x = Parameter(Tensor(1.0), name="w"), Tensor([1.0, 2.0, 3.0, 4.0, 8.0])
    optimizer = gradaccum.wrap(nn.SGD([weight], 1.0), steps=None)

    def forward(x):
        return (weight * x).mean(), {"x": x, "largest": x.max()}

    made = value_and_update(forward, optimizer, has_aux=True, micro_batch_size=2)
    loss, aux = in_mode(mode, made)(x)
    assert float(loss) == pytest.approx(3.6)
    assert [each["x"].asnumpy().tolist() for each in aux] == [[1, 2], [3, 4], [8]]
    assert [float(each["largest"]) for each in aux] == [2, 4, 8]
    np.testing.assert_allclose(weight.asnumpy(), 1 - 3.6, rtol=1e-6)


@pytest.mark.parametrize("mode", ["pynative", "jit"])
@pytest.mark.parametrize(
    ("dtype", "numbers", "options"),
    [
        (ms.float16, [2048.0] + [1.0] * 8, {}),
        (ms.bfloat16, [256.0] + [1.0] * 8, {}),
        (ms.float32, [1e8, 1.0, -1e8], {"accumulate_dtype": "float64"}),
    ],
    ids=["float16", "bfloat16", "wider"],
)
def test_sums_are_wider_than_the_gradient(mode, dtype, numbers, options):
    """Added up in the gradient's own dtype the ones would be lost."""
    weight = Parameter(Tensor(0.0, dtype), name="w")

    def forward(x):
        return (weight.astype(ms.float32) * x).sum()

    options = {"micro_batch_size": 1, "reduction": "sum", **options}
    made = value_and_grad(forward, None, weight, **options)
    _, gradient = in_mode(mode, made)(Tensor(np.array(numbers), ms.float32))
    assert gradient.dtype == dtype
    assert gradient.astype(ms.float32).asnumpy() == sum(numbers)


@pytest.mark.parametrize("mode", COMPILED)
def test_open_window_in_compiled_code(mode):
    """Compiled code cannot raise: the loss is NaN, and there is no update of both
    windows together. The next window is right.
    """
    weight = Parameter(Tensor(1.0), name="w")
    optimizer = gradaccum.wrap(nn.SGD([weight], 1.0), steps=None)

    def forward(x):
        return (weight * x).mean()

    made = value_and_update(forward, optimizer, micro_batch_size=2)
    optimizer((Tensor(5.0, ms.float32),))
    x = Tensor([1.0, 2.0, 3.0, -4.0, 6.0])
    with pytest.raises(
        gradaccum.UsageError, match="optimizer: expected no open window"
    ):
        made(x)
    call = in_mode(mode, made)
    assert np.isnan(call(x).asnumpy())
    assert (weight.asnumpy(), optimizer.result.overflow) == (1, True)
    assert optimizer.result.micro_step == 0
    call(x)
    np.testing.assert_allclose(weight.asnumpy(), 1 - 1.6, rtol=1e-5)
