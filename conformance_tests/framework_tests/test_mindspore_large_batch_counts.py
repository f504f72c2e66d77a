"""The cost of a large batch in one call: compiled bodies, and buffers of the model's
size.
"""

import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad

from .mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)
from .mindspore_graphs import operators, saved_graphs
from .mindspore_large_batch import in_mode

SHAPE = (37, 41)


def compiled(items):
    """The graphs of kernels of a loop over micro-batches of two items."""
    weight = Parameter(Tensor(np.ones(SHAPE) / 37, ms.float32), name="w")

    def forward(x):
        return ops.tanh(ops.matmul(x, weight)).mean()

    with saved_graphs("graph_build") as texts:
        call = in_mode(
            "cell", value_and_grad(forward, None, weight, micro_batch_size=2)
        )
        _, gradient = call(Tensor(np.ones((items, SHAPE[0])), ms.float32))
        set_mode("pynative")
    assert gradient.shape == SHAPE
    assert texts, "no graphs were saved, so the tests would count nothing"
    return texts


@pytest.fixture(scope="module")
def graphs():
    return {items: compiled(items) for items in (8, 64, 65)}


def test_one_body_for_any_number(graphs):
    """One forward and one backward product, however many micro-batches; a smaller last
    one is compiled a second time. No Python in the loop, and no constant zeros.
    """
    counts = {items: operators(*texts) for items, texts in graphs.items()}
    assert [each["MatMul"] for each in counts.values()] == [2, 2, 4]
    assert not any(each["PyExecute"] for each in counts.values())
    shape = "[" + ", ".join(map(str, SHAPE)) + "]"
    assert f"Tensor(shape={shape}" not in "".join(map("".join, graphs.values()))


def tensors():
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def test_buffers_do_not_grow():
    """Between two micro-batches one sum lives beside the parameter, and no gradient."""
    weight = Parameter(Tensor(np.ones(SHAPE) / 37, ms.float32), name="w")
    seen = []
    # Other tests left them; the shape of one whose operator failed never comes.
    others = tensors()
    known = set(map(id, others))

    def count(*batch):
        gc.collect()
        seen.append(
            sum(each.shape == SHAPE for each in tensors() if id(each) not in known)
        )
        return 1.0

    def forward(x):
        return ops.tanh(ops.matmul(x, weight)).mean()

    value_and_grad(forward, None, weight, micro_batch_size=1, weight=count)(
        Tensor(np.ones((6, SHAPE[0])), ms.float32)
    )
    assert seen == [0, 1, 1, 1, 1, 1], "the sum"
