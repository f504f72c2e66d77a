"""Each call of the wrapped MindSpore optimizer, in every mode: micro-batches, flush,
discard, wrong arguments.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    MODES,
    pynative_after,  # noqa: F401
    set_mode,
    two_parameters,
    values,
)
from gradaccum_mindspore import load_checkpoint_into


def ones(a=1.0, b=1.0):
    return (
        None if a is None else Tensor(np.full(3, a, np.float32)),
        None if b is None else Tensor(np.full(2, b, np.float32)),
    )


@pytest.fixture(scope="module", params=MODES)
def compiled(request):
    """One wrapped SGD for each mode, so that each kind of call is compiled once; its
    call; and the state it starts from.
    """
    set_mode(request.param)
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)

    @ms.jit
    def one_by_one(weight, *gradients):
        return optimizer(gradients, weight=weight)

    @ms.jit
    def whole(gradients):
        return optimizer(gradients)

    def call(gradients, weight=None):
        return (
            whole(gradients)
            if isinstance(gradients, dict)
            else one_by_one(weight, *gradients)
        )

    start = {p.name: Tensor(p.asnumpy()) for p in optimizer.get_parameters()}
    return (
        request.param,
        optimizer,
        call if request.param == "jit" else optimizer,
        start,
    )


@pytest.fixture
def wrapped(compiled):
    """A wrapped SGD with learning rate 1 over parameters of ones, called in one mode
    with `call(gradients, weight)`.
    """
    mode, optimizer, call, start = compiled
    set_mode(mode)
    load_checkpoint_into(optimizer, start)
    return optimizer, call


@pytest.mark.parametrize("case", ["count", "shape", "dtype", "names"])
def test_wrong_gradients_raise_and_lose_nothing(wrapped, case):
    optimizer, call = wrapped
    call(ones(2.0, 4.0))
    a, b = ones()
    bad = {
        "count": (a,),
        "shape": (b, a),
        "dtype": (a, b.astype(ms.int32)),
        "names": {"a": a, "c": b},
    }[case]
    with pytest.raises(gradaccum.GradientError, match="expected"):
        call(bad)
    assert optimizer.result.micro_step == 1
    call(ones(2.0, 4.0))
    assert values(optimizer) == [-1.0, -3.0]


def test_gradients_as_dict_or_list(wrapped):
    optimizer, call = wrapped
    a, b = ones(2.0, 4.0)
    call({"b": b, "a": a})
    call([a, b])
    assert values(optimizer) == [-1.0, -3.0]


def test_list_and_none_inside_jit():
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)

    @ms.jit
    def step(a, b):
        optimizer([a, b])
        return optimizer([a, None])

    step(*ones(2.0, 4.0))
    assert values(optimizer) == [-1.0, -1.0]


def test_flush_and_discard_inside_jit():
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=None)

    @ms.jit
    def two(first, second):
        optimizer(first)
        optimizer.discard()
        optimizer(second)
        optimizer(second)
        return optimizer.flush()

    @ms.jit
    def flush(x):
        return optimizer.flush()

    assert two(ones(np.nan, np.nan), ones(2.0, 4.0))
    assert values(optimizer) == [-1.0, -3.0]
    result = optimizer.result
    assert result.applied
    assert not flush(Tensor(0.0)), "nothing is left"
    assert repr(optimizer.result) == repr(result._replace(applied=False))
    assert optimizer.storage.skipped_windows.item() == 0


def test_bad_weights_and_options_raise():
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    for weight in (Tensor([1.0, 2.0]), Tensor(-1.0)):
        with pytest.raises(gradaccum.GradAccumError, match="weight"):
            optimizer(ones(), weight=weight)
    with pytest.raises(gradaccum.UsageError, match="steps"):
        optimizer.steps = 3
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
        gradaccum.wrap(optimizer, steps=2)


def test_learning_rate_is_the_inner_one():
    inner = nn.SGD(two_parameters(), 1.0)
    optimizer = gradaccum.wrap(inner, steps=1)
    optimizer.learning_rate = Tensor(0.5, ms.float32)
    optimizer(ones(2.0, 4.0))
    assert values(optimizer) == [0.0, -1.0]
    assert optimizer.learning_rate is inner.learning_rate


def test_two_optimizers_need_two_names():
    """MindSpore compiles no function with two Parameters of one name."""
    first, second = two_parameters()
    one = gradaccum.wrap(nn.SGD([first], 1.0), steps=1, name="one")
    other = nn.SGD([second], 1.0)
    # its global_step and learning_rate are Parameters too
    other.update_parameters_name("other.")
    two = gradaccum.wrap(other, steps=2, name="two")

    @ms.jit
    def step(a, b):
        one((a,))
        return two((b,))

    step(*ones(2.0, 4.0))
    assert (first.asnumpy()[0], second.asnumpy()[0]) == (-1.0, 1.0)
    step(*ones(2.0, 4.0))
    assert (first.asnumpy()[0], second.asnumpy()[0]) == (-3.0, -3.0)


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_length_of_a_dynamic_axis(on_overflow):
    """It is no constant while MindSpore compiles: windows of 4 and 3 items, and of 2
    and 5.
    """
    net = nn.Dense(4, 2, weight_init="ones", has_bias=False)
    optimizer = gradaccum.wrap(
        nn.SGD(net.trainable_params(), 0.1), steps=2, on_overflow=on_overflow
    )

    def forward(x):
        return net(x).mean()

    value_and_grad = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit(dynamic=1)
    def step(x):
        loss, gradients = value_and_grad(x)
        optimizer(gradients, x.shape[0])
        return loss

    for value, items in enumerate((4, 3, 2, 5), 1):
        step(Tensor(np.full((items, 4), value, np.float32)))
    moved = 0.1 * 0.5 * ((4 * 1 + 3 * 2) / 7 + (2 * 3 + 5 * 4) / 7)
    np.testing.assert_allclose(
        net.weight.asnumpy(), np.full((2, 4), 1 - moved), rtol=1e-6
    )
    assert optimizer.result.optimizer_step == 2


@pytest.mark.parametrize(
    ("reduction", "moved", "loss"),
    [("mean", 1.0, 2.5), ("sum", 2.0, 4.0), ("sum_per_item", 0.5, 1.0)],
)
def test_float64_weight_beside_a_told_loss(reduction, moved, loss):
    parameter = Parameter(Tensor([1.0, 2.0], ms.float32), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=2, reduction=reduction)

    @ms.jit
    def step(gradient, weight, told):
        optimizer((gradient,), weight, told)
        return gradient

    for number in (3.0, 1.0):
        step(
            Tensor([1.0, 1.0], ms.float32),
            Tensor(number, ms.float64),
            Tensor(number, ms.float32),
        )
    np.testing.assert_allclose(parameter.asnumpy(), [1 - moved, 2 - moved], rtol=1e-6)
    assert optimizer.result.loss == loss


class Descent(nn.Optimizer):
    """Plain gradient descent in the gradient's own dtype."""

    def construct(self, gradients):
        return ops.assign_sub(self.parameters[0], gradients[0])


@pytest.mark.parametrize(
    ("limit", "weights"),
    [(0.1, (1, 1)), (None, (0.1, 0.3))],
    ids=["clip_norm", "weights"],
)
def test_constants_beside_float64_sums_are_float64(limit, weights):
    """MindSpore rounds a Python number to float32 in compiled code: an error of
    1e-8.
    """
    parameter = Parameter(Tensor([0.0, 0.0], ms.float64), name="p")
    optimizer = gradaccum.wrap(Descent(1.0, [parameter]), steps=2, clip_norm=limit)

    @ms.jit
    def step(first, second):
        optimizer((first,), weights[0], 0.1)
        optimizer((second,), weights[1], 0.1)
        return first

    gradients = np.array([[3.0, 4.0], [1.0, 7.0]])
    step(*(Tensor(gradient) for gradient in gradients))
    mean = np.average(gradients, axis=0, weights=weights)
    norm = np.linalg.norm(mean)
    np.testing.assert_allclose(
        parameter.asnumpy(), -mean * (1 if limit is None else limit / norm), rtol=1e-14
    )
    np.testing.assert_allclose(
        [optimizer.result.grad_norm, optimizer.result.loss], [norm, 0.1], rtol=1e-14
    )
