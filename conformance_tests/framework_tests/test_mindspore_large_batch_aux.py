"""The other outputs of a loss function: each leaf merges as the user declares, to what the large batch gives."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: E402, F401
from conformance_tests.framework_tests.mindspore_large_batch import FROM_PYTHON, in_mode, tensors  # noqa: E402
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad  # noqa: E402
from gradaccum_mindspore.large_batch.value_and_update import value_and_update  # noqa: E402


@pytest.mark.parametrize("mode", FROM_PYTHON)
def test_aux_merges(mode):
    """One value of each kind, in micro-batches of 2, 2 and 1 items that weigh 1, 2 and 3."""
    weight = Parameter(Tensor(1.0, ms.float64), name="w")

    def forward(x, amount):
        found = {"sum": x.sum(), "mean": x.mean(), "weighted_mean": x.mean(), "max": x.max(), "min": x.min(), "concatenate": 10 * x}
        return (weight * x).mean(), found, x.shape[0] * x.sum() / x.sum()

    def weigh(x, amount):
        return amount.max()

    x, amount = np.array([1.0, 3.0, 5.0, 7.0, -9.0]), np.array([1.0, 1.0, 2.0, 2.0, 3.0])
    kinds = ("sum", "mean", "weighted_mean", "max", "min", "concatenate")
    made = value_and_grad(forward, None, weight, True, steps=3, weight=weigh, aux=(dict(zip(kinds, kinds, strict=True)), "max"))
    (loss, found, largest), gradient = in_mode(mode, made)(*tensors(x, amount))
    mean = (1 * 2 + 2 * 6 + 3 * -9) / 6
    assert abs(loss.asnumpy() - mean) <= 1e-15
    assert abs(gradient.asnumpy() - mean) <= 1e-15
    assert largest.asnumpy() == 2
    assert [found[kind].asnumpy().tolist() for kind in kinds] == [7.0, 7 / 5, mean, 7.0, -9.0, (10 * x).tolist()]


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
