"""The rows of MindSpore: mindcv's `TrainStep`, and the accumulator of MindSpore's
tutorial, written from its description.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import gradaccum
import gradaccum_mindspore
from benchmarks.contestants.mindspore_peers import TutorialAccumulator
from benchmarks.scoreboard.measuring import Gradients

FULL, MICRO, STEPS, SHORT_BATCH, SHORT_WINDOW = 8, 2, 4, 7, 6
RANDOM = np.random.default_rng(1)
X = RANDOM.standard_normal((FULL, 5)).astype(np.float32)
Y = (2 * np.sin(X.sum(1, keepdims=True))).astype(np.float32)
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
WEIGHTS = [
    (RANDOM.standard_normal(shape) / 2).astype(np.float32)
    for shape in ((4, 5), (4,), (1, 4), (1,))
]


Make = Callable[[Any, Any, int], Any]
"""Makes a training step of a loss, an optimizer and a number of micro-batches."""


def trained(count: int, micro: bool, make: Make) -> Gradients:
    net = network()
    optimizer = nn.SGD(net.trainable_params(), 1.0)
    step = make(loss_cell(net), optimizer, STEPS if micro else 1)
    for batch in batches(count, MICRO if micro else count):
        step(*batch)
    found = zip(NAMES, net.trainable_params(), WEIGHTS, strict=True)
    return {
        name: value.astype(np.float64) - parameter.asnumpy()
        for name, parameter, value in found
    }


def network() -> Any:
    net = nn.SequentialCell(nn.Dense(5, 4), nn.Tanh(), nn.Dense(4, 1))
    for parameter, value in zip(net.trainable_params(), WEIGHTS, strict=True):
        parameter.set_data(Tensor(value))
    return net


def loss_cell(net: Any) -> Any:
    return nn.WithLossCell(net, nn.MSELoss())


def batches(count: int, size: int) -> list[tuple[Any, Any]]:
    ends = [min(start + size, count) for start in range(0, count, size)]
    return [
        (Tensor(X[start:end]), Tensor(Y[start:end]))
        for start, end in zip(range(0, count, size), ends, strict=True)
    ]


def check(count: int, make: Make, **options: Any) -> gradaccum.LoopReport:
    net = network()
    recorder = gradaccum_mindspore.LoopRecorder(net.trainable_params())
    loss = loss_cell(net)
    step = make(loss, recorder, STEPS)
    micro_batches = batches(count, MICRO)

    def train() -> None:
        for batch in micro_batches:
            step(*batch)

    return gradaccum.check_loop(
        train, recorder, loss, micro_batches, steps=STEPS, **options
    )


def tutorial(loss: Any, optimizer: Any, steps: int) -> Any:
    take = TutorialAccumulator(optimizer, steps)
    gradient = ms.value_and_grad(
        lambda x, y: loss(x, y) / steps, None, optimizer.parameters
    )
    return lambda x, y: take(gradient(x, y)[1])


def mindcv(loss: Any, optimizer: Any, steps: int, **options: Any) -> Any:
    from mindcv.utils.train_step import TrainStep

    ms.set_context(mode=ms.GRAPH_MODE)
    return TrainStep(
        loss,
        optimizer,
        Tensor(1.0, ms.float32),
        gradient_accumulation_steps=steps,
        **options,
    )


def mindcv_short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro, mindcv)


def mindcv_short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro, mindcv)


def mindcv_clipped(*, micro: bool, even: bool) -> Gradients:
    """Equal items. With `even` the limit is out of reach."""
    clipped: dict[str, Any] = {"clip_grad": True, "clip_value": 1e9 if even else 0.1}
    return trained(FULL, micro, lambda *each: mindcv(*each, **clipped))


def tutorial_short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro, tutorial)


def tutorial_short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro, tutorial)


def clipped(*arguments: Any) -> Any:
    return mindcv(*arguments, clip_grad=True, clip_value=0.1)


CHECKED = {
    "mindcv_short_batch": lambda: check(SHORT_BATCH, mindcv),
    "mindcv_short_window": lambda: check(SHORT_WINDOW, mindcv),
    "mindcv_clipped": lambda: check(FULL, clipped),
    "tutorial_short_batch": lambda: check(SHORT_BATCH, tutorial),
    "tutorial_short_window": lambda: check(SHORT_WINDOW, tutorial),
}
