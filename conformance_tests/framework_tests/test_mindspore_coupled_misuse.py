"""Refusals of `gradaccum_mindspore.coupled_value_and_grad`."""

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


def test_dropout_in_compiled_operators_is_refused():
    net = nn.SequentialCell(nn.Dense(4, 3), nn.Dropout(p=0.5)).set_train()
    made = in_mode("graph", coupled_value_and_grad(net, ops.ReduceSum(), trained(net), steps=2))
    with pytest.raises(gradaccum.UsageError, match="a Dropout in training in"):
        made(Tensor(IMAGES, ms.float32))


@pytest.mark.parametrize("mode", COMPILED)
def test_compiled_code(mode):
    net = nn.Dense(4, 3)
    made = in_mode(mode, coupled_value_and_grad(net, ops.ReduceSum(), trained(net), steps=2))
    with pytest.raises(gradaccum.UsageError, match="coupled_value_and_grad: expected a call from Python"):
        made(Tensor(IMAGES, ms.float32))


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
