"""MindSpore's error when the system gives no more memory: ``python mindspore_out_of_memory.py MODE``."""

import re
import resource
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum_mindspore.large_batch.auto import is_out_of_memory


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones((256, 256), np.float32)), name="w")

    def construct(self, x):
        for _ in range(6):
            x = ops.tanh(x @ self.w)
        return x.sum()


def main(mode: str) -> None:
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    net = Net()
    step = ms.value_and_grad(net, None, net.trainable_params())
    step = ms.jit(step) if mode == "jit" else step
    large, small = (Tensor(np.ones((items, 256), np.float32)) for items in (200_000, 64))
    step(small)[0].asnumpy()
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + 700 * 2**20,) * 2)
    try:
        step(large)[0].asnumpy()
    except Exception as error:
        print(type(error).__name__, is_out_of_memory(error))
    print(float(step(small)[0].asnumpy()))


if __name__ == "__main__":
    main(*sys.argv[1:])
