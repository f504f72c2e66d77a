"""Refusals of `gradaccum_mindspore.coupled_value_and_grad`, from Python and in compiled code, where randomness gives NaN instead."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: E402, F401
from conformance_tests.framework_tests.mindspore_large_batch import COMPILED, in_mode, tensors, trained  # noqa: E402
from conformance_tests.framework_tests.mindspore_towers import IMAGES  # noqa: E402
from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad  # noqa: E402


def test_other_randomness_is_noticed():
    weight = Parameter(Tensor(np.ones(4)), name="w")

    def outputs_fn(x):
        return x * weight * Tensor(np.random.rand())

    with pytest.raises(gradaccum.UsageError, match="outputs_fn: expected a function that gives the same outputs again"):
        coupled_value_and_grad(outputs_fn, lambda outputs: outputs.sum(), weight, steps=2)(*tensors(IMAGES))


@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_dropout_in_compiled_operators_is_refused(mode):
    net = nn.SequentialCell(nn.Dense(4, 3), nn.Dropout(p=0.5)).set_train()
    made = in_mode(mode, coupled_value_and_grad(net, ops.ReduceSum(), trained(net), steps=2))
    with pytest.raises(gradaccum.UsageError, match="a Dropout in training in"):
        made(Tensor(IMAGES, ms.float32))


@pytest.mark.parametrize("mode", COMPILED)
def test_statistics_in_compiled_code(mode):
    """They would move twice."""
    norm = nn.BatchNorm1d(4).set_train()
    made = in_mode(mode, coupled_value_and_grad(norm, ops.ReduceSum(), trained(norm), steps=3))
    with pytest.raises(gradaccum.UsageError, match="a BatchNorm1d in training in compiled code"):
        made(Tensor(IMAGES[:6], ms.float32))


def test_other_randomness_in_compiled_code():
    """It cannot be refused there: everything that is returned is NaN."""
    weight = Parameter(Tensor(np.ones(4)), name="w")

    def outputs_fn(x):
        return ops.dropout(x * weight, 0.5)

    def loss_fn(outputs):
        return outputs.sum()

    loss, gradient = in_mode("jit", coupled_value_and_grad(outputs_fn, loss_fn, weight, steps=3))(*tensors(IMAGES))
    assert np.isnan(loss.asnumpy())
    assert np.isnan(gradient.asnumpy()).all()


def no_rows(x):
    return x.sum()


def integers(x):
    return x.astype(ms.int32)


def itself(x):
    return x


def of_items(outputs):
    return outputs.sum(1)


@pytest.mark.parametrize(
    ("outputs_fn", "loss_fn", "words"),
    [
        (no_rows, no_rows, "outputs.*: expected an array with a leading axis"),
        (integers, no_rows, "outputs_fn: expected a floating output"),
        (itself, of_items, "loss_fn: expected a function that returns a scalar loss"),
    ],
)
def test_misuse_in_compiled_code(outputs_fn, loss_fn, words):
    weight = Parameter(Tensor(np.ones(4)), name="w")

    def outputs(x):
        return outputs_fn(x * weight)

    with pytest.raises(gradaccum.ArgumentValueError, match=words):
        in_mode("jit", coupled_value_and_grad(outputs, loss_fn, weight, steps=2))(*tensors(IMAGES))


@pytest.mark.parametrize(
    ("outputs_fn", "loss_fn", "words"),
    [
        (lambda x: x.sum(), lambda outputs: outputs, r"outputs: expected an array with a leading axis"),
        (lambda x: (x, 3), lambda outputs: outputs[0].sum(), r"outputs\[1\]: expected an array with a leading axis"),
        (lambda x: x.astype(ms.int32), lambda outputs: outputs.sum(), "outputs_fn: expected a floating output"),
        (lambda x: x, lambda outputs: outputs.sum(1), "loss_fn: expected a function that returns a scalar loss"),
    ],
    ids=["scalar", "number", "integers", "loss of items"],
)
def test_misuse(outputs_fn, loss_fn, words):
    weight = Parameter(Tensor(np.ones(4)), name="w")
    with pytest.raises(gradaccum.ArgumentValueError, match=words):
        coupled_value_and_grad(lambda x: outputs_fn(x * weight), loss_fn, weight, steps=2)(*tensors(IMAGES))
