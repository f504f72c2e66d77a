"""The network, its data, one of two workers that share them, and the truth: every
update by hand, in NumPy's float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import BIAS, WEIGHT, set_mode
from gradaccum_mindspore import TrainOneStepCell

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
        x, y = (
            random.randn(ROWS, 4).astype(np.float32),
            random.randn(ROWS, 2).astype(np.float32),
        )
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


class Truth:
    """One process that has all micro-batches: the mean of their items, and momentum."""

    def __init__(self) -> None:
        self.arrays = [WEIGHT.astype(np.float64), BIAS.astype(np.float64)]
        self.velocities = [0 * array for array in self.arrays]
        self.norm = np.nan

    def window(self, batches: Sequence[Batch], clip_norm: float = np.inf) -> None:
        weights = [mask.sum(dtype=np.float64) for _, _, mask in batches]
        trees = [self.gradient(batch) for batch in batches]
        total = [
            sum(w * tree[i] for w, tree in zip(weights, trees, strict=True))
            / sum(weights)
            for i in range(2)
        ]
        self.norm = np.sqrt(sum(np.square(part).sum() for part in total))
        for array, velocity, part in zip(
            self.arrays, self.velocities, total, strict=True
        ):
            velocity *= 0.9
            velocity += part * min(1.0, clip_norm / self.norm)
            array -= 0.1 * velocity

    def gradient(self, batch: Batch) -> list[np.ndarray]:
        x, y, mask = (np.asarray(array, np.float64) for array in batch)
        off = mask * (x @ self.arrays[0].T + self.arrays[1] - y) / mask.sum()
        return [off.T @ x, off.sum(0)]


class Loss(nn.Cell):
    """One layer, and half the mean square of a micro-batch's items."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            Parameter(Tensor(WEIGHT), name="weight"),
            Parameter(Tensor(BIAS), name="bias"),
        )

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
        hosted: bool = False,
        **options: Any,
    ) -> None:
        set_mode(mode)
        self.net = Loss()
        optimizer = inner(self.net.trainable_params(), 0.1, 0.9)
        self.opt = gradaccum.wrap(
            optimizer, steps=steps, **{"data_parallel": True, **options}
        )
        self.cell = TrainOneStepCell(self.net, self.opt, items)
        if not hosted:  # The window as one graph, as in a Cell of the user's.
            object.__setattr__(self.cell, "host", None)
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


def require_truth(worker: Worker, truth: Truth) -> None:
    for name, found, expected in zip(
        ("weight", "bias"), numbers(worker), truth.arrays, strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6, err_msg=name)
    moved = np.abs(truth.arrays[0] - WEIGHT).max()
    assert moved > 1e-3, "the comparison would pass without an update"


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
