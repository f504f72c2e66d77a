"""A function given as ``steps``: its result is checked at the wrap and at each PyNative
call. Schedulers beside it.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler

import gradaccum
from gradaccum_mindspore import load_checkpoint_into

from .mindspore_common import (
    by_loader,
    by_mode,
    entries_of,
    needs_mindspore,
    pynative_after,  # noqa: F401
    set_mode,
    warned,
)
from .mindspore_driver import driver


def shrinking(optimizer_step):
    return 1 - optimizer_step


def growing(optimizer_step):
    return max(1, optimizer_step)


@needs_mindspore("2.10", "MindSpore 2.7 takes Python's max of a Tensor for a constant")
@pytest.mark.parametrize(
    ("steps", "size"),
    [(growing, "0 of 3"), (gradaccum.until_weight(growing), "0, weight 0 of 3")],
)
def test_compiled_schedule_returns_a_number_of_unknown_kind(steps, size):
    """MindSpore does not say while it compiles whether this is a constant."""
    optimizer, call, _ = driver("jit", steps)
    closed = [bool(call(1.0)) for _ in range(7)]
    assert closed == [True, True, False, True, False, False, True]
    load_checkpoint_into(optimizer, entries_of(optimizer))
    assert f"micro-batch {size}, update 4" in repr(optimizer)


@pytest.mark.parametrize("steps", [shrinking, gradaccum.until_weight(shrinking)])
def test_ignored_overflow_makes_no_unsound_update(steps):
    """Compiled code can refuse neither a size below 1 nor a negative weight."""
    optimizer, call, parameter = driver("jit", steps, on_overflow="ignore")
    for weight in (1.0, 1.0, -1.0):
        call(1.0, weight)
        assert optimizer.result.skipped == optimizer.result.overflow
    assert optimizer.result.overflow
    assert parameter.asnumpy().tolist() == [1.0, 0.0, 1.0]


def experimental(steps, **options):
    inner = optim.SGD([Parameter(Tensor([1.0], ms.float32), name="p")], 0.1)
    return gradaccum.wrap(inner, steps=steps, **options)


def rate(optimizer):
    return float(optimizer.param_groups[0]["lr"])


@by_mode
def test_experimental_scheduler_moves_per_update(mode):
    """Three updates and a skipped window: the rate is halved three times. A flush of an
    empty window moves nothing.
    """
    set_mode(mode)
    optimizer = experimental(4, skip_norm=1e3)
    scheduler = gradaccum.wrap(lr_scheduler.StepLR(optimizer, 1, 0.5))

    def step(gradient):
        optimizer((gradient,))
        return gradient

    if mode == "jit":
        step = ms.jit(step)
    rates = []
    for value in [1.0] * 8 + [1e9] * 4 + [1.0]:
        step(Tensor([value], ms.float32))
        # This is no load. MindSpore 2.7's compiled programs would read freed memory.
        if mode == "pynative":
            optimizer.loss_scale.set_data(Tensor(1.0, ms.float32))
        scheduler.step()
        rates.append(rate(optimizer))
    for _ in range(2):
        optimizer.flush()
        scheduler.step()
        rates.append(rate(optimizer))
    np.testing.assert_allclose(
        rates, [0.1] * 3 + [0.05] * 4 + [0.025] * 6 + [0.0125] * 2, rtol=1e-6
    )
    assert scheduler.get_last_lr() == [rates[-1]]
    assert "GatedScheduler(<" in repr(scheduler)


@pytest.mark.parametrize("move", ["in mid-window", "later", "between windows", "gated"])
def test_ungated_scheduler_is_said_once(move):
    """A learning rate that moves inside one of the first two windows: once, at the
    micro-batch after it.
    """
    optimizer = experimental(4)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    if move == "gated":
        scheduler = gradaccum.wrap(scheduler)
    moves = {"later": (6,), "between windows": (4, 8)}.get(move, range(1, 9))
    expected = {"in mid-window": [2], "later": [7]}.get(move, [])
    heard = []
    for number in range(1, 13):
        with warned() as texts:
            optimizer((Tensor([1.0], ms.float32),))
        heard += [number] * len(texts)
        if number in moves:
            scheduler.step()
    assert heard == expected


@by_loader
def test_gate_takes_no_checkpoint_for_an_update(load):
    """In a new process the gate is made before the checkpoint is loaded, which has
    updates of its own.
    """
    saved = experimental(1)
    loaded = experimental(1)
    scheduler = gradaccum.wrap(lr_scheduler.StepLR(loaded, 1, 0.5))
    gradient = (Tensor([1.0], ms.float32),)
    saved(gradient)
    load(loaded, entries_of(saved))
    scheduler.step()
    assert rate(loaded) == pytest.approx(0.1)
    loaded(gradient)
    scheduler.step()
    assert rate(loaded) == pytest.approx(0.05)
