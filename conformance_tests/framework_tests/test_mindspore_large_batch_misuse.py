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
from gradaccum import ArgumentValueError
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


REFUSED = [
    ("pynative", {"weight": 3.0}, "weight: expected 5 finite numbers"),
    (
        "pynative",
        {"steps": None, "micro_batch_size": "auto"},
        "micro_batch_size: expected a number of items",
    ),
    ("jit", {"has_aux": True}, "has_aux: expected a call from Python"),
]


@pytest.mark.parametrize(("mode", "options", "words"), REFUSED)
def test_options_are_refused(mode, options, words):
    with pytest.raises(gradaccum.GradAccumError, match=words):
        in_mode(mode, made(**options))(*tensors(X))


def test_gradient_of_an_argument():
    """It is MindSpore's default, and this call gives none."""
    with pytest.raises(ArgumentValueError, match="grad_position: expected None"):
        value_and_grad(lambda x: x.mean(), 0, parameter(), steps=2)


def test_text_for_a_list_in_compiled_code():
    """Lists of numbers are cut from Python alone; compiled code refuses them."""
    weight = parameter()

    def forward(x, names):
        return (weight * x).mean()

    call = value_and_grad(forward, None, weight, steps=2)
    call(*tensors(X), [1, 2, 3, 4, 5])

    @ms.jit
    def compiled(x):
        return call(x, [1, 2, 3, 4, 5])

    with pytest.raises(ArgumentValueError, match=r"batch\[1\].*which may be the items"):
        compiled(*tensors(X))


def test_negative_weight_in_compiled_code():
    """Compiled code cannot refuse a value: the gradient is NaN."""

    def negative(x):
        return x.sum() * 0 - 1

    loss, gradient = in_mode("jit", made(weight=negative))(*tensors(X))
    assert np.isnan(loss.asnumpy())
    assert np.isnan(gradient.asnumpy()).all()


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_interrupted(failure, updates, named):
    """In the third micro-batch: the statistics of the named Cells, or of the function
    itself, are as before, and the next call is right.
    """

    class Loss(nn.Cell):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def construct(self, x):
            calls.append(self)
            if len(calls) == 3:
                raise failure("now")
            return (self.norm(x) ** 3).mean()

    calls, (first, second) = [], [Loss().set_train() for _ in range(2)]
    x = Tensor(np.random.RandomState(0).randn(6, 2), ms.float32)
    results = []
    for cell in (first, second):
        forward = (lambda x, cell=cell: cell(x)) if named else cell
        options = {"steps": 3, "modules": (cell,) if named else ()}
        gamma = cell.norm.gamma
        optimizer = gradaccum.wrap(nn.SGD([gamma], 1.0), steps=None)
        call = (
            value_and_update(forward, optimizer, **options)
            if updates
            else value_and_grad(forward, None, [gamma], **options)
        )
        if cell is first:
            with pytest.raises(failure, match="now"):
                call(x)
            assert not cell.norm.moving_mean.asnumpy().any()
        results.append(call(x))
    assert first.norm.moving_mean.asnumpy().any()
    for name in ("moving_mean", "gamma"):
        found, expected = (
            getattr(cell.norm, name).asnumpy() for cell in (first, second)
        )
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
