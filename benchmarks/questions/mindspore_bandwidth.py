"""MindSpore: how near the accumulation itself comes to the speed of memory, beside
NumPy's triad, in GRAPH_MODE.

Gradients are an input, so that nothing is left of a micro-batch but what is asked
about: the wrapped optimizer, whose window does not end while it is measured, adds to
the sums with MindSpore's own ``assign_add``, in place, and writes its few scalars. So
that operator is its limit, whatever memory could give. Everything runs on one core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

import gradaccum
from benchmarks import triad
from benchmarks.case import Case

OWN_TRIAD = "b + s * c"
OWN_ADDITION = "assign_add"
MANY = 2**30
"""Steps of a window that does not end while it is measured."""


class Triad(nn.Cell):  # type: ignore[misc]
    """Its result is fresh memory, as any operator's; one row of it is handed out."""

    def construct(self, b: Any, c: Any) -> Any:
        return (b + triad.SCALE * c)[0]


class Addition(nn.Cell):  # type: ignore[misc]
    """Adds gradients to sums in place."""

    def __init__(self, sums: Any) -> None:
        super().__init__(auto_prefix=False)
        self.sums = sums
        self.count = Parameter(Tensor(0, ms.int32), name="count")
        self.one = Tensor(1, ms.int32)
        self.map = ops.HyperMap()

    def construct(self, gradients: Any) -> Any:
        self.map(ops.partial(ops.assign_add), self.sums, gradients)
        return ops.assign_add(self.count, self.one)


class MicroBatch(nn.Cell):  # type: ignore[misc]
    """What a training step does with its gradients."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, gradients: Any) -> Any:
        return self.optimizer(gradients)


def cases(quick: bool) -> Iterator[Case]:
    triad.one_core()
    ms.set_context(mode=ms.GRAPH_MODE)
    gradients = tuple(
        Tensor(np.full(triad.SHAPE, triad.GRADIENT, np.float32))
        for _ in range(triad.TENSORS)
    )
    own = {
        OWN_TRIAD: _triad(),
        OWN_ADDITION: _run(Addition(_parameters("sum")), gradients),
    }
    optimizer = gradaccum.wrap(
        nn.SGD(_parameters("weight"), learning_rate=0.1), steps=MANY
    )
    contestants = own | {"gradaccum": _run(MicroBatch(optimizer), gradients)}
    moved = triad.YARDSTICKS | dict.fromkeys(contestants, triad.FLOAT32)
    yield Case(
        "float32 gradients and sums",
        triad.NAME,
        triad.yardsticks() | contestants,
        rates=triad.rates(moved),
    )


def _parameters(name: str) -> Any:
    return ParameterTuple(
        [
            Parameter(Tensor(np.ones(triad.SHAPE, np.float32)), name=f"{name}{i}")
            for i in range(triad.TENSORS)
        ]
    )


def _triad() -> Callable[[], object]:
    return _run(
        Triad(),
        *(
            Tensor(np.full((triad.ELEMENTS // 1024, 1024), value, np.float32))
            for value in (1.0, 2.0)
        ),
    )


def _run(step: Any, *given: Any) -> Callable[[], object]:
    return lambda: step(*given).asnumpy()
