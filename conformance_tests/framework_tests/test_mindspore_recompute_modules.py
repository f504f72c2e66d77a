"""A recomputed Cell in segments, nested, copied or given nests: it runs twice for a gradient alone, and needs less memory."""

import copy
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from conformance_tests.framework_tests.mindspore_common import HOOKS, MODES, pynative_after  # noqa: F401
from conformance_tests.framework_tests.mindspore_recompute_cells import X, equal, gradients, make, sequence
from gradaccum_mindspore.recomputation.module import recompute

pytestmark = HOOKS

RUNS = []


class Chain(nn.Cell):
    """Layers that count their runs."""

    def __init__(self, depth=9):
        super().__init__()
        self.layers = nn.SequentialCell(*[Counting() for _ in range(depth)])

    def construct(self, x):
        return self.layers(x).sum()


class Counting(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, x):
        RUNS.append(1)
        return ops.tanh(self.dense(x))


def test_runs_twice_for_a_gradient_alone():
    net = make(Chain)
    recompute(net.layers)
    for forward, runs in ((lambda: net(X), 9), (lambda: ms.value_and_grad(net, None, net.trainable_params())(X), 18)):
        RUNS.clear()
        forward()
        assert len(RUNS) == runs
    RUNS.clear()
    with ms._no_grad():
        net(X)
    assert len(RUNS) == 9


@pytest.mark.parametrize(("depth", "segments", "expected"), [(9, None, [3, 3, 3]), (5, None, [3, 2]), (7, 2, [4, 3]), (1, None, [1])])
def test_segments(depth, segments, expected):
    layers = nn.SequentialCell(*[nn.Dense(4, 4) for _ in range(depth)])
    assert recompute(layers, segments=segments) is layers
    assert [len(run.layers) for run in layers.cell_list] == expected
    assert len(layers) == depth


class Nested(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.eye(4) * 0.5, ms.float32), name="w")

    def construct(self, pair, scale=1.0, more=None):
        return {"out": (ops.tanh(pair[0]["x"] @ self.w) * scale, pair[1] * more)}


def test_nests_and_keywords():
    """A Tensor in a nest or under a keyword gets its gradient; MindSpore's default way drops it without a word."""

    def gradient(cell):
        def loss(x):
            y = ops.tanh(x @ cell.w)
            out = cell(({"x": y}, y * 3), scale=2.0, more=y)["out"]
            return (out[0] * out[1]).sum()

        return [g.asnumpy() for g in ms.grad(loss, None, [cell.w])(X)]

    assert equal(gradient(Nested()), gradient(recompute(Nested())))


@pytest.mark.parametrize("mode", MODES)
def test_copy(mode):
    """A copy recomputes itself, with its own Parameters, and its statistics move once as well."""
    plain, net = make(), sequence(make())
    twin, expected = copy.deepcopy(net), gradients(plain, plain.trainable_params(), mode)
    before = [p.asnumpy().copy() for p in net.get_parameters()]
    names = ("dense", "out", "norm")
    for p, other in zip(twin.get_parameters(), plain.get_parameters(), strict=True):
        assert p.shape == other.shape, names
    found = gradients(twin, twin.trainable_params(), mode)
    assert equal([p.asnumpy() for p in net.get_parameters()], before)
    assert equal([p.asnumpy() for p in twin.get_parameters()], [p.asnumpy() for p in plain.get_parameters()])
    assert mode != "pynative" or equal(found, expected)


PEAK = Path(__file__).with_name("mindspore_peak.py")


@pytest.mark.deep
@pytest.mark.parametrize("mode", MODES)
def test_memory(mode):
    """Peak memory of one gradient over what is held before it, each in its own process."""
    plain, recomputed = (int(peak(mode, how)) for how in ("plain", "recomputed"))
    assert recomputed < 0.7 * plain, (plain, recomputed)


def peak(mode, how):
    done = subprocess.run([sys.executable, str(PEAK), mode, how], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]
