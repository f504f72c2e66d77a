"""Each call of the wrapped MindSpore optimizer, in every mode: micro-batches, flush, discard, wrong arguments."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402
from mindspore.experimental import optim  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import MODES, pynative_after, set_mode, two_parameters, values  # noqa: E402, F401
from gradaccum_mindspore import load_checkpoint_into  # noqa: E402


def ones(a=1.0, b=1.0):
    return (None if a is None else Tensor(np.full(3, a, np.float32)), None if b is None else Tensor(np.full(2, b, np.float32)))


@pytest.fixture(scope="module", params=MODES)
def compiled(request):
    """One wrapped SGD for each mode, so that each kind of call is compiled once; its call; and the state it starts from."""
    set_mode(request.param)
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)

    @ms.jit
    def one_by_one(weight, *gradients):
        return optimizer(gradients, weight)

    @ms.jit
    def whole(gradients):
        return optimizer(gradients)

    def call(gradients, weight=None):
        return whole(gradients) if isinstance(gradients, dict) else one_by_one(weight, *gradients)

    start = {p.name: Tensor(p.asnumpy()) for p in optimizer.get_parameters()}
    return request.param, optimizer, call if request.param == "jit" else optimizer, start


@pytest.fixture
def wrapped(compiled):
    """A wrapped SGD with learning rate 1 over parameters of ones, called in one mode with `call(gradients, weight)`."""
    mode, optimizer, call, start = compiled
    set_mode(mode)
    load_checkpoint_into(optimizer, start)
    return optimizer, call


@pytest.mark.parametrize("case", ["count", "shape", "dtype", "names"])
def test_wrong_gradients_raise_and_lose_nothing(wrapped, case):
    optimizer, call = wrapped
    call(ones(2.0, 4.0))
    a, b = ones()
    bad = {"count": (a,), "shape": (b, a), "dtype": (a, b.astype(ms.int32)), "names": {"a": a, "c": b}}[case]
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

    assert two(ones(np.nan, np.nan), ones(2.0, 4.0))
    assert values(optimizer) == [-1.0, -3.0]


def test_bad_weights_and_options_raise():
    optimizer = gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2)
    for weight in (Tensor([1.0, 2.0]), Tensor(-1.0)):
        with pytest.raises(gradaccum.GradAccumError, match="weight"):
            optimizer(ones(), weight)
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


def test_experimental_schedulers_take_the_wrapped_optimizer():
    optimizer = gradaccum.wrap(optim.SGD(two_parameters(), 1.0), steps=1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scheduler.step()
    optimizer(ones(2.0, 4.0))
    assert values(optimizer) == [0.0, -1.0]


def test_two_optimizers_need_two_names():
    """MindSpore compiles no function with two Parameters of one name."""
    first, second = two_parameters()
    one = gradaccum.wrap(nn.SGD([first], 1.0), steps=1, name="one")
    other = nn.SGD([second], 1.0)
    other.update_parameters_name("other.")  # its global_step and learning_rate are Parameters too
    two = gradaccum.wrap(other, steps=2, name="two")

    @ms.jit
    def step(a, b):
        one((a,))
        return two((b,))

    step(*ones(2.0, 4.0))
    assert (first.asnumpy()[0], second.asnumpy()[0]) == (-1.0, 1.0)
    step(*ones(2.0, 4.0))
    assert (first.asnumpy()[0], second.asnumpy()[0]) == (-3.0, -3.0)
