"""Each call of the wrapped MindSpore optimizer, in every mode: micro-batches, flush, discard, wrong arguments."""

import os

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn  # noqa: E402
from mindspore.experimental import optim  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import MODES, pynative_after, set_mode, two_parameters, values  # noqa: E402, F401
from gradaccum_mindspore import Accumulator, load_checkpoint_into  # noqa: E402


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


def test_none_gradient_keeps_the_sum(wrapped):
    """None counts as a gradient of zeros."""
    optimizer, call = wrapped
    assert not call(ones(2.0, 4.0))
    assert call(ones(2.0, None))
    assert values(optimizer) == [-1.0, -1.0]
    call(ones(None, 2.0))
    call(ones(1.0, 2.0))
    assert values(optimizer) == [-1.5, -3.0]


def test_weight_zero_adds_nothing(wrapped):
    """Not even NaN or inf."""
    optimizer, call = wrapped
    call(ones(np.nan, np.inf), Tensor(0.0, ms.float32))
    call(ones(2.0, 4.0), Tensor(3.0, ms.float32))
    assert values(optimizer) == [-1.0, -3.0]


def test_overflowed_window_is_skipped(wrapped):
    """The window after it is clean again."""
    optimizer, call = wrapped
    call(ones(np.inf, 1.0))
    call(ones(1.0, 1.0))
    assert optimizer.result[:4] == (False, True, True, np.inf)
    assert values(optimizer) == [1.0, 1.0]
    call(ones(1.0, 1.0))
    call(ones(1.0, 1.0))
    assert values(optimizer) == [0.0, 0.0]
    assert optimizer.result.optimizer_step == 1


def test_large_finite_gradients_are_no_overflow(wrapped):
    """Their squares exceed float32; their norm does not."""
    optimizer, call = wrapped
    call(ones(2e30, 0.0))
    call(ones(2e30, 0.0))
    assert optimizer.result.applied
    assert optimizer.result.grad_norm == pytest.approx(2e30 * 3**0.5, rel=1e-6)


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


def test_flush_and_discard_in_every_mode(wrapped):
    optimizer, call = wrapped
    assert not optimizer.flush()
    assert not optimizer.result.closed
    call(ones(2.0, 4.0))
    assert optimizer.flush()
    assert values(optimizer) == [-1.0, -3.0]
    call(ones(np.nan, 4.0))
    optimizer.discard()
    assert optimizer.result.micro_step == 0
    call(ones(1.0, 1.0))
    call(ones(1.0, 1.0))
    assert values(optimizer) == [-2.0, -4.0]


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
    for weight in (-1.0, np.nan, "1", Tensor([1.0, 2.0]), Tensor(-1.0)):
        with pytest.raises(gradaccum.GradAccumError, match="weight"):
            optimizer(ones(), weight)
    with pytest.raises(gradaccum.GradAccumError, match="accumulate_dtype"):
        gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2, accumulate_dtype="int32")
    with pytest.raises(gradaccum.UsageError, match="steps"):
        optimizer.steps = 3
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
        gradaccum.wrap(optimizer, steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
        gradaccum.wrap(nn.Dense(2, 2), steps=2)


def test_half_gradients_are_summed_in_float32():
    parameter = Parameter(Tensor(np.ones(2), ms.float16), name="p")
    optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=None, reduction="sum")
    for value in (1.0, 2.0**-11, 2.0**-11):
        optimizer((Tensor(np.full(2, value), ms.float16),))
    assert optimizer.storage.sums[0].dtype == ms.float32
    assert optimizer.storage.sums[0].asnumpy()[0] == 1.0 + 2.0**-10, "float16 would lose both small gradients"
    optimizer.flush()
    assert not optimizer.storage.sums[0].asnumpy().any(), "the window's end clears the sums"
    assert parameter.asnumpy()[0] == np.float16(-(2.0**-10))


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


def test_accumulator_without_an_optimizer():
    """The caller updates and clears, and gets the same windows as with `gradaccum.wrap`."""
    parameters = two_parameters()
    accumulator, optimizer = Accumulator(parameters, steps=2, loss_scale=8.0), nn.SGD(parameters, 1.0)
    with pytest.raises(gradaccum.UsageError, match="loss scale"):
        accumulator(ones(16.0, 32.0))
    assert accumulator.scale(Tensor(1.0)) == 8.0
    assert not accumulator(ones(16.0, 32.0))
    assert accumulator(ones(16.0, 32.0))
    optimizer(accumulator.gradients())
    assert accumulator.clear()
    assert values(optimizer) == [-1.0, -3.0]
    accumulator(ones(np.nan, 1.0))
    assert not accumulator.applicable()
    assert not accumulator.clear()
    assert (accumulator.result.optimizer_step, accumulator.result.micro_step, accumulator.result.skipped) == (1, 0, True)


def test_raising_optimizer_loses_nothing():
    class Failing(nn.SGD):
        fail = True

        def __call__(self, gradients):
            if self.fail:
                raise RuntimeError("on purpose")
            return super().__call__(gradients)

    inner = Failing(two_parameters(), 1.0)
    optimizer = gradaccum.wrap(inner, steps=2)
    optimizer(ones(2.0, 4.0))
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer(ones(2.0, 4.0))
    inner.fail = False
    assert optimizer.flush()
    assert values(optimizer) == [-1.0, -3.0]
