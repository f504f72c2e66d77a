"""Refusals of `gradaccum_mindspore.value_and_grad`, and random numbers of
micro-batches.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import COOTensor, Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: F401
from conformance_tests.framework_tests.mindspore_large_batch import (
    COMPILED,
    MODES,
    in_mode,
    seed,  # noqa: F401
    tensors,
)
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad
from gradaccum_mindspore.large_batch.value_and_update import value_and_update

X = np.arange(10.0).reshape(5, 2)


def made(forward=None, has_aux=False, **options):
    weight = Parameter(Tensor([1.0, 2.0], ms.float64), name="w")

    def plain(x, *others):
        return (weight * x).mean()

    given = plain if forward is None else lambda x, *others: forward(weight * x)
    return value_and_grad(given, None, weight, has_aux, **{"steps": 2, **options})


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"weight": 3.0}, ArgumentTypeError, "weight: expected a callable"),
        (
            {"has_aux": True},
            ArgumentValueError,
            "aux: expected how each other output merges",
        ),
        ({"aux": "mean"}, ArgumentValueError, "has_aux: expected True beside aux"),
        (
            {"has_aux": True, "aux": ("mean", {"a": "average"})},
            ArgumentValueError,
            "aux: expected one of sum",
        ),
        (
            {"split": lambda x: [x]},
            ArgumentTypeError,
            "split: expected a function that takes steps=",
        ),
        ({"accumulate_dtype": int}, ArgumentTypeError, "accumulate_dtype"),
        (
            {"steps": None, "micro_batch_size": "auto"},
            ArgumentValueError,
            "micro_batch_size: expected a number of items",
        ),
    ],
)
def test_options(options, kind, words):
    with pytest.raises(kind, match=words):
        made(**options)


def test_function():
    with pytest.raises(ArgumentTypeError, match="fn: expected a function or Cell"):
        value_and_grad(3, None, None, steps=2)


@pytest.mark.parametrize("call", ["pynative", "jit", "coupled", "update"])
def test_part_of_the_batch_by_name(call):
    x, mask = tensors(X, np.ones((5, 2)))
    optimizer = gradaccum.wrap(
        nn.SGD([Parameter(Tensor([1.0, 2.0]), name="w")], 1.0), steps=None
    )
    backward = {
        "pynative": made(),
        "jit": ms.jit(made().construct),
        "coupled": coupled_value_and_grad(
            lambda x, mask: x * mask, ops.mean, optimizer.parameters, steps=2
        ),
        "update": value_and_update(lambda x, mask: x.mean(), optimizer, steps=2),
    }[call]
    with pytest.raises(ArgumentTypeError, match="mask: expected the batch by position"):
        backward(x, mask=mask)


@pytest.mark.parametrize("mode", ["pynative", "jit"])
@pytest.mark.parametrize(
    ("options", "batch", "words"),
    [
        (
            {},
            (X, COOTensor(Tensor([[0, 1]]), Tensor([1.0]), (5, 2))),
            r"batch\[1\]: expected a Tensor or array to split; got a",
        )
    ],
)
def test_batches(mode, options, batch, words):
    with pytest.raises(ArgumentValueError, match=words):
        in_mode(mode, made(**options))(
            *(
                tensors(each)[0] if isinstance(each, np.ndarray) else each
                for each in batch
            )
        )


def test_negative_weight_in_compiled_code():
    """Compiled code cannot refuse a value: the gradient is NaN."""

    def negative(x):
        return x.sum() * 0 - 1

    loss, gradient = in_mode("jit", made(weight=negative))(*tensors(X))
    assert np.isnan(loss.asnumpy())
    assert np.isnan(gradient.asnumpy()).all()


@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"steps": None, "split": lambda x: [(x,)]}, "split"),
        (
            {"steps": None, "micro_batch_weight": 3, "weight": [1.0] * 5},
            "micro_batch_weight",
        ),
        ({"has_aux": True, "aux": "mean"}, "has_aux"),
    ],
)
def test_only_from_python(mode, options, name):
    weight = Parameter(Tensor([1.0, 2.0], ms.float64), name="w")

    def forward(x):
        return (weight * x).mean(), x

    call = value_and_grad(forward, None, weight, **{"steps": 2, **options})
    with pytest.raises(UsageError, match=f"{name}: expected a call from Python"):
        in_mode(mode, call)(*tensors(X))


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "updates", [False, True], ids=["value_and_grad", "value_and_update"]
)
def test_interrupted(failure, updates):
    """In the third micro-batch: statistics are as before, and the next call is
    right.
    """
    norm, calls = nn.BatchNorm1d(2).set_train(), []

    def forward(x):
        calls.append(1)
        if len(calls) == 3:
            raise failure("now")
        return (norm(x) ** 3).mean()

    x, weights = (
        Tensor(np.random.RandomState(0).randn(6, 2), ms.float32),
        norm.trainable_params(),
    )
    before = norm.moving_mean.asnumpy().copy()
    optimizer = gradaccum.wrap(nn.SGD(weights, 1.0), steps=None)
    call = (
        value_and_update(forward, optimizer, steps=3)
        if updates
        else value_and_grad(forward, None, weights, steps=3)
    )
    with pytest.raises(failure, match="now"):
        call(x)
    np.testing.assert_array_equal(norm.moving_mean.asnumpy(), before)
    parts = [
        ms.value_and_grad(forward, None, weights)(x[i : i + 2])[1][0].asnumpy()
        for i in (0, 2, 4)
    ]
    ops.assign(norm.moving_mean, Tensor(before))
    found = call(x)
    assert norm.moving_mean.asnumpy().any()
    gradient = 1 - weights[0].asnumpy() if updates else found[1][0].asnumpy()
    np.testing.assert_allclose(gradient, sum(parts) / 3, rtol=1e-5, atol=1e-7)


def masks(kind, items, width=64):
    """A call whose gradient by row i of a parameter is the dropout mask of item i."""
    weight, dropout = (
        Parameter(Tensor(np.ones((items, width)), ms.float32), name="w"),
        nn.Dropout(p=0.5).set_train(),
    )

    def layer(rows):
        return dropout(ops.matmul(rows, weight)).sum()

    def operator(rows):
        return ops.dropout(ops.matmul(rows, weight), 0.5).sum()

    return (
        layer if kind == "layer" else operator,
        weight,
        Tensor(np.eye(items), ms.float32),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [None, 3], indirect=True)
@pytest.mark.parametrize("kind", ["layer", "operator"])
def test_no_mask_twice(mode, seed, kind):  # noqa: F811
    """A loop that MindSpore unrolls would draw one mask four times after
    `mindspore.set_seed`.
    """
    forward, weight, rows = masks(kind, 4)
    call = in_mode(
        mode, value_and_grad(forward, None, weight, steps=4, reduction="sum")
    )
    found = np.concatenate([call(rows)[1].asnumpy() for _ in range(2)])
    assert set(np.unique(found)) == {0.0, 2.0}
    assert len({mask.tobytes() for mask in found}) == 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [3], indirect=True)
def test_two_sizes_of_random_micro_batches(mode, seed):  # noqa: F811
    """Two compiled sizes would begin with the same numbers; PyNative goes on where it
    stopped.
    """
    forward, weight, rows = masks("layer", 5)
    call = in_mode(
        mode, value_and_grad(forward, None, weight, micro_batch_size=2, reduction="sum")
    )
    if mode == "pynative":
        assert len({mask.tobytes() for mask in call(rows)[1].asnumpy()}) == 5
        return
    with pytest.raises(UsageError, match="Dropout starts in each at the seed"):
        call(rows)


@pytest.mark.parametrize(
    "nest", [{"x": 0, "y": 1}, (0, 1), [0, 1]], ids=["dict", "tuple", "list"]
)
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_nest_to_differentiate_by(mode, nest):
    """MindSpore gives no gradient of it in PyNative: those of the weights would be
    taken for it, and concatenated.
    """
    weight, arrays = Parameter(Tensor([1.0, 2.0], ms.float64), name="w"), tensors(X, X)
    batch = (
        {key: arrays[place] for key, place in nest.items()}
        if isinstance(nest, dict)
        else type(nest)(arrays)
    )
    call = in_mode(
        mode,
        value_and_grad(lambda x, batch: (x * weight).mean(), (0, 1), [weight], steps=2),
    )
    with pytest.raises(
        ArgumentValueError,
        match=r"grad_position: expected an argument that is one Tensor.*argument 1, a",
    ):
        call(arrays[0], batch)


def test_dynamic_number_of_items():
    """A compiled loop over micro-batches knows how many there are."""
    weight = Parameter(Tensor([1.0, 2.0]), name="w")

    def forward(x):
        return (x * weight).mean()

    call = value_and_grad(forward, None, [weight], steps=2)

    @ms.jit(dynamic=1)
    def step(x):
        return call(x)

    for items in (4, 6):  # MindSpore compiles these two as they are.
        step(Tensor(np.ones((items, 2)), ms.float32))
    with pytest.raises(
        ArgumentValueError,
        match=r"batch\[0\]: expected a known number of items along axis 0",
    ):
        step(Tensor(np.ones((8, 2)), ms.float32))


class Gate(nn.Cell):
    """Weighs items by a parameter, or counts them if that is 0."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0, 2.0], ms.float64), name="w")

    def construct(self, x, m):
        return ops.exp(ops.matmul(x, self.w)).sum()


def weighted_mean(gate, x, m):
    """By the mask and the gate, both of which are in the denominator."""
    each = m * ops.exp(ops.matmul(x, gate.w))
    return (each * ops.square(ops.matmul(x, gate.w))).sum() / each.sum()


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize(
    ("place", "reduction"), [(1, "mean"), ((0, 1), "sum_per_item")]
)
def test_weight_that_depends_on_an_argument(mode, place, reduction):
    """Without its derivative the gradient by the mask would be some 10 % off."""
    gate, batch = Gate(), tensors(X, np.linspace(0.2, 2, 5))

    def forward(x, m):
        return weighted_mean(gate, x, m)

    for weight in (
        lambda x, m: m.sum(),
        lambda x, m: ops.exp(ops.matmul(x, gate.w)).sum() * m[0],
    ):
        with pytest.raises(
            ArgumentValueError,
            match=r"weight: expected a weight that stays.*ops\.stop_gradient",
        ):
            in_mode(
                mode,
                value_and_grad(
                    forward,
                    place,
                    [gate.w],
                    steps=2,
                    weight=weight,
                    reduction=reduction,
                ),
            )(*batch)
    counting = (
        lambda x, m: (m > 0.5).sum(),
        lambda x, m: ops.stop_gradient(m).sum(),
        lambda x, m: len(m),
        None,
    )
    for weight in counting:
        in_mode(
            mode,
            value_and_grad(
                forward, place, [gate.w], steps=2, weight=weight, reduction=reduction
            ),
        )(*batch)
    in_mode(
        mode,
        value_and_grad(
            forward,
            None,
            [gate.w],
            steps=2,
            weight=lambda x, m: m.sum(),
            reduction=reduction,
        ),
    )(*batch)
    in_mode(
        mode,
        value_and_grad(
            forward,
            place,
            [gate.w],
            steps=2,
            weight=lambda x, m: m.sum(),
            reduction="sum",
        ),
    )(*batch)


def test_weight_that_depends_on_parameters():
    """Itself, by a Cell or by a function that it calls. What is not differentiated may
    move it.
    """
    gate, other, batch = Gate(), Gate(), tensors(X / 10, np.ones(5))

    def forward(x, m):
        return weighted_mean(gate, x, m)

    def of_gate(x, m):
        return gate(x, m)

    for weight in (gate, lambda x, m: gate.w.sum() + len(x), of_gate):
        for mode in ("pynative", "graph"):
            with pytest.raises(
                ArgumentValueError, match=r"weight: expected a weight that stays"
            ):
                in_mode(
                    mode,
                    value_and_grad(forward, None, [gate.w], steps=2, weight=weight),
                )(*batch)
    optimizer = gradaccum.wrap(nn.Momentum([gate.w], 0.1, 0.9), steps=None)
    with pytest.raises(
        ArgumentValueError, match=r"weight: expected a weight that stays"
    ):
        value_and_update(forward, optimizer, steps=2, weight=gate)(*batch)
    assert (optimizer.result.micro_step, optimizer.result.optimizer_step) == (0, 0)
    value_and_grad(forward, None, [gate.w], steps=2, weight=other)(*batch)


def test_compiled_weight_that_depends_on_parameters():
    """Compiled code cannot raise: all becomes NaN, and the window is an overflow."""
    gate, batch = Gate(), tensors(X / 10, np.ones(5))

    def forward(x, m):
        return weighted_mean(gate, x, m)

    def counted(x, m):
        return ops.stop_gradient(gate(x, m))

    for weight, bad in ((gate, True), (counted, False)):
        loss, (gradient,) = ms.jit(
            value_and_grad(forward, None, [gate.w], steps=2, weight=weight).construct
        )(*batch)
        assert (
            bool(np.isnan(loss.asnumpy()))
            == bool(np.isnan(gradient.asnumpy()).all())
            == bad
        )
    optimizer = gradaccum.wrap(nn.Momentum([gate.w], 0.1, 0.9), steps=None)
    loss = ms.jit(value_and_update(forward, optimizer, steps=2, weight=gate).construct)(
        *batch
    )
    assert np.isnan(loss.asnumpy())
    assert optimizer.result.overflow
