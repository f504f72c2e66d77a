"""The collectives of a window beside `benchmarks.cost_law`, as MindSpore compiles
them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import get_group_size

import gradaccum
from benchmarks.cost_law import WAYS, Sent, Window
from gradaccum_mindspore import AccumulatingOptimizer

from ..mindspore_graphs import saved_graphs

MODELS = ((3, 1000), (30, 2**18 - 1), (2, 2**18))
"""How many tensors, and the elements of each: small ones in one bucket, small ones in
two, large ones alone.
"""


COLLECTIVE = re.compile(
    r"= (?:PrimFunc_)?(AllReduce|AllGather|ReduceScatter|Broadcast)"
    r"\(.*\n?.*?-> \(<Tensor\[\w+\], \((\d+)"
)


def sent(texts: Sequence[str]) -> list[tuple[str, int]]:
    """The collectives in the texts of some graphs, and how many numbers each sends."""
    return [
        (name, int(size)) for text in texts for name, size in COLLECTIVE.findall(text)
    ]


def wrapped(
    tensors: int, elements: int, steps: int
) -> tuple[AccumulatingOptimizer, tuple[Tensor, ...]]:
    values = tuple(Tensor(np.ones(elements), ms.float32) for _ in range(tensors))
    parameters = [
        Parameter(value, name=f"p{place}") for place, value in enumerate(values)
    ]
    inner = nn.Momentum(parameters, 0.1, 0.9)
    return gradaccum.wrap(inner, steps=steps, data_parallel=True), values


def require_the_law() -> None:
    """Windows of 1 and 3 send the same."""
    workers = get_group_size()
    for tensors, elements in MODELS:
        window = Window(4 * tensors * elements, workers, 3, tensors)
        law = WAYS["MindSpore, data_parallel"].law(window)["allreduce", workers]
        for steps in (1, 3):
            optimizer, gradients = wrapped(tensors, elements, steps)
            with saved_graphs("graph_build") as texts:
                for _ in range(steps - 1):
                    optimizer(gradients)
            assert not sent(texts), "nothing within a window"
            with saved_graphs("graph_build") as texts:
                optimizer(gradients)
            calls = sent(texts)
            assert {kind for kind, _ in calls} == {"AllReduce"}
            assert Sent(len(calls), 4 * sum(size for _, size in calls)) == law
