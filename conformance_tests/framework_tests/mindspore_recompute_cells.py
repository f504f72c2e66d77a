"""A network with everything that a second run could disturb, the ways to recompute it,
and its gradients in each mode.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from conformance_tests.framework_tests.mindspore_common import set_mode
from gradaccum_mindspore.recomputation.module import recompute

RNG = np.random.RandomState(0)
X = Tensor(RNG.randn(6, 4).astype(np.float32))


class Block(nn.Cell):
    """Two dropouts of different kinds, batch normalization, a counter and a running
    mean.
    """

    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Dense(4, 4), nn.Dense(4, 4)
        self.dropout, self.norm = nn.Dropout(p=0.3), nn.BatchNorm1d(4)
        self.count = Parameter(Tensor(0, ms.int32), requires_grad=False)
        self.top = Parameter(Tensor(np.ones(4), ms.float32), requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.count, Tensor(1, ms.int32))
        y = self.norm(self.dropout(ops.tanh(self.dense(x))))
        ops.assign(self.top, 0.5 * self.top + ops.stop_gradient(y).mean(0))
        return ops.dropout(self.out(y * self.top), 0.2)


class Unread(Block):
    """Without an assignment: compiled code under `to_float` reads from before it, with
    recomputation or without.
    """

    def construct(self, x):
        y = self.norm(self.dropout(ops.tanh(self.dense(x))))
        return ops.dropout(self.out(y * self.top), 0.2)


class Net(nn.Cell):
    def __init__(self, depth=4, block=Block):
        super().__init__()
        self.blocks = nn.SequentialCell(*[block() for _ in range(depth)])

    def construct(self, x):
        return (self.blocks(x) ** 2).sum()


def sequence(net):
    net.blocks = recompute(net.blocks)
    return net


def each(net):
    recompute(net.blocks[0])
    recompute(net.blocks[2])
    return net


HOW = {"segments": sequence, "whole": recompute, "layers": each}


def make(cell=Net, seed=3):
    ms.set_seed(seed)
    net = cell()
    for p in net.trainable_params():
        ops.assign(
            p,
            Tensor(
                np.random.RandomState(len(p.name)).randn(*p.shape).astype(np.float32)
                * 0.5
            ),
        )
    return net.set_train()


def gradients(net, weights, mode, times=2):
    """The loss and the gradients of some micro-batches."""
    set_mode(mode)
    step = ms.value_and_grad(net, None, weights)
    step = ms.jit(step) if mode == "jit" else step
    ms.set_seed(7)
    found = [step(X * (k + 1)) for k in range(times)]
    return [array.asnumpy() for loss, grads in found for array in (loss, *grads)]


def equal(first, second):
    return len(first) == len(second) and all(
        a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True)
    )
