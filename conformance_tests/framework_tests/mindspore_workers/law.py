"""The collectives of a window beside `benchmarks.cost_law`: called from Python, and in
the graphs that MindSpore compiles.
"""

from __future__ import annotations

import re
from math import prod

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import get_group_size, init

import gradaccum
from benchmarks.cost_law import WAYS, Sent, Window
from conformance_tests.framework_tests.mindspore_common import set_mode
from conformance_tests.framework_tests.mindspore_graphs import saved_graphs
from conformance_tests.framework_tests.mindspore_workers.counting import called
from gradaccum_mindspore import AccumulatingOptimizer

MODELS = {
    "small ones in one bucket": (3, 1000),
    "small ones in two": (30, 2**18 - 1),
    "large ones alone": (2, 2**18),
}
"""How many tensors, and the elements of each."""
COMPILED = r"= AllReduce\(.*\n *: \(<Tensor\[Float32\], \(([\d, ]*)\)>\)"
OTHERS = r"= (AllGather|ReduceScatter|Broadcast)\("


def by_hand(window: Window) -> Sent:
    return WAYS["MindSpore, data_parallel"].law(window)["allreduce", window.workers]


def wrapped(
    tensors: int, elements: int, steps: int
) -> tuple[AccumulatingOptimizer, tuple[Tensor, ...]]:
    values = [Tensor(np.ones(elements), ms.float32) for _ in range(tensors)]
    parameters = [
        Parameter(value, name=f"p{place}") for place, value in enumerate(values)
    ]
    return gradaccum.wrap(
        nn.Momentum(parameters, 0.1, 0.9), steps=steps, data_parallel=True
    ), tuple(values)


def require_the_law() -> None:
    """In PyNative windows of 1 and 3 send the same; in graph mode the graph that ends a
    window has what one window sends.

    A flush sends the numbers once more, to see whether all flush.
    """
    workers = get_group_size()
    for name, (tensors, elements) in MODELS.items():
        law = by_hand(Window(4 * tensors * elements, workers, 3, tensors))
        for steps in (1, 3):
            optimizer, gradients = wrapped(tensors, elements, steps)
            with called() as calls:
                for _ in range(steps):
                    assert not calls, "nothing within a window"
                    optimizer(gradients)
            assert {kind for kind, _ in calls} == {"AllReduce"}
            assert Sent(len(calls), 4 * sum(size for _, size in calls)) == law, (
                name,
                steps,
            )
            with called() as calls:
                optimizer.flush()
            assert calls == [("AllReduce", 8 + workers)]
    for name, (tensors, elements) in list(MODELS.items())[::2]:
        set_mode("graph")
        optimizer, gradients = wrapped(tensors, elements, 3)
        with saved_graphs("graph_build") as texts:
            optimizer(gradients)
        found = [
            prod(map(int, filter(None, shape.split(", "))))
            for text in texts
            for shape in re.findall(COMPILED, text)
        ]
        assert Sent(len(found), 4 * sum(found)) == by_hand(
            Window(4 * tensors * elements, workers, 3, tensors)
        ), (name, found)
        assert not re.findall(OTHERS, "".join(texts))
        set_mode("pynative")


if __name__ == "__main__":
    init()
    require_the_law()
