"""`gradaccum_mindspore.value_and_grad`: the large batch's loss and gradients, in
float64, in every mode.
"""

import dataclasses
import itertools
from collections import namedtuple

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
from gradaccum import ArgumentValueError
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad
from gradaccum_mindspore.large_batch.value_and_update import value_and_update

TOLERANCE = 1e-13


Pair = namedtuple("Pair", "x y")


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


def nested(kind, x, y):
    return {
        "dict": ({"x": x, "y": [y, y]},),
        "named tuple": (Pair(x, y),),
        "dataclass": (Record(x, y, "kept"),),
    }[kind]


@pytest.mark.parametrize("kind", ["dict", "named tuple", "dataclass"])
def test_nests(kind):
    net, (x, y) = Net(), tensors(X, Y)

    def forward(batch):
        assert kind != "dataclass" or batch.note == "kept"
        x, y = (batch["x"], batch["y"][1]) if kind == "dict" else (batch.x, batch.y)
        return ((net(x) - y) ** 2).mean()

    batch = nested(kind, x, y)
    expected = ms.value_and_grad(squared(net), None, trained(net))(x, y)
    assert (
        distance(value_and_grad(forward, None, trained(net), steps=3)(*batch), expected)
        <= TOLERANCE
    )
    whole = batch[0].x if kind != "dict" else batch[0]["x"]
    assert whole.shape == (ITEMS, 4), "the user's batch is as it was"


@pytest.mark.parametrize("mode", MODES)
def test_axes(mode):
    """Items along another axis, a leaf given whole, and a plain number."""
    net, (x, y) = Net(), tensors(X.T, Y)

    def forward(batch, scale, power):
        return (scale.sum() * (net(batch["x"].T) - batch["y"][0]) ** power).mean()

    scale = Tensor([0.5, 1.0, 1.5, 2.0], ms.float64)

    def whole(x, y):
        return forward({"x": x, "y": [y]}, scale, 2)

    def call(x, y):
        return made({"x": x, "y": [y]}, scale, 2)

    expected = ms.value_and_grad(whole, None, trained(net))(x, y)
    made = value_and_grad(
        forward, None, trained(net), steps=3, axes=({"x": 1, "y": 0}, None, None)
    )
    assert distance(in_mode(mode, call)(x, y), expected) <= TOLERANCE


def test_texts_are_split():
    net, seen = Net(), []

    def forward(x, names):
        seen.append(names)
        return net(x).mean()

    value_and_grad(forward, None, trained(net), micro_batch_size=2)(
        *tensors(X[:3]), ["a", "b", "c"]
    )
    assert seen == [["a", "b"], ["c"]]


def test_list_of_items_is_split():
    """One dict per item, in Python; compiled code has no lists to cut."""
    net, seen = Net(), []

    def forward(x, targets):
        seen.append([float(target["boxes"][0]) for target in targets])
        return net(x).mean()

    targets = tuple({"boxes": Tensor([float(place)] * 3)} for place in range(3))
    made = value_and_grad(
        forward, None, trained(net), micro_batch_size=2, axes=(0, "items")
    )
    made(*tensors(X[:3]), targets)
    assert seen == [[0.0, 1.0], [2.0]]
    for batch in ((*tensors(X[:3]), targets), (*tensors(X[:3]), [0.5, 0.5, 0.5])):
        with pytest.raises(
            ArgumentValueError,
            match=(
                r"batch\[1\]: expected Tensors to split in compiled code; got a list of"
                r" items"
            ),
        ):
            in_mode(
                "jit",
                value_and_grad(forward, None, trained(net), steps=2, axes=(0, "items")),
            )(*batch)


def test_own_split():
    """Sequences packed into one row, with their cumulative lengths: no axis of items to
    cut along.
    """
    net, (x,) = Net(), tensors(X)
    starts = [0, 2, 3, 7]

    def forward(x, starts):
        parts = [net(x[a:b]).mean() for a, b in itertools.pairwise(starts)]
        return sum(parts) / len(parts)

    def split(x, starts, steps):
        assert steps == 2
        yield x[:3], starts[:3]
        yield x[3:], [0, 4]

    expected = ms.value_and_grad(forward, None, trained(net))(x, starts)
    made = value_and_grad(
        forward,
        None,
        trained(net),
        steps=2,
        split=split,
        weight=lambda x, starts: len(starts) - 1,
        axes=(0, None),
    )
    assert distance(made(x, starts), expected) <= TOLERANCE


def test_gradients_of_arguments():
    """The gradient of an argument that is divided has a part for each item; that of one
    given whole is a sum.
    """
    net, (x, y) = Net(), tensors(X, Y)
    shift = Tensor([0.5, -1.0], ms.float64)

    def forward(x, y, shift):
        return ((net(x.T) + shift - y) ** 2).mean()

    batch = (x.T, y, shift)
    expected = ms.value_and_grad(forward, (0, 2), trained(net))(*batch)
    found = value_and_grad(forward, (0, 2), trained(net), steps=3, axes=(1, 0, None))(
        *batch
    )
    assert distance(found, expected) <= TOLERANCE
    alone = value_and_grad(forward, 0, None, steps=3, axes=(1, 0, None))(*batch)
    assert distance(alone, (expected[0], expected[1][0][0])) <= TOLERANCE


def test_batch_is_not_written():
    """The gradient of sum(w * x) by w is x itself, which a sum in place would
    change.
    """
    weight = Parameter(Tensor(np.zeros((1, 4)), ms.float32), name="w")

    x = Tensor(X, ms.float32)
    before = x.asnumpy().copy()
    _, gradient = value_and_grad(
        lambda x: (weight * x).sum(), None, weight, micro_batch_size=1, reduction="sum"
    )(x)
    np.testing.assert_array_equal(x.asnumpy(), before)
    np.testing.assert_allclose(gradient.asnumpy()[0], before.sum(0), rtol=1e-6)


def test_jitted_function_from_python():
    """One compiled micro-batch, called again and again."""
    net, (x, y) = Net(), tensors(X, Y)
    mean = squared(net)
    expected = ms.value_and_grad(mean, None, trained(net))(x, y)
    assert (
        distance(
            value_and_grad(ms.jit(mean), None, trained(net), steps=3)(x, y), expected
        )
        <= TOLERANCE
    )


def test_cell_keeps_its_parameters():
    """The user's network is no part of the call: its names and its lists of parameters
    stay.
    """
    net = Net()
    made = value_and_grad(
        nn.WithLossCell(net, nn.MSELoss()), None, trained(net), steps=3
    )
    assert [parameter.name for parameter in made.trainable_params()] == []
    set_mode("pynative")
    assert made(*tensors(X, Y))[0].shape == ()


@pytest.mark.parametrize(
    "updates", [False, True], ids=["value_and_grad", "value_and_update"]
)
@pytest.mark.parametrize("mode", FROM_PYTHON)
def test_dict_of_many_micro_batches(mode, updates):
    weight = Parameter(Tensor([1.0]), name="w")

    def forward(x):
        rows = x * weight
        return rows.mean(), {"total": rows.sum(), "rows": rows}

    options = {"micro_batch_size": 2, "aux": {"total": "sum", "rows": "concatenate"}}
    if updates:
        made = value_and_update(
            forward, gradaccum.wrap(nn.SGD([weight], 0.0), steps=None), True, **options
        )
    else:
        made = value_and_grad(forward, None, [weight], True, **options)
    x = np.arange(1.0, 10.0, dtype=np.float32).reshape(9, 1)
    found = in_mode(mode, made)(Tensor(x))
    loss, others = found if updates else found[0]
    assert (loss.asnumpy(), others["total"].asnumpy()) == (5.0, 45.0)
    np.testing.assert_array_equal(others["rows"].asnumpy(), x)


@pytest.mark.parametrize(
    "weighted", [False, True], ids=["argument", "argument and weights"]
)
def test_outputs_beside_the_gradient_of_an_argument(weighted):
    weight = Parameter(Tensor([1.0, 1.0, 1.0, 1.0]), name="w")

    def forward(x):
        return (x * x).mean(), x.max()

    made = value_and_grad(
        forward, 0, [weight] if weighted else None, True, steps=2, aux="max"
    )
    (loss, largest), gradient = made(Tensor([1.0, 2.0, 3.0, 4.0]))
    assert (loss.asnumpy(), largest.asnumpy()) == (7.5, 4.0)
    np.testing.assert_array_equal(
        (gradient[0] if weighted else gradient).asnumpy(), [0.5, 1.0, 1.5, 2.0]
    )


@pytest.mark.parametrize("mode", ["pynative", "jit"])
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_half_precision_sums_in_float32(mode, dtype):
    """2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16: a sum in that dtype
    would stay at its first number.
    """
    weight = Parameter(Tensor(0.0, dtype), name="w")

    def forward(x):
        return (weight.astype(ms.float32) * x).sum()

    large = 2048.0 if dtype == ms.float16 else 256.0
    x = Tensor(np.array([large] + [1.0] * 8), ms.float32)
    _, gradient = in_mode(
        mode, value_and_grad(forward, None, weight, steps=9, reduction="sum")
    )(x)
    assert gradient.dtype == dtype
    assert gradient.astype(ms.float32).asnumpy() == large + 8


def test_wider_sums():
    """``accumulate_dtype`` is that of the sums, and the gradient has its own: 1e8 + 1 -
    1e8 is 1 in float64.
    """
    weight = Parameter(Tensor(0.0, ms.float32), name="w")

    def forward(x):
        return (weight * x).sum()

    x = Tensor([1e8, 1.0, -1e8], ms.float32)
    made = (
        value_and_grad(
            forward, None, weight, steps=3, reduction="sum", accumulate_dtype=d
        )(x)[1]
        for d in (None, "float64")
    )
    assert [(each.asnumpy().tolist(), each.dtype) for each in made] == [
        (0.0, ms.float32),
        (1.0, ms.float32),
    ]


# `gradaccum_mindspore.value_and_update`: a whole window of a wrapped optimizer in one
# call.


NUMBERS = np.array([1.0, 2.0, 3.0, -4.0, 6.0])
"""The gradient of mean(w x) by w is the mean of x, 1.6."""


def window(call, start=1.0, dtype=ms.float32, has_aux=False, **options):
    """A wrapped SGD at rate 1 over one parameter, and the call made of
    ``mean(w x)``.
    """
    weight = Parameter(Tensor(start, dtype), name="w")

    def forward(x):
        loss = (weight * x.astype(weight.dtype)).astype(ms.float32).mean()
        return (loss, x.max()) if has_aux else loss

    optimizer = gradaccum.wrap(nn.SGD([weight], 1.0), steps=None, **options)
    return (
        weight,
        optimizer,
        value_and_update(
            forward, optimizer, has_aux, **{"micro_batch_size": 2, **call}
        ),
    )


def value(weight):
    return float(weight.astype(ms.float32).asnumpy())


def test_sums_in_float32():
    """2048 + 1 is 2048 in float16."""
    weight, _, made = window(
        {"micro_batch_size": 1}, dtype=ms.float16, start=0.0, reduction="sum"
    )
    made(Tensor([2048.0, 1.0, 1.0], ms.float32))
    assert value(weight) == -2050


def test_open_window_is_refused():
    weight, optimizer, made = window({})
    optimizer((Tensor(5.0, ms.float32),))
    with pytest.raises(
        gradaccum.UsageError, match="optimizer: expected no open window"
    ):
        made(Tensor(NUMBERS, ms.float32))
    optimizer.flush()
    assert value(weight) == -4, "what was there is still there"


@pytest.mark.parametrize("mode", COMPILED)
def test_open_window_in_compiled_code(mode):
    """Compiled code cannot raise: the loss is NaN, and there is no update of both
    windows together.
    """
    weight, optimizer, made = window({})
    optimizer((Tensor(5.0, ms.float32),))
    call = in_mode(mode, made)
    assert np.isnan(call(Tensor(NUMBERS, ms.float32)).asnumpy())
    assert (value(weight), optimizer.result.overflow, optimizer.result.micro_step) == (
        1,
        True,
        0,
    )
    call(Tensor(NUMBERS, ms.float32))
    assert abs(value(weight) - (1 - 1.6)) <= 1e-6, "the next window is right"


def test_misuse():
    with pytest.raises(
        gradaccum.ArgumentTypeError, match="optimizer: expected a wrapped optimizer"
    ):
        value_and_update(
            lambda x: x, nn.SGD([Parameter(Tensor(1.0), name="w")], 1.0), steps=2
        )
