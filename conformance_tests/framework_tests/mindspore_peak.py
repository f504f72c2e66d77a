"""The peak of a process's memory while MindSpore differentiates a chain of layers, with
and without recomputation, in megabytes.

``python mindspore_peak.py MODE HOW``: MindSpore counts no memory on a CPU, so the
process's own resident set is read, once per process.
"""

import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

X = Tensor(np.random.RandomState(0).randn(2048, 256).astype(np.float32))


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Dense(256, 1024), nn.Dense(1024, 256)

    def construct(self, x):
        return x + self.narrow(ops.tanh(ops.exp(-ops.tanh(self.wide(x)))))


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(*[Layer() for _ in range(9)])

    def construct(self, x):
        return (self.layers(x) ** 2).sum()


def status(field: str) -> int:
    """A field of this process's memory in kilobytes."""
    return int(
        re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]
    )


def main(mode: str, how: str) -> None:
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    net = Net()
    if how == "recomputed":
        for layer in net.layers:
            layer.recompute()
    step = ms.value_and_grad(net, None, net.trainable_params())
    step = ms.jit(step) if mode == "jit" else step
    held = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(X)[0].asnumpy()
    print((status("VmHWM") - held) // 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
