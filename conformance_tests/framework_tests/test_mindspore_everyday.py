"""Everyday mistakes in MindSpore: each is refused by name, or right."""

import gc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from mindspore.train import Model

import gradaccum
import gradaccum_mindspore
from gradaccum import ArgumentTypeError, UsageError
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell

from .mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
    warned,
)

by_eager_mode = pytest.mark.parametrize("mode", ["pynative", "jit"])
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


@pytest.mark.slow
@pytest.mark.every_mode
@pytest.mark.parametrize("mode", ["pynative", "jit", "graph"])
@pytest.mark.parametrize("kind", INNER)
def test_inner_optimizer_is_not_called(kind, mode):
    """The loop goes on calling the optimizer that it wrapped: it would accumulate
    nothing. The wrapped one applies its update.
    """
    set_mode("graph" if mode == "graph" else "pynative")
    p = parameter()
    inner = INNER[kind](p)
    if mode == "graph":
        inner(gradient(0.0))  # it was compiled before
    opt = gradaccum.wrap(inner, steps=2)

    @ms.jit
    def of_wrapper(g):
        return opt(g)

    @ms.jit
    def of_both(g):
        opt(g)
        return inner(g)

    words = r"optimizer\(gradients\): expected a call to the wrapped optimizer.*SGD"
    for number, held in ((1.0, (10.0, 1)), (3.0, (8.0, 0))):
        (of_wrapper if mode == "jit" else opt)(gradient(number))
        with pytest.raises(UsageError, match=words):
            (of_both if mode == "jit" else inner)(gradient(1.0))
        assert (value(p), opt.result.micro_step) == held


def test_inner_optimizer_is_free_again():
    p = parameter()
    inner = nn.SGD([p], 1.0)
    opt = gradaccum.wrap(inner, steps=2)
    with pytest.raises(
        ArgumentTypeError,
        match="optimizer: expected an optimizer that is not wrapped yet",
    ):
        gradaccum.wrap(inner, steps=4)
    del opt
    gradaccum.wrap(inner, steps=1)(gradient(1.0))
    gc.collect()
    inner(gradient(1.0))
    assert value(p) == 8.0


@pytest.mark.parametrize("weighed", [False, True])
@by_eager_mode
def test_unequal_sizes_without_weights_are_said_once(mode, weighed):
    """Each counts the same: not the large batch, and nothing else would tell."""
    p = parameter()
    opt = gradaccum_mindspore.wrap(nn.SGD([p], 1.0), steps=4)

    def loss(rows):
        return (rows.mean(0) * p).sum()

    backward = ms.grad(loss, None, opt.parameters)

    def step(rows, weight):
        return opt(backward(rows), weight=weight) if weighed else opt(backward(rows))

    step = ms.jit(step) if mode == "jit" else step
    loader = [(Tensor(np.ones((size, 2), np.float32)),) for size in (3, 3, 2)]
    with warned() as texts:
        for _ in range(2):
            for (rows,) in opt.epoch(loader):
                step(rows, Tensor(1.0, ms.bfloat16))
    assert ["3 and 2 items" in text for text in texts] == [True] * (not weighed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_unequal_sizes_in_model_train_are_said_once(mode):
    """``Model(net, loss_fn, optimizer)`` gives no weights; the training cell does,
    unless it was told not to.
    """
    set_mode(mode)
    rows = np.ones((22, 4), np.float32)
    for options, expected in ((None, 1), ({}, 0), ({"weight": None}, 0)):
        data = NumpySlicesDataset((rows, rows[:, :2]), shuffle=False).batch(6)
        net = nn.Dense(4, 2)
        opt = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=2)
        model = Model(net, nn.MSELoss(), opt)
        if options is not None:
            with_loss = nn.WithLossCell(net, nn.MSELoss())
            model = Model(TrainOneStepCell(with_loss, opt, **options))
        with warned() as texts:
            model.train(2, data, callbacks=[FlushAtEpochEnd(opt)])
        assert sum("6 and 4 items" in text for text in texts) == len(texts) == expected


def test_epoch_of_a_dataset():
    """Its end closes the last window, unless it is carried on."""
    p = parameter()
    opt = gradaccum_mindspore.wrap(nn.SGD([p], 1.0), steps=2)
    dataset = NumpySlicesDataset(np.ones((6, 2), np.float32), shuffle=False).batch(2)
    assert opt.updates_in(dataset, epochs=2) == 4
    for (rows,) in opt.epoch(dataset, progress=True):
        opt((rows.mean(0),))
    assert value(p) == 8.0
    assert opt.result.optimizer_step == 2
    for (rows,) in opt.epoch(dataset, carry=True):
        opt((rows.mean(0),))
    assert opt.result.optimizer_step == 3
    assert opt.result.micro_step == 1


@by_eager_mode
def test_loss_in_the_weight_s_place(mode):
    """A floating Tensor or array alone may be either; a number, an integer Tensor, or
    both in their order, may not.
    """
    opt = gradaccum.wrap(nn.SGD([parameter()], 1.0), steps=None)

    def by_place(g, number):
        return opt((g,), number)

    def by_name(g, number):
        return opt((g,), weight=number)

    def both_by_place(g, number):
        return opt((g,), number, number)

    def take(call, number):
        (ms.jit(call) if mode == "jit" else call)(*gradient(1.0), number)

    number = Tensor(2.5, ms.float32)
    words = "weight: expected a keyword argument"
    with pytest.raises(ArgumentTypeError, match=words):
        take(by_place, number)
    with pytest.raises(ArgumentTypeError, match=words):
        opt(gradient(1.0), np.float32(2.5))
    assert opt.result.micro_step == 0
    take(by_place, Tensor(3, ms.int32))
    take(by_place, 2.0)
    take(by_name, number)
    take(both_by_place, number)
    assert opt.storage.pull().weight == 10.0
