"""A window's statistics beyond the shared suite: losses that are missing or bad,
interruptions, old checkpoints.
"""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    MODES,
    X,  # noqa: F401
    Y,  # noqa: F401
    make_net,  # noqa: F401
    pynative_after,  # noqa: F401
    set_mode,
)
from gradaccum_mindspore import gradient_sum
from gradaccum_mindspore.extensions import WindowLoss
from gradaccum_mindspore.window.pynative import PyNativeWindow


class Stop(BaseException):
    """Ctrl-C."""


def stops(*args):
    raise Stop


def driver(mode, **options):
    """A wrapped SGD of one parameter, and a call with a gradient, and a weight and a
    loss or neither.
    """
    set_mode(mode)
    optimizer = gradaccum.wrap(
        nn.SGD([Parameter(Tensor(np.ones(2, np.float32)), name="p")], 1.0), **options
    )

    @ms.jit
    def told(gradient, weight, loss):
        return optimizer((gradient,), weight, loss)

    @ms.jit
    def untold(gradient):
        return optimizer((gradient,))

    def call(value, loss=None, weight=1.0):
        gradient = Tensor(np.array([value, 0.0], np.float32))
        if mode != "jit":
            return (
                optimizer((gradient,))
                if loss is None
                else optimizer((gradient,), weight, loss)
            )
        return (
            untold(gradient)
            if loss is None
            else told(gradient, *(Tensor(each, ms.float32) for each in (weight, loss)))
        )

    return optimizer, call


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (Tensor([1.0, 2.0]), gradaccum.ArgumentValueError),
        (np.ones(2), gradaccum.ArgumentValueError),
        ("1", gradaccum.ArgumentTypeError),
    ],
    ids=("vector", "array", "text"),
)
def test_bad_loss_is_refused(mode, loss, error):
    optimizer, _ = driver(mode, steps=2)

    @ms.jit
    def step(gradient):
        return optimizer((gradient,), None, loss)

    with pytest.raises(error, match="loss"):
        (
            step
            if mode == "jit"
            else lambda gradient: optimizer((gradient,), None, loss)
        )(Tensor(np.ones(2, np.float32)))
    assert optimizer.result.micro_step == 0


def test_interrupted_micro_batch_leaves_no_loss(monkeypatch):
    """Its window is spoilt, and skipped; the window's loss has nothing of it."""
    optimizer, call = driver("pynative", steps=2)
    call(1.0, 2)
    before = optimizer.storage.window_loss.read()
    with monkeypatch.context() as patch:
        patch.setattr(WindowLoss, "add", stops)
        with pytest.raises(Stop):
            call(1.0, 50)
    np.testing.assert_equal(optimizer.storage.window_loss.read(), before)
    assert optimizer.result.micro_step == 1
    call(1.0, 4)
    assert (optimizer.result.skipped, optimizer.result.loss) == (True, 3)


def test_interrupted_end_keeps_the_loss(monkeypatch):
    """Ctrl-C before the update: the window is open, and its loss is known after
    `flush`.
    """
    optimizer, call = driver("pynative", steps=2)
    call(1.0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(PyNativeWindow, "gradients", stops)
        with pytest.raises(Stop):
            call(3.0, 4)
    assert (optimizer.result.micro_step, math.isnan(optimizer.result.loss)) == (2, True)
    optimizer.flush()
    assert optimizer.result.loss == 3


def test_ignored_overflow_measures_nothing(monkeypatch):
    for name in ("measure", "fits"):
        monkeypatch.setattr(gradient_sum, name, stops)
    optimizer, call = driver("pynative", steps=2, on_overflow="ignore")
    call(math.inf)
    call(1.0)
    assert optimizer.result.applied
    _, call = driver("pynative", steps=1, on_overflow="ignore", clip_norm=1.0)
    with pytest.raises(Stop):
        call(1.0)


def test_ignored_overflow_makes_no_unsound_update():
    """A negative weight, which only compiled code lets through, and a size below 1,
    which compiled code cannot refuse.
    """
    optimizer, call = driver("jit", steps=2, on_overflow="ignore", reduction="sum")
    assert [bool(call(1.0)) for _ in range(4)] == [False, True] * 2
    assert (optimizer.result.applied, optimizer.result.optimizer_step) == (True, 2)
    np.testing.assert_equal(
        (optimizer.result.grad_norm, optimizer.result.loss), (math.nan, math.nan)
    )
    call(1.0, 1.0, -1.0)
    call(1.0, 1.0, 2.0)
    assert (optimizer.result.skipped, optimizer.result.overflow) == (True, True)
    for steps in (shrinking, gradaccum.until_weight(shrinking)):
        optimizer, call = driver(
            "jit", steps=steps, on_overflow="ignore", reduction="sum"
        )
        call(1.0, 1.0, 1.0)
        assert optimizer.result.applied
        call(1.0, 1.0, 1.0)
        assert (optimizer.result.skipped, optimizer.result.overflow) == (True, True)


def shrinking(optimizer_step):
    return 1 - optimizer_step


@pytest.mark.parametrize("mode", MODES)
def test_norm_of_the_smallest_and_largest_numbers(mode):
    """Below the smallest normal number, and where the norm itself leaves float32's
    range.
    """
    optimizer, _ = driver(mode, steps=1, reduction="sum")

    @ms.jit
    def jitted(gradient):
        return optimizer((gradient,))

    for value, expected in (
        (1e-40, math.sqrt(2) * 1e-40),
        (1.1e-22, math.sqrt(2) * 1.1e-22),
        (3e38, np.finfo(np.float32).max),
    ):
        (jitted if mode == "jit" else lambda gradient: optimizer((gradient,)))(
            Tensor(np.full(2, value, np.float32))
        )
        assert optimizer.result.applied
        assert optimizer.result.grad_norm == pytest.approx(expected, rel=1e-4)


def test_window_by_weight_says_so():
    optimizer, call = driver("pynative", steps=gradaccum.until_weight([(0, 8), (1, 4)]))
    call(1.0, 1.0, 3.0)
    assert (
        "steps=until_weight(((0, 8), (1, 4))) | micro-batch 1, weight 3 of 8"
        in repr(optimizer)
    )
    call(1.0, 1.0, 6.0)
    assert "micro-batch 0, weight 0 of 4" in repr(optimizer)


def test_window_by_weight_takes_no_more_than_fits(monkeypatch):
    """Its update raised: a further micro-batch may be the one that raised."""
    optimizer, call = driver("pynative", steps=gradaccum.until_weight(4))
    with monkeypatch.context() as patch:
        patch.setattr(PyNativeWindow, "gradients", stops)
        with pytest.raises(Stop):
            call(1.0, 1.0, 5.0)
    with pytest.raises(gradaccum.UsageError, match="of weight 4 that holds 5"):
        call(1.0, 1.0, 5.0)
    assert optimizer.flush()
