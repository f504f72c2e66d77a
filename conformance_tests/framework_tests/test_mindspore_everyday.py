"""Everyday mistakes in MindSpore: each is refused by name, or right."""

import gc
import warnings
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim

import gradaccum
import gradaccum_mindspore
from conformance_tests.framework_tests.mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
)

INNER = {
    "nn": lambda p: nn.SGD([p], 1.0),
    "experimental": lambda p: optim.SGD([p], 1.0),
}


def parameter():
    return Parameter(Tensor([10.0, 10.0], ms.float32), name="w")


def gradient(value):
    return (Tensor([value, value], ms.float32),)


def value(p):
    return float(p.asnumpy()[0])


class Step(nn.Cell):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def construct(self, gradients):
        return self.optimizer(gradients)


def runs_but(mistakes, call, opt, p):
    """The wrapped optimizer makes its update, and each mistake is refused before and
    after it.
    """
    for number, held in ((1.0, (10.0, 1)), (3.0, (8.0, 0))):
        call(gradient(number))
        for mistake in mistakes:
            with pytest.raises(
                gradaccum.UsageError,
                match=(
                    r"optimizer\(gradients\): expected a call of the wrapped"
                    r" optimizer.*SGD"
                ),
            ):
                mistake(gradient(1.0))
        assert (value(p), opt.result.micro_step) == held


@pytest.mark.parametrize("mode", ["pynative", "jit"])
@pytest.mark.parametrize("kind", INNER)
def test_inner_optimizer_is_not_called(kind, mode):
    """The loop goes on calling the optimizer that it wrapped: it would accumulate
    nothing.
    """
    p = parameter()
    inner = INNER[kind](p)
    opt = gradaccum.wrap(inner, steps=2)

    @ms.jit
    def of_wrapper(g):
        return opt(g)

    @ms.jit
    def of_both(g):
        opt(g)
        return inner(g)

    runs_but(*(([of_both], of_wrapper) if mode == "jit" else ([inner], opt)), opt, p)


def test_compiled_inner_optimizer_is_not_called():
    set_mode("graph")
    p = parameter()
    inner = nn.SGD([p], 1.0)
    inner(gradient(0.0))
    opt = gradaccum.wrap(inner, steps=2)
    runs_but([inner, Step(inner)], opt, opt, p)


def test_inner_optimizer_is_free_again():
    p = parameter()
    inner = nn.SGD([p], 1.0)
    opt = gradaccum.wrap(inner, steps=2)
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match="optimizer: expected one that no living wrapper has",
    ):
        gradaccum.wrap(inner, steps=4)
    del opt
    again = gradaccum.wrap(inner, steps=1)
    again(gradient(1.0))
    assert value(p) == 9.0
    del again
    gc.collect()
    inner(gradient(1.0))
    assert value(p) == 8.0


@pytest.mark.parametrize("way", ["Python", "weights", "compiled"])
def test_unequal_sizes_without_weights_are_said_once(way):
    """Each counts the same: not the large batch, and nothing else would tell. Compiled
    code may have weights that Python does not see.
    """
    opt = gradaccum_mindspore.wrap(nn.SGD([parameter()], 1.0), steps=4)

    @ms.jit
    def compiled(gradients):
        return opt(gradients)

    step = {"Python": opt, "weights": partial(opt, weight=1.0), "compiled": compiled}[
        way
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gradaccum.GradAccumWarning)
        for _ in range(2):
            for (rows,) in opt.epoch(
                [(Tensor(np.ones((size, 2), np.float32)),) for size in (3, 3, 2)]
            ):
                step((rows.mean(0),))
    told = [
        str(each.message)
        for each in caught
        if each.category is gradaccum.GradAccumWarning
    ]
    assert ["3 and 2 items" in each for each in told] == [True] * (way == "Python")


def test_epoch_of_a_dataset():
    """Its end closes the last window, unless it is carried on."""
    p = parameter()
    opt = gradaccum_mindspore.wrap(nn.SGD([p], 1.0), steps=2)
    dataset = NumpySlicesDataset(np.ones((6, 2), np.float32), shuffle=False).batch(2)
    assert opt.updates_in(dataset, epochs=2) == 4
    for (rows,) in opt.epoch(dataset, progress=True):
        opt((rows.mean(0),))
    assert (value(p), opt.result.optimizer_step) == (8.0, 2)
    for (rows,) in opt.epoch(dataset, carry=True):
        opt((rows.mean(0),))
    assert (opt.result.optimizer_step, opt.result.micro_step) == (3, 1)


def test_schedule_counts_updates_from_here_on():
    opt = gradaccum_mindspore.wrap(nn.SGD([parameter()], 1.0), steps=[(0, 1), (1, 4)])
    assert opt.updates_in(5) == 2
    opt(gradient(1.0))
    assert opt.updates_in(5) == 2
    assert opt.updates_in(8) == 2
    opt(gradient(1.0))
    assert (opt.updates_in(3), opt.updates_in(4)) == (1, 2), "one is there already"
    with pytest.raises(gradaccum.ArgumentTypeError, match="steps"):
        gradaccum_mindspore.wrap(nn.SGD([parameter()], 1.0), steps=None).updates_in(5)


def test_denominator_from_python_alone():
    p = parameter()
    opt = gradaccum_mindspore.wrap(nn.SGD([p], 1.0), steps=None)
    opt(gradient(2.0), 3)

    @ms.jit
    def flush(n):
        return opt.flush(denominator=n)

    with pytest.raises(
        gradaccum.UsageError,
        match=r"flush\(\): expected a call from Python with a denominator",
    ):
        flush(Tensor(6.0, ms.float32))
    assert opt.flush(denominator=Tensor(6.0, ms.float32))
    assert value(p) == 9.0


@pytest.mark.parametrize("mode", ["pynative", "graph", "jit"])
def test_loss_in_the_weight_s_place(mode):
    """A floating Tensor or array alone may be either; a number, an integer Tensor, or
    both in their order, may not.
    """
    set_mode("graph" if mode == "graph" else "pynative")
    opt = gradaccum_mindspore.wrap(nn.SGD([parameter()], 1.0), steps=None)

    def loss_of_it(g, number):
        return opt((g,), ((g * number) ** 2).mean())

    def by_place(g, number):
        return opt((g,), number)

    def by_name(g, number):
        return opt((g,), weight=number)

    def both_by_place(g, number):
        return opt((g,), number, number)

    def twice(g, number):
        return opt((g,), number, weight=number)

    def take(call, number):
        (ms.jit(call) if mode == "jit" else call)(*gradient(1.0), number)

    for call, words in (
        (by_place, "to be named"),
        (loss_of_it, "to be named"),
        (twice, "weight and loss, each once"),
    ):
        with pytest.raises(
            gradaccum.ArgumentTypeError, match=f"weight: expected {words}"
        ):
            take(call, Tensor(2.5, ms.float32))
    with pytest.raises(gradaccum.ArgumentTypeError, match="to be named"):
        opt(gradient(1.0), np.float32(2.5))
    assert opt.result.micro_step == 0
    take(by_place, Tensor(3, ms.int32))
    take(by_place, 2.0)
    take(by_name, Tensor(2.5, ms.float32))
    take(both_by_place, Tensor(2.5, ms.float32))
    assert opt.storage.pull().weight == 10.0
