"""`gradaccum_mindspore.TrainOneStepCell`, alone and in `mindspore.train.Model`: the
cell scales the loss and weighs the micro-batch.
"""

from contextlib import nullcontext
from functools import cache

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    MODES,
    WEIGHT,
    X,
    Y,
    make_net,
    pynative_after,  # noqa: F401
    set_mode,
)
from gradaccum_mindspore import TrainOneStepCell, load_checkpoint_into

SCALES = {"none": None, "static": 1024.0, "dynamic": gradaccum.DynamicLossScale()}


@cache
def large_batches(*bounds):
    """A network after one plain update for each pair of bounds, and the losses; in
    PyNative, the truth for every mode.
    """
    set_mode("pynative")
    net = make_net()
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()),
        nn.Momentum(net.trainable_params(), 0.1, 0.9),
    )
    losses = [
        step(Tensor(X[first:last]), Tensor(Y[first:last])).asnumpy().item()
        for first, last in bounds
    ]
    return net, losses


def make_cell(weight="items", loss=None, **options):
    net = make_net()
    optimizer = gradaccum.wrap(nn.Momentum(net.trainable_params(), 0.1, 0.9), **options)
    more = {} if weight == "items" else {"weight": weight}
    return TrainOneStepCell(
        nn.WithLossCell(net, loss or nn.MSELoss()), optimizer, **more
    ), net


def same(net, expected):
    np.testing.assert_allclose(
        net.weight.asnumpy(), expected.weight.asnumpy(), rtol=0, atol=3e-6
    )
    assert np.abs(net.weight.asnumpy() - WEIGHT).max() > 1e-3


@pytest.mark.parametrize(
    ("mode", "scale"),
    [
        *(("pynative", scale) for scale in SCALES),
        ("jit", "dynamic"),
        ("graph", "dynamic"),
    ],
)
def test_two_windows_equal_two_large_batches(mode, scale):
    expected, losses = large_batches((0, 12), (12, 24))
    set_mode(mode)
    cell, net = make_cell(steps=4, loss_scale=SCALES[scale], clip_norm=1e6)
    step = ms.jit(cell.construct) if mode == "jit" else cell
    got = [
        step(Tensor(X[first : first + 3]), Tensor(Y[first : first + 3]))
        .asnumpy()
        .item()
        for first in range(0, 24, 3)
    ]
    same(net, expected)
    np.testing.assert_allclose(
        [np.mean(got[:4]), np.mean(got[4:]), cell.optimizer.result.loss],
        [*losses, losses[1]],
        rtol=1e-5,
    )
    assert cell.optimizer.result.optimizer_step == 2


def first_of(x, y):
    return x[0, 0]


def summed(logits, labels):
    return ops.square(logits - labels).sum() / 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight", [first_of, None], ids=["a function", "none"])
def test_custom_weights_are_summed(mode, weight):
    """A function of the inputs gives the weight. With None each micro-batch weighs
    1.
    """
    set_mode(mode)
    cell, _ = make_cell(weight, steps=None)
    step = ms.jit(cell.construct) if mode == "jit" else cell
    x = np.abs(X)
    step(Tensor(x[:2]), Tensor(Y[:2]))
    step(Tensor(x[2:4]), Tensor(Y[2:4]))
    held = cell.optimizer.storage.weight.asnumpy().item()
    assert held == pytest.approx(
        2.0 if weight is None else float(x[0, 0] + x[2, 0]), rel=1e-6
    )


def test_summed_losses_are_divided_by_items():
    expected, _ = large_batches((0, 20))
    cell, net = make_cell(loss=summed, steps=3, reduction="sum_per_item")
    for first, last in ((0, 8), (8, 16), (16, 20)):
        cell(Tensor(X[first:last]), Tensor(Y[first:last]))
    same(net, expected)


def stock(mode, loss_scale, **options):
    set_mode(mode)
    net = make_net()
    optimizer = gradaccum.wrap(
        nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=2, loss_scale=loss_scale
    )
    return (
        nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, **options),
        optimizer,
        net,
    )


@pytest.mark.parametrize(
    ("mode", "scale"), [("pynative", "static"), *((mode, "dynamic") for mode in MODES)]
)
def test_unscaled_loss_is_refused(mode, scale):
    """The first micro-batch raises before it adds anything, and so does each further
    try.
    """
    cell, optimizer, _ = stock(mode, SCALES[scale])
    step = ms.jit(cell.construct) if mode == "jit" else cell
    for _ in range(2):
        with pytest.raises(
            gradaccum.UsageError,
            match=r"loss scale.*TrainOneStepCell.*scale\(loss\).*sens",
        ):
            step(Tensor(X[:3]), Tensor(Y[:3]))
    assert optimizer.storage.micro_step.asnumpy() == 0


@pytest.mark.parametrize("mode", MODES)
def test_current_scale_is_a_tensor(mode):
    """Compiled code passes it as ``sens``; it cannot be assigned."""
    cell, optimizer, net = stock(
        mode, gradaccum.DynamicLossScale(1024.0, growth_interval=1)
    )
    assert (
        optimizer.loss_scale.dtype,
        optimizer.loss_scale.shape,
        float(optimizer.loss_scale),
    ) == (ms.float32, (), 1024.0)
    with_sens = ops.GradOperation(get_by_list=True, sens_param=True)(
        cell.network, optimizer.parameters
    )

    def step(x, y):
        return optimizer(with_sens(x, y, optimizer.loss_scale))

    step = ms.jit(step) if mode == "jit" else step
    for first in range(0, 24, 6):
        step(Tensor(X[first : first + 6]), Tensor(Y[first : first + 6]))
    assert float(optimizer.loss_scale) == 4096.0
    same(net, large_batches((0, 12), (12, 24))[0])
    with pytest.raises(gradaccum.UsageError, match="loss_scale"):
        optimizer.loss_scale = 2.0


def test_stock_cell_takes_scale_as_sens():
    """MindSpore's own cell takes a number, so only a scale that never moves."""
    expected, _ = large_batches((0, 12))
    _, optimizer, net = stock("pynative", 1024.0)
    cell = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), optimizer, sens=float(optimizer.loss_scale)
    )
    for first in (0, 6):
        cell(Tensor(X[first : first + 6]), Tensor(Y[first : first + 6]))
    same(net, expected)


class Tempered(nn.Cell):
    """A loss whose first input is one number."""

    def __init__(self):
        super().__init__()
        self.dense = make_net()

    def construct(self, temperature, x):
        return ops.square(self.dense(x) / temperature).mean()


def second(temperature, x):
    return x.shape[0]


@pytest.mark.parametrize("mode", MODES)
def test_input_without_items_needs_weight(mode):
    set_mode(mode)
    net = Tempered()
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=2)
    for weight, fails in (("items", True), (second, False)):
        cell = (
            TrainOneStepCell(net, optimizer)
            if weight == "items"
            else TrainOneStepCell(net, optimizer, weight)
        )
        step = ms.jit(cell.construct) if mode == "jit" else cell
        with (
            pytest.raises(gradaccum.ArgumentTypeError, match=r"weight.*shape")
            if fails
            else nullcontext()
        ):
            step(Tensor(2.0, ms.float32), Tensor(X[:3]))
    assert optimizer.storage.weight.asnumpy() == 3.0


def test_cell_refuses_wrong_arguments():
    net = make_net()
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"optimizer.*wrap"):
        TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1))
    wrapped = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="weight"):
        TrainOneStepCell(net, wrapped, weight=4)


class Normalized(nn.Cell):
    def __init__(self):
        super().__init__()
        self.normalize, self.dense = nn.BatchNorm1d(4), make_net()

    def construct(self, x):
        return self.dense(self.normalize(x))


def test_saved_cell_holds_normalization_statistics(tmp_path):
    def make():
        net = Normalized()
        optimizer = gradaccum.wrap(
            nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=2
        )
        return TrainOneStepCell(
            nn.WithLossCell(net, nn.MSELoss()), optimizer
        ).set_train(), net

    (trained, net), (resumed, other) = make(), make()
    for first in range(0, 18, 6):
        trained(Tensor(3 + X[first : first + 6]), Tensor(Y[first : first + 6]))
    ms.save_checkpoint(trained, str(tmp_path / "cell.ckpt"))
    load_checkpoint_into(resumed, ms.load_checkpoint(str(tmp_path / "cell.ckpt")))
    expected, got = (
        each.set_train(False)(Tensor(X)).asnumpy() for each in (net, other)
    )
    assert np.abs(net.normalize.moving_mean.asnumpy()).max() > 0.1
    np.testing.assert_array_equal(got, expected)
