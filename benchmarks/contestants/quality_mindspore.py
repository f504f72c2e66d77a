"""The quality question's MindSpore runs: one jitted step each, compiled once for each
size of a batch and used again for every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

import gradaccum
from benchmarks.contestants.digits import (
    LEARNING_RATE,
    MOMENTUM,
    STEPS,
    Batch,
    Parameters,
    Window,
    first_parameters,
    whole,
)
from benchmarks.contestants.mindspore_peers import TutorialAccumulator
from benchmarks.contestants.runs import GRADACCUM, LARGE, Run


def runs() -> dict[str, Callable[[Parameters], Run]]:
    """By contestant; each is given the first parameters, and is over when its maker is
    given the next ones.
    """
    makers = {
        LARGE: LargeBatch,
        GRADACCUM: Gradaccum,
        "the tutorials' accumulator": Tutorial,
    }
    return {name: partial(_begin, make()) for name, make in makers.items()}


class Network(nn.Cell):  # type: ignore[misc]
    """Two dense layers and their mean cross-entropy, divided by `share`."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = (
            Parameter(Tensor(value), name=name)
            for name, value in zip(
                ("w1", "b1", "w2", "b2"), first_parameters(0), strict=True
            )
        )
        self.share = share

    def construct(self, x: Any, y: Any) -> Any:
        logits = (
            ops.matmul(ops.relu(ops.matmul(x, self.w1) + self.b1), self.w2) + self.b2
        )
        return ops.cross_entropy(logits, y) / self.share


class Step(nn.Cell):  # type: ignore[misc]
    """Forward, backward and whatever takes the gradients."""

    def __init__(self, network: Network, take: Any, *, weighted: bool) -> None:
        super().__init__(auto_prefix=False)
        self.take, self.weighted = take, weighted
        self.gradient = ms.value_and_grad(
            network, None, ParameterTuple(network.trainable_params())
        )

    def construct(self, x: Any, y: Any, weight: Any) -> Any:
        _, gradients = self.gradient(x, y)
        if self.weighted:
            return self.take(gradients, weight=weight)
        return self.take(gradients)


class LargeBatch:
    """The truth: one gradient and one update for each window."""

    share = 1
    weighted = False

    def __init__(self) -> None:
        network = Network(self.share)
        self.weights = network.trainable_params()
        self.optimizer = self.accumulating(
            nn.Momentum(self.weights, LEARNING_RATE, MOMENTUM)
        )
        self.step = ms.jit(
            Step(network, self.optimizer, weighted=self.weighted).construct
        )
        self.start = {p: p.asnumpy().copy() for p in self.optimizer.get_parameters()}

    def accumulating(self, optimizer: Any) -> Any:
        return optimizer

    def begin(self, first: Parameters) -> None:
        """Everything as it was made, and these parameters."""
        for parameter, value in (
            self.start | dict(zip(self.weights, first, strict=True))
        ).items():
            ops.assign(parameter, Tensor(value))

    def epoch(self, windows: Iterable[Window]) -> None:
        for window in windows:
            self.take(whole(window))

    def take(self, batch: Batch) -> None:
        x, y = batch
        self.step(Tensor(x), Tensor(y.astype(np.int32)), Tensor(len(y), ms.float32))

    def parameters(self) -> Parameters:
        return [weight.asnumpy().copy() for weight in self.weights]


class Gradaccum(LargeBatch):
    """Each micro-batch with its number of items as its weight, and a flush at the
    epoch's end.
    """

    weighted = True

    def accumulating(self, optimizer: Any) -> Any:
        return gradaccum.wrap(optimizer, steps=STEPS)

    def epoch(self, windows: Iterable[Window]) -> None:
        for window in windows:
            for batch in window:
                self.take(batch)
        self.optimizer.flush()


class Tutorial(LargeBatch):
    """It knows no weights and no short window: what an epoch leaves over begins the
    next one's first window.
    """

    share = STEPS

    def accumulating(self, optimizer: Any) -> Any:
        return TutorialAccumulator(optimizer, STEPS)

    def epoch(self, windows: Iterable[Window]) -> None:
        for window in windows:
            for batch in window:
                self.take(batch)


def _begin(run: LargeBatch, first: Parameters) -> Run:
    run.begin(first)
    return run
