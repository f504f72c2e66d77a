"""The network, its data, one of two workers that share them, and one process that has
all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from gradaccum_mindspore import TrainOneStepCell

from ..mindspore_common import BIAS, WEIGHT, set_mode

WORLD = 2
COUNTS = (6, 3)
"""Micro-batches on each worker: in windows of four a whole one, and a tail that only
one worker has.
"""
ROWS = 9
"""Of each micro-batch, some of them masked: one shape is compiled once."""
STEPS = 4

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs, targets and a mask of the rows that count."""
Result = gradaccum.StepResult


def micro_batches(rank: int) -> list[Batch]:
    """Of unequal sizes."""
    random = np.random.RandomState(1 + rank)
    batches = []
    for index in range(COUNTS[rank]):
        x = random.randn(ROWS, 4).astype(np.float32)
        y = random.randn(ROWS, 2).astype(np.float32)
        batches.append(
            (x, y, (np.arange(ROWS) < 3 + rank + index).astype(np.float32)[:, None])
        )
    return batches


def all_windows() -> list[list[Batch]]:
    workers = [micro_batches(rank) for rank in range(WORLD)]
    return [
        [batch for worker in workers for batch in worker[first : first + STEPS]]
        for first in range(0, max(COUNTS), STEPS)
    ]


class Loss(nn.Cell):
    """One layer, and half the mean square of a micro-batch's items."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(WEIGHT), name="weight")
        self.bias = Parameter(Tensor(BIAS), name="bias")

    def construct(self, x: Any, y: Any, mask: Any) -> Any:
        off = ops.matmul(x, self.weight.T) + self.bias - y
        return ops.square(mask * off).sum() / mask.sum() / 2


def items(x: Any, y: Any, mask: Any) -> Any:
    return mask.sum()


class Worker:
    """One of them, in one mode: `learn` takes in a micro-batch."""

    def __init__(
        self,
        mode: str = "pynative",
        steps: int | None = STEPS,
        inner: Callable[..., nn.Optimizer] = nn.Momentum,
        **options: Any,
    ) -> None:
        set_mode(mode)
        self.net = Loss()
        optimizer = inner(self.net.trainable_params(), 0.1, 0.9)
        self.opt = gradaccum.wrap(
            optimizer, steps=steps, **{"data_parallel": True, **options}
        )
        self.cell = TrainOneStepCell(self.net, self.opt, items)
        self.step: Callable[..., Any] = (
            ms.jit(self.cell.construct) if mode == "jit" else self.cell
        )

    def learn(self, batch: Batch) -> None:
        self.step(*map(Tensor, batch))

    def train(self, batches: Sequence[Batch]) -> Worker:
        for batch in batches:
            self.learn(batch)
        self.opt.flush()
        return self


def reference(windows: Sequence[Sequence[Batch]], **options: Any) -> Worker:
    """One process with all micro-batches."""
    worker = Worker(steps=None, data_parallel=False, **options)
    for window in windows:
        worker.train(window)
    return worker


def require_equal(worker: Worker, expected: Worker) -> None:
    """To the one process that has all micro-batches, and on all workers alike."""
    for found, truth, start in zip(
        numbers(worker), numbers(expected), (WEIGHT, BIAS), strict=True
    ):
        np.testing.assert_allclose(found, truth, rtol=0, atol=3e-6)
        assert np.abs(truth - start).max() > 1e-3
    # One worker's flush applied the last update, another one's found no window.
    result = worker.opt.result._replace(applied=False)
    assert result.optimizer_step == expected.opt.result.optimizer_step
    require_same_everywhere((numbers(worker), result))


def require_same_everywhere(value: Any) -> None:
    """Bit for bit: the workers compare the digests of what they hold."""
    set_mode("pynative")
    digest = np.frombuffer(
        hashlib.sha256(repr(value).encode()).digest(), np.uint8
    ).astype(np.int32)
    rows = ops.AllGather()(Tensor(digest)).asnumpy().reshape(WORLD, -1)
    assert (rows == rows[0]).all(), value


def numbers(worker: Worker) -> list[list[float]]:
    return [p.asnumpy().tolist() for p in (worker.net.weight, worker.net.bias)]
