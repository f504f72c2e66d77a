"""Helpers of MindSpore's tests: its modes, a network of one layer with its data, and
two bare parameters.
"""

import warnings
from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from packaging.version import Version

from gradaccum import GradAccumWarning
from gradaccum_mindspore import load_checkpoint_into

MODES = ("pynative", "jit", "graph")
by_mode = pytest.mark.parametrize("mode", MODES)
by_loader = pytest.mark.parametrize(
    "load", [load_checkpoint_into, ms.load_param_into_net]
)
RNG = np.random.RandomState(0)
X = RNG.randn(24, 4).astype(np.float32)
Y = RNG.randn(24, 2).astype(np.float32)
WEIGHT = RNG.randn(2, 4).astype(np.float32)
BIAS = RNG.randn(2).astype(np.float32)


def needs_mindspore(version, why):
    """A mark for tests of what older versions of MindSpore do not do."""
    return pytest.mark.skipif(
        Version(ms.__version__) < Version(version),
        reason=f"needs MindSpore {version}: {why}",
    )


HOOKS = needs_mindspore(
    "2.9", "before it MindSpore calls no hooks for the tensors that it keeps"
)
BFLOAT16 = needs_mindspore(
    "2.9", "before it MindSpore has no bfloat16 kernel for a CPU"
)


@pytest.fixture(autouse=True)
def pynative_after(tmp_path, monkeypatch):
    """For each test of a module that imports it."""
    # a failed compilation writes a folder into the current one
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


def set_mode(mode):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)


def make_net():
    net = nn.Dense(4, 2)
    ops.assign(net.weight, Tensor(WEIGHT))
    ops.assign(net.bias, Tensor(BIAS))
    return net


def two_parameters():
    return [
        Parameter(Tensor(np.ones(shape), ms.float32), name=name)
        for name, shape in (("a", 3), ("b", 2))
    ]


def two_gradients(a=1.0, b=None):
    """Gradients of `two_parameters`: `a` everywhere, or `b` in the second one."""
    b = a if b is None else b
    return Tensor(np.full(3, a), ms.float32), Tensor(np.full(2, b), ms.float32)


class Descent(nn.Optimizer):
    """Plain gradient descent for one parameter of any dtype. MindSpore's own optimizers
    take no float64.
    """

    def construct(self, gradients):
        return ops.assign_sub(self.parameters[0], gradients[0])


def entries_of(cell):
    """A checkpoint of the cell, as MindSpore loads it."""
    return {
        p.name: Parameter(Tensor(p.asnumpy().copy(), p.dtype), name=p.name)
        for p in cell.get_parameters()
    }


def values(optimizer):
    """The first element of each of its parameters."""
    return [float(p.asnumpy()[0]) for p in optimizer.parameters]


@contextmanager
def warned():
    """The texts of gradaccum's warnings, when the context has ended."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradAccumWarning)
        yield texts
    texts += [str(each.message) for each in caught]
