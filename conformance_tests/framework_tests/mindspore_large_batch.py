"""Helpers for MindSpore's large batches: a model in float64 with its data, and a call
in each of the modes.
"""

import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from .mindspore_common import set_mode

MODES = ("pynative", "jit", "graph", "cell")
"""From Python in PyNative and in graph mode; and inside compiled code: in
`mindspore.jit`, and in a Cell in graph mode.
"""
by_mode = pytest.mark.parametrize("mode", MODES)
from_python = pytest.mark.parametrize("mode", ["pynative", "graph"])
ITEMS = 7
RNG = np.random.RandomState(3)
X = RNG.randn(ITEMS, 4)
Y = RNG.randn(ITEMS, 2)
START = RNG.randn(2, 4)


class Net(nn.Cell):
    """``tanh(x W)``, with a parameter that no loss uses."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(START, ms.float64), name="weight")
        self.unused = Parameter(Tensor([1.0, 2.0], ms.float64), name="unused")

    def construct(self, x):
        return ops.tanh(ops.matmul(x, self.weight.T))


class Calls(nn.Cell):
    def __init__(self, made):
        super().__init__(auto_prefix=False)
        self.made = made

    def construct(self, *batch):
        return self.made(*batch)


def in_mode(mode, made):
    """`made` as it is called in a mode, which is set."""
    set_mode("graph" if mode in ("graph", "cell") else "pynative")
    if mode == "cell":
        return Calls(made)
    if mode != "jit":
        return made

    @ms.jit
    def compiled(*batch):
        return made(*batch)

    return compiled


def tensors(*arrays):
    return tuple(Tensor(array, ms.float64) for array in arrays)


def arrays(nest):
    """The arrays of a nest of Tensors, flat."""
    if isinstance(nest, Tensor):
        return [nest.asnumpy().astype(np.float64)]
    return [array for each in nest for array in arrays(each)]


def distance(found, expected):
    """The largest difference, relative to the largest number of each array."""
    pairs = list(zip(arrays(found), arrays(expected), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300) for a, b in pairs)


def trained(net):
    return ParameterTuple(net.trainable_params())


@pytest.fixture
def seed(request):
    """Sets MindSpore's global seed, or leaves none set, which only its module can do;
    for a test of a module that imports it.
    """
    module = sys.modules["mindspore.common.seed"]
    before = module._GLOBAL_SEED
    module._GLOBAL_SEED = None
    if request.param is not None:
        ms.set_seed(request.param)
    yield request.param
    module._GLOBAL_SEED = before
