"""Calls of the wrapped MindSpore optimizer in compiled code, and numbers that MindSpore
would round or cannot know there.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from numpy.testing import assert_allclose

import gradaccum

from .mindspore_common import (
    Descent,
    pynative_after,  # noqa: F401
    two_gradients,
    two_parameters,
    values,
)


def test_flush_and_discard_inside_jit():
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=None)

    @ms.jit
    def two(first, second):
        optimizer(first, loss=9.0)
        optimizer.discard()
        optimizer(second, loss=1.0)
        optimizer(second, loss=3.0)
        return optimizer.flush()

    @ms.jit
    def flush(x):
        return optimizer.flush()

    assert two(two_gradients(np.nan, np.nan), two_gradients(2.0, 4.0))
    assert values(optimizer) == [-1.0, -3.0]
    result = optimizer.result
    assert (result.applied, result.loss) == (True, 2.0)
    assert not flush(Tensor(0.0)), "nothing is left"
    assert repr(optimizer.result) == repr(result._replace(applied=False))
    assert optimizer.storage.skipped_windows.item() == 0


def test_two_optimizers_need_two_names():
    """MindSpore compiles no function with two Parameters of one name; a layer may have
    the optimizer's.
    """
    first = Parameter(Tensor(np.ones(3, np.float32)), name="generator.weight")
    second = Parameter(Tensor(np.ones(2, np.float32)), name="critic.weight")
    generator = gradaccum.wrap(nn.SGD([first], 1.0), steps=1, name="generator")
    inner = nn.SGD([second], 1.0)
    # its global_step and learning_rate are Parameters too
    inner.update_parameters_name("critic.")
    critic = gradaccum.wrap(inner, steps=2, name="critic")

    @ms.jit
    def step(a, b):
        generator((a,))
        return critic((b,))

    for expected in ((-1.0, 1.0), (-3.0, -3.0)):
        step(*two_gradients(2.0, 4.0))
        assert (first.asnumpy()[0], second.asnumpy()[0]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_length_of_a_dynamic_axis(on_overflow):
    """It is no constant while MindSpore compiles: windows of 4 and 3 items, and of 2
    and 5.
    """
    net = nn.Dense(4, 2, weight_init="ones", has_bias=False)
    inner = nn.SGD(net.trainable_params(), 0.1)
    optimizer = gradaccum.wrap(inner, steps=2, on_overflow=on_overflow)

    def forward(x):
        return net(x).mean()

    backward = ms.grad(forward, None, optimizer.parameters)

    @ms.jit(dynamic=1)
    def step(x):
        return optimizer(backward(x), x.shape[0])

    for value, items in enumerate((4, 3, 2, 5), 1):
        step(Tensor(np.full((items, 4), value, np.float32)))
    moved = 0.1 * 0.5 * ((4 * 1 + 3 * 2) / 7 + (2 * 3 + 5 * 4) / 7)
    assert_allclose(net.weight.asnumpy(), 1 - moved, rtol=1e-6)
    assert optimizer.result.optimizer_step == 2


@pytest.mark.parametrize("compiled", [ms.jit, lambda step: step], ids=["jit", "python"])
@pytest.mark.parametrize(
    ("limit", "weights"), [(0.1, (1, 1)), (None, (0.1, 0.3))], ids=["clip", "weights"]
)
def test_constants_beside_float64_sums_are_float64(limit, weights, compiled):
    """MindSpore rounds a Python number to float32 in compiled code: an error of
    1e-8.
    """
    parameter = Parameter(Tensor([0.0, 0.0], ms.float64), name="p")
    optimizer = gradaccum.wrap(Descent(1.0, [parameter]), steps=2, clip_norm=limit)

    @compiled
    def step(first, second):
        optimizer((first,), weights[0], 0.1)
        return optimizer((second,), weights[1], 0.1)

    gradients = np.array([[3.0, 4.0], [1.0, 7.0]])
    step(*map(Tensor, gradients))
    mean = np.average(gradients, axis=0, weights=weights)
    norm = np.linalg.norm(mean)
    found = [*-parameter.asnumpy(), optimizer.result.grad_norm, optimizer.result.loss]
    clipped = mean if limit is None else mean * limit / norm
    assert_allclose(found, [*clipped, norm, 0.1], rtol=1e-14)
