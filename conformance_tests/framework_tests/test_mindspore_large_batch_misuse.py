"""Refusals of `gradaccum_mindspore.value_and_grad`, calls that raise, and random numbers
of micro-batches.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from gradaccum_mindspore.large_batch.value_and_grad import (
    value_and_grad,
    value_and_update,
)

from .mindspore_common import pynative_after  # noqa: F401
from .mindspore_large_batch import (
    by_mode,
    in_mode,
    seed,  # noqa: F401
    tensors,
)

X = np.arange(10.0).reshape(5, 2)


def test_negative_weight_in_compiled_code():
    """Compiled code cannot refuse a value: the gradient is NaN."""
    weight = Parameter(Tensor([1.0, 2.0], ms.float64), name="w")

    def forward(x):
        return (weight * x).mean()

    def negative(x):
        return x.sum() * 0 - 1

    made = value_and_grad(forward, None, weight, steps=2, weight=negative)
    loss, gradient = in_mode("jit", made)(*tensors(X))
    assert np.isnan(loss.asnumpy())
    assert np.isnan(gradient.asnumpy()).all()


class Loss(nn.Cell):
    """A loss with statistics; its call number `failing` raises."""

    def __init__(self, failing=0, failure=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.set_train()
        self.calls = 0
        self.failing = failing
        self.failure = failure

    def construct(self, x):
        self.calls += 1
        if self.calls == self.failing:
            raise self.failure
        return (self.norm(x) ** 3).mean()


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("updates", [False, True])
def test_interrupted(failure, updates):
    """In the third micro-batch: the statistics are as before, and the next call is
    right. Of a Cell that a function calls, or of the function itself.
    """
    x = Tensor(np.random.RandomState(0).randn(6, 2), ms.float32)
    cells = [Loss(failing=3, failure=failure), Loss()]
    for cell in cells:
        gamma = cell.norm.gamma
        if updates:
            optimizer = gradaccum.wrap(nn.SGD([gamma], 1.0), steps=None)
            call = value_and_update(cell, optimizer, steps=3)
        else:
            call = value_and_grad(
                lambda x, cell=cell: cell(x), None, [gamma], steps=3, modules=(cell,)
            )
        if cell.failing:
            with pytest.raises(failure):
                call(x)
            assert not cell.norm.moving_mean.asnumpy().any()
        call(x)
    first, second = ([p.asnumpy() for p in cell.get_parameters()] for cell in cells)
    assert cells[0].norm.moving_mean.asnumpy().any()
    np.testing.assert_equal(first, second)


@by_mode
@pytest.mark.parametrize("seed", [None, 3], indirect=True)
@pytest.mark.parametrize("kind", ["layer", "operator"])
def test_no_mask_twice(mode, seed, kind):  # noqa: F811
    """A loop that MindSpore unrolls would draw one mask four times after
    `mindspore.set_seed`. The gradient by row i of the parameter is the mask of item i.
    """
    weight = Parameter(Tensor(np.ones((4, 64)), ms.float32), name="w")
    dropout = nn.Dropout(p=0.5).set_train()

    def layer(rows):
        return dropout(ops.matmul(rows, weight)).sum()

    def operator(rows):
        return ops.dropout(ops.matmul(rows, weight), 0.5).sum()

    forward = layer if kind == "layer" else operator
    call = in_mode(
        mode, value_and_grad(forward, None, weight, steps=4, reduction="sum")
    )
    rows = Tensor(np.eye(4), ms.float32)
    masks = np.concatenate([call(rows)[1].asnumpy() for _ in range(2)])
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert len({mask.tobytes() for mask in masks}) == 8
