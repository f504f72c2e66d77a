"""Refusals of `gradaccum_mindspore.value_and_grad`, calls that raise, and random numbers
of micro-batches.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: F401
from conformance_tests.framework_tests.mindspore_large_batch import (
    MODES,
    distance,
    in_mode,
    seed,  # noqa: F401
    tensors,
)
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad
from gradaccum_mindspore.large_batch.value_and_update import value_and_update

X = np.arange(10.0).reshape(5, 2)


def parameter(dtype=ms.float64):
    return Parameter(Tensor([1.0, 2.0], dtype), name="w")


def made(**options):
    weight = parameter()

    def forward(x):
        loss = (weight * x).mean()
        return (loss, x) if options.get("has_aux") else loss

    return value_and_grad(forward, None, weight, **{"steps": 2, **options})


OF_A_LIST = {"steps": None, "micro_batch_weight": 3, "weight": [1.0] * 5}
REFUSED = [
    ("pynative", {"weight": 3.0}, "weight: expected a callable"),
    ("pynative", {"has_aux": True}, "aux: expected how each other output merges"),
    ("pynative", {"aux": "mean"}, "has_aux: expected True beside aux"),
    (
        "pynative",
        {"steps": None, "micro_batch_size": "auto"},
        "micro_batch_size: expected a number of items",
    ),
    (
        "jit",
        {"steps": None, "split": lambda x: [(x,)]},
        "split: expected a call from Python",
    ),
    ("jit", OF_A_LIST, "micro_batch_weight: expected a call from Python"),
    ("jit", {"has_aux": True, "aux": "mean"}, "has_aux: expected a call from Python"),
]


@pytest.mark.parametrize(("mode", "options", "words"), REFUSED)
def test_options_are_refused(mode, options, words):
    with pytest.raises(gradaccum.GradAccumError, match=words):
        in_mode(mode, made(**options))(*tensors(X))


@pytest.mark.parametrize("call", ["pynative", "jit"])
def test_part_of_the_batch_by_name(call):
    made_of = made().construct
    with pytest.raises(ArgumentTypeError, match="mask: expected the batch by position"):
        (ms.jit(made_of) if call == "jit" else made())(
            *tensors(X), mask=Tensor(np.ones((5, 2)))
        )


def test_negative_weight_in_compiled_code():
    """Compiled code cannot refuse a value: the gradient is NaN."""

    def negative(x):
        return x.sum() * 0 - 1

    loss, gradient = in_mode("jit", made(weight=negative))(*tensors(X))
    assert np.isnan(loss.asnumpy())
    assert np.isnan(gradient.asnumpy()).all()


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("updates", [False, True])
def test_interrupted(failure, updates):
    """In the third micro-batch: statistics are as before, and the next call is
    right.
    """
    norms, calls = [nn.BatchNorm1d(2).set_train() for _ in range(2)], []
    (norm, other), x = norms, Tensor(np.random.RandomState(0).randn(6, 2), ms.float32)
    results = []
    for each in norms:

        def forward(x, each=each):
            calls.append(each)
            if len(calls) == 3:
                raise failure("now")
            return (each(x) ** 3).mean()

        optimizer = gradaccum.wrap(nn.SGD([each.gamma], 1.0), steps=None)
        call = (
            value_and_update(forward, optimizer, steps=3)
            if updates
            else value_and_grad(forward, None, [each.gamma], steps=3)
        )
        if each is norm:
            with pytest.raises(failure, match="now"):
                call(x)
            assert not norm.moving_mean.asnumpy().any()
        results.append(call(x))
    assert norm.moving_mean.asnumpy().any()
    for name in ("moving_mean", "gamma"):
        found, expected = (getattr(each, name).asnumpy() for each in (norm, other))
        np.testing.assert_array_equal(found, expected)
    if not updates:
        assert distance(*results) == 0


def masks(kind, items, width=64):
    """A function whose gradient by row i of a parameter is the dropout mask of item
    i.
    """
    weight = Parameter(Tensor(np.ones((items, width)), ms.float32), name="w")
    dropout = nn.Dropout(p=0.5).set_train()

    def layer(rows):
        return dropout(ops.matmul(rows, weight)).sum()

    def operator(rows):
        return ops.dropout(ops.matmul(rows, weight), 0.5).sum()

    rows = Tensor(np.eye(items), ms.float32)
    return layer if kind == "layer" else operator, weight, rows


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


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize("nest", [dict, tuple])
def test_nest_to_differentiate_by(mode, nest):
    """MindSpore gives no gradient of it in PyNative: those of the weights would be
    taken for it, and concatenated.
    """
    weight, (x,) = parameter(), tensors(X)
    batch = {"x": x, "y": x} if nest is dict else (x, x)

    def forward(x, batch):
        return (x * weight).mean()

    call = in_mode(mode, value_and_grad(forward, (0, 1), [weight], steps=2))
    with pytest.raises(
        ArgumentValueError,
        match=r"grad_position: expected an argument that is one Tensor.*argument 1, a",
    ):
        call(x, batch)


def test_dynamic_number_of_items():
    """A compiled loop over micro-batches knows how many there are."""
    call = made()

    @ms.jit(dynamic=1)
    def step(x):
        return call(x)

    for items in (4, 6):  # MindSpore compiles these two as they are.
        step(Tensor(np.ones((items, 2))))
    with pytest.raises(
        ArgumentValueError,
        match=r"batch\[0\]: expected a known number of items along axis 0",
    ):
        step(Tensor(np.ones((8, 2))))


class Gate(nn.Cell):
    """Weighs items by a parameter."""

    def __init__(self):
        super().__init__()
        self.w = parameter()

    def construct(self, x, m):
        return ops.exp(ops.matmul(x, self.w)).sum()


def gated(gate):
    """A mean by the mask and the gate, both of which are in the denominator."""

    def weighted_mean(x, m):
        each = m * ops.exp(ops.matmul(x, gate.w))
        return (each * ops.square(ops.matmul(x, gate.w))).sum() / each.sum()

    return weighted_mean


STAYS = r"weight: expected a weight that stays"


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize(
    ("place", "reduction"), [(1, "mean"), ((0, 1), "sum_per_item")]
)
def test_weight_that_depends_on_an_argument(mode, place, reduction):
    """Without its derivative the gradient by the mask would be some 10 % off."""
    gate, batch = Gate(), tensors(X, np.linspace(0.2, 2, 5))

    def call(weight, place=place, reduction=reduction):
        options = {"steps": 2, "weight": weight, "reduction": reduction}
        made = value_and_grad(gated(gate), place, [gate.w], **options)
        return in_mode(mode, made)(*batch)

    def of_mask(x, m):
        return m.sum()

    with pytest.raises(ArgumentValueError, match=STAYS + r".*ops\.stop_gradient"):
        call(of_mask)
    for weight in (
        lambda x, m: (m > 0.5).sum(),
        lambda x, m: ops.stop_gradient(m).sum(),
        lambda x, m: len(m),
        None,
    ):
        call(weight)
    call(of_mask, place=None)
    call(of_mask, reduction="sum")


def test_weight_that_depends_on_parameters():
    """Itself, by a Cell or by a function that it calls. What is not differentiated may
    move it. Compiled code cannot raise: all becomes NaN.
    """
    gate, batch = Gate(), tensors(X / 10, np.ones(5))

    def of_gate(x, m):
        return gate(x, m)

    def counted(x, m):
        return ops.stop_gradient(gate(x, m))

    def call(weight):
        return value_and_grad(gated(gate), None, [gate.w], steps=2, weight=weight)

    for weight in (gate, lambda x, m: gate.w.sum() + len(x), of_gate):
        for mode in ("pynative", "graph"):
            with pytest.raises(ArgumentValueError, match=STAYS):
                in_mode(mode, call(weight))(*batch)
    for weight, bad in ((gate, True), (counted, False)):
        loss, (gradient,) = in_mode("jit", call(weight))(*batch)
        assert np.isnan(loss.asnumpy()) == bad
        assert np.isnan(gradient.asnumpy()).all() == bad
    in_mode("pynative", call(Gate()))(*batch)


def test_window_whose_weight_depends_on_parameters():
    """It is refused, and in compiled code an overflow."""
    gate, batch = Gate(), tensors(X / 10, np.ones(5))
    optimizer = gradaccum.wrap(nn.Momentum([gate.w], 0.1, 0.9), steps=None)
    made = value_and_update(gated(gate), optimizer, steps=2, weight=gate)
    with pytest.raises(ArgumentValueError, match=STAYS):
        made(*batch)
    assert (optimizer.result.micro_step, optimizer.result.overflow) == (0, False)
    assert np.isnan(in_mode("jit", made)(*batch).asnumpy())
    assert optimizer.result.overflow
