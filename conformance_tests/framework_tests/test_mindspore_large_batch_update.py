"""`gradaccum_mindspore.value_and_update`: a whole window of a wrapped optimizer in one call."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import pynative_after  # noqa: F401
from conformance_tests.framework_tests.mindspore_large_batch import COMPILED, in_mode
from gradaccum_mindspore.large_batch.value_and_update import value_and_update

X = np.array([1.0, 2.0, 3.0, -4.0, 6.0])
"""The gradient of mean(w x) by w is the mean of x, 1.6."""


def window(call, start=1.0, dtype=ms.float32, has_aux=False, **options):
    """A wrapped SGD at rate 1 over one parameter, and the call made of ``mean(w x)``."""
    weight = Parameter(Tensor(start, dtype), name="w")

    def forward(x):
        loss = (weight * x.astype(weight.dtype)).astype(ms.float32).mean()
        return (loss, x.max()) if has_aux else loss

    optimizer = gradaccum.wrap(nn.SGD([weight], 1.0), steps=None, **options)
    return weight, optimizer, value_and_update(forward, optimizer, has_aux, **{"micro_batch_size": 2, **call})


def value(weight):
    return float(weight.astype(ms.float32).asnumpy())


def test_sums_in_float32():
    """2048 + 1 is 2048 in float16."""
    weight, _, made = window({"micro_batch_size": 1}, dtype=ms.float16, start=0.0, reduction="sum")
    made(Tensor([2048.0, 1.0, 1.0], ms.float32))
    assert value(weight) == -2050


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_interrupted(failure):
    """In the third micro-batch: the optimizer, its last result and the statistics are as before."""
    norm, calls = nn.BatchNorm1d(2).set_train(), []

    def forward(x):
        calls.append(1)
        if len(calls) == 6:
            raise failure("now")
        return (norm(x) ** 3).mean()

    optimizer = gradaccum.wrap(nn.SGD(norm.trainable_params(), 0.1), steps=None, loss_scale=4.0)
    made = value_and_update(forward, optimizer, steps=3)
    x = Tensor(np.random.RandomState(0).randn(6, 2), ms.float32)
    made(x)
    before = [p.asnumpy().copy() for p in (*norm.get_parameters(), *optimizer.storage.get_parameters())]
    result = optimizer.result
    with pytest.raises(failure, match="now"):
        made(x)
    assert optimizer.result == result
    assert result.applied
    after = [p.asnumpy() for p in (*norm.get_parameters(), *optimizer.storage.get_parameters())]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    made(x)
    assert optimizer.result.optimizer_step == 2


def test_open_window_is_refused():
    weight, optimizer, made = window({})
    optimizer((Tensor(5.0, ms.float32),))
    with pytest.raises(gradaccum.UsageError, match="optimizer: expected no open window"):
        made(Tensor(X, ms.float32))
    optimizer.flush()
    assert value(weight) == -4, "what was there is still there"


@pytest.mark.parametrize("mode", COMPILED)
def test_open_window_in_compiled_code(mode):
    """Compiled code cannot raise: the loss is NaN, and there is no update of both windows together."""
    weight, optimizer, made = window({})
    optimizer((Tensor(5.0, ms.float32),))
    call = in_mode(mode, made)
    assert np.isnan(call(Tensor(X, ms.float32)).asnumpy())
    assert (value(weight), optimizer.result.overflow, optimizer.result.micro_step) == (1, True, 0)
    call(Tensor(X, ms.float32))
    assert abs(value(weight) - (1 - 1.6)) <= 1e-6, "the next window is right"


def test_misuse():
    weight = Parameter(Tensor(1.0), name="w")
    bare = nn.SGD([weight], 1.0)
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer: expected a wrapped optimizer"):
        value_and_update(lambda x: x, bare, steps=2)
    with pytest.raises(gradaccum.ArgumentValueError, match=r"wrapped with steps=None, .*; got steps=4"):
        value_and_update(lambda x: x, gradaccum.wrap(bare, steps=4), steps=2)
