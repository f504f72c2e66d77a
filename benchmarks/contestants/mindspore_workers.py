"""One of the workers that msrun starts: ``mindspore_workers.py HOST PORT``. It builds
contestants and runs windows as the question asks.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from math import prod
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

os.environ["MS_DEV_DUMP_IR_PASSES"] = (
    "graph_build"  # the graphs of kernels alone; read when MindSpore is imported
)

import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

import gradaccum
from benchmarks.contestants.mindspore_peers import (
    Net,
    TrainStep,
    TutorialAccumulator,
    adam,
    batch,
)

THEIRS, OURS = "DistributedGradReducer per micro-batch", "gradaccum"
WIDTH, ITEMS = 512, 8
REDUCTION = re.compile(r"= AllReduce\(.*\n *: \(<Tensor\[Float32\], \(([\d, ]*)\)>\)")


class Reduced(nn.Cell):  # type: ignore[misc]
    """As `mindspore.nn.TrainOneStepCell` in data parallel mode: the mean over the
    workers of each micro-batch's gradients.
    """

    def __init__(self, take: Any, net: Net) -> None:
        super().__init__(auto_prefix=False)
        self.take = take
        self.reducer = nn.DistributedGradReducer(
            net.trainable_params(), mean=True, degree=get_group_size()
        )

    def construct(self, gradients: Any) -> Any:
        return self.take(self.reducer(gradients))


def build(label: str, steps: int) -> tuple[Callable[[], object], dict[str, float]]:
    """A window of `steps` micro-batches, compiled, and what it sends."""
    net = Net(WIDTH, steps if label == THEIRS else 1)
    if label == THEIRS:
        take = Reduced(TutorialAccumulator(adam(net), steps), net)
    else:
        take = gradaccum.wrap(adam(net), steps=steps, data_parallel=True)
    step, x, weight = (
        TrainStep(net, take),
        batch(ITEMS, WIDTH),
        net.trainable_params()[0],
    )

    def window() -> object:
        for _ in range(steps):
            step(x)
        return weight.asnumpy()

    return window, sent(window, steps)


def sent(window: Callable[[], object], steps: int) -> dict[str, float]:
    """Counted in the graphs that the first window compiles: the one with the matrix
    products runs in every micro-batch.
    """
    folder = Path(tempfile.mkdtemp())
    ms.set_context(save_graphs=2, save_graphs_path=str(folder))
    window()
    ms.set_context(save_graphs=0)
    texts = [
        path.read_text(encoding="utf-8") for path in folder.rglob("*graph_build_*.ir")
    ]
    shutil.rmtree(folder)
    numbers = [
        [
            prod(map(int, filter(None, shape.split(", "))))
            for shape in REDUCTION.findall(text)
        ]
        * (steps if "MatMul" in text else 1)
        for text in texts
    ]
    return {
        "AllReduces": float(sum(map(len, numbers))),
        "MB sent": round(sum(map(sum, numbers)) * 4e-6, 2),
    }


def main(host: str, port: int) -> None:
    """Answer each message of the question: ``(label, steps)`` builds a contestant, a
    label runs a window of it, None ends.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    windows: dict[str, Callable[[], object]] = {}
    with Client((host, port)) as connection:
        connection.send(get_rank())
        while (message := connection.recv()) is not None:
            if isinstance(message, tuple):
                windows[message[0]], counts = build(*message)
                connection.send(counts)
            else:
                windows[message]()
                connection.send(None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
