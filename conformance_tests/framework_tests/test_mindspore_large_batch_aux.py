"""The other outputs of a loss function: each leaf merges as the user declares, to what the large batch gives."""

import pytest

pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: F401
from conformance_tests.framework_tests.mindspore_large_batch import FROM_PYTHON, in_mode
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad
from gradaccum_mindspore.large_batch.value_and_update import value_and_update


@pytest.mark.parametrize("updates", [False, True], ids=["value_and_grad", "value_and_update"])
@pytest.mark.parametrize("mode", FROM_PYTHON)
def test_dict_of_many_micro_batches(mode, updates):
    weight = Parameter(Tensor([1.0]), name="w")

    def forward(x):
        rows = x * weight
        return rows.mean(), {"total": rows.sum(), "rows": rows}

    options = {"micro_batch_size": 2, "aux": {"total": "sum", "rows": "concatenate"}}
    if updates:
        made = value_and_update(forward, gradaccum.wrap(nn.SGD([weight], 0.0), steps=None), True, **options)
    else:
        made = value_and_grad(forward, None, [weight], True, **options)
    x = np.arange(1.0, 10.0, dtype=np.float32).reshape(9, 1)
    found = in_mode(mode, made)(Tensor(x))
    loss, others = found if updates else found[0]
    assert (loss.asnumpy(), others["total"].asnumpy()) == (5.0, 45.0)
    np.testing.assert_array_equal(others["rows"].asnumpy(), x)


@pytest.mark.parametrize("weighted", [False, True], ids=["argument", "argument and weights"])
def test_outputs_beside_the_gradient_of_an_argument(weighted):
    weight = Parameter(Tensor([1.0, 1.0, 1.0, 1.0]), name="w")

    def forward(x):
        return (x * x).mean(), x.max()

    made = value_and_grad(forward, 0, [weight] if weighted else None, True, steps=2, aux="max")
    (loss, largest), gradient = made(Tensor([1.0, 2.0, 3.0, 4.0]))
    assert (loss.asnumpy(), largest.asnumpy()) == (7.5, 4.0)
    np.testing.assert_array_equal((gradient[0] if weighted else gradient).asnumpy(), [0.5, 1.0, 1.5, 2.0])
