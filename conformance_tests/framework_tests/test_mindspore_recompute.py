"""MindSpore: recomputation gives the same gradient to the bit, repeats dropout, and
moves statistics once.
"""

import copy
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    HOOKS,
    MODES,
    pynative_after,  # noqa: F401
    set_mode,
)
from conformance_tests.framework_tests.mindspore_recompute_cells import (
    HOW,
    Block,
    Net,
    Unread,
    X,
    each,
    equal,
    gradients,
    make,
    sequence,
)
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_mindspore.recomputation.module import recompute

pytestmark = HOOKS


@pytest.mark.parametrize("mode", MODES)
def test_same_bits(mode):
    """Every way to recompute: loss, gradients and all that the forward pass changes."""
    plain = make()
    expected = gradients(plain, plain.trainable_params(), mode)
    buffers = [p.asnumpy() for p in plain.get_parameters()]
    assert float(plain.blocks[3].count.asnumpy()) == 2
    for how, recomputed in HOW.items():
        net = make()
        names = [p.name for p in net.get_parameters()]
        found = gradients(recomputed(net), net.trainable_params(), mode)
        assert equal(found, expected), how
        assert equal([p.asnumpy() for p in net.get_parameters()], buffers), how
        assert [p.name for p in net.get_parameters()] == names, how


@pytest.mark.parametrize("mode", MODES)
def test_half_precision(mode):
    """MindSpore's own recomputation rounds a float32 statistic to half precision, and
    reads buffers that have moved on: off by 30 %.
    """

    def network():
        return make(
            lambda: Net(block=Block if mode == "pynative" else Unread)
        ).to_float(ms.float16)

    plain = network()
    expected = gradients(plain, plain.trainable_params(), mode)
    buffers = [p.asnumpy() for p in plain.get_parameters()]
    for how in HOW:
        net = network()
        assert equal(
            gradients(HOW[how](net), net.trainable_params(), mode), expected
        ), how
        assert equal([p.asnumpy() for p in net.get_parameters()], buffers), how


def test_mixed_precision():
    """Under `mindspore.amp.auto_mixed_precision`, whose choice belongs to the call."""

    def gradient(recomputed):
        net = ms.amp.auto_mixed_precision(recomputed(make()), "O2")
        return gradients(net, net.trainable_params(), "pynative")

    assert equal(gradient(lambda net: net), gradient(sequence))


def test_several_calls_of_one_segment():
    """Each call replays its own draws: two micro-batches before one backward pass, and
    a call that is never differentiated.
    """
    nets = make(), sequence(make())

    def gradient(net):
        def loss(x):
            first, second = net(x), net(2 * x)
            ops.stop_gradient(net(3 * x))
            return first * 2 + second

        ms.set_seed(7)
        return [g.asnumpy() for g in ms.grad(loss, None, net.trainable_params())(X)]

    assert equal(gradient(nets[0]), gradient(nets[1]))


def test_an_error_changes_nothing():
    """A forward pass that raises: the buffers stay, and the next call is as if there
    had been none.
    """
    net = make(Failing)
    recompute(net)
    with pytest.raises(KeyError, match="on purpose"):
        ms.grad(net, None, net.trainable_params())(X)
    assert int(net.count.asnumpy()) == 0
    net.fails = False
    ms.grad(net, None, net.trainable_params())(X)
    assert int(net.count.asnumpy()) == 1


class Failing(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.fails = nn.Dense(4, 4), True
        self.count = Parameter(Tensor(0, ms.int32), requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.count, Tensor(1, ms.int32))
        if self.fails:
            raise KeyError("on purpose")
        return self.dense(x).sum()


@pytest.mark.parametrize(
    "mode", ["pynative", pytest.param("graph", marks=pytest.mark.deep)]
)
def test_wrapped_optimizer(mode):
    """A window of two micro-batches under a loss scale ends with the same
    parameters.
    """

    def trained(recomputed):
        set_mode("pynative")
        net = recomputed(make())
        set_mode(mode)
        opt = gradaccum.wrap(
            nn.SGD(net.trainable_params(), 0.1), steps=2, loss_scale=8.0
        )

        def loss(x):
            return opt.scale(net(x))

        ms.set_seed(7)
        step = ms.value_and_grad(loss, None, net.trainable_params())
        for k in range(4):
            opt(step(X * (k + 1))[1])
        return [p.asnumpy() for p in net.get_parameters()]

    assert equal(trained(lambda net: net), trained(sequence))


# Refusals of recomputation: at the call, or before a second run that would differ from
# the first.


class Channels(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.dropout = nn.Dense(4, 4), nn.Dropout1d(p=0.5)

    def construct(self, x):
        return self.dropout(self.dense(x).reshape(1, 6, 4)).sum()


@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_drawn_again(mode):
    """PyNative mode refuses it by name and leaves the random state; compiled code never
    draws twice.
    """
    net = recompute(make(Channels))
    if mode != "pynative":
        plain = make(Channels)
        assert equal(
            gradients(net, net.trainable_params(), mode),
            gradients(plain, plain.trainable_params(), mode),
        )
        return

    def several():
        """One mask may equal another one by chance."""
        for _ in range(8):
            ms.grad(net, None, net.trainable_params())(X)

    state = ms.get_rng_state().asnumpy()
    with pytest.raises(UsageError, match=r"recompute\(Channels\).*Dropout1d"):
        several()
    assert equal([ms.get_rng_state().asnumpy()], [state])


def test_unseeded_functions():
    """Without `set_seed` MindSpore's functions draw from nowhere: refused. With it they
    are drawn again.
    """
    net = recompute(make(lambda: Drawing()))
    seeds = sys.modules["mindspore.common.seed"]
    ms.grad(net, None, net.trainable_params())(X)
    seeds._GLOBAL_SEED = None
    try:
        with pytest.raises(UsageError, match="set_seed"):
            ms.grad(net, None, net.trainable_params())(X)
    finally:
        ms.set_seed(3)


class Drawing(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, x):
        return (self.dense(x) * ops.rand(6, 4)).sum()


REFUSED = {
    "a function": (lambda: recompute(ops.tanh), ArgumentTypeError, "cell"),
    "a class": (lambda: recompute(nn.Dense), ArgumentTypeError, "cell"),
    "too many segments": (
        lambda: recompute(Net(2).blocks, segments=3),
        ArgumentValueError,
        "segments: expected at most 2",
    ),
    "no segments": (
        lambda: recompute(Net(2).blocks, segments=0),
        ArgumentValueError,
        "segments",
    ),
    "half a segment": (
        lambda: recompute(Net(2).blocks, segments=1.5),
        ArgumentTypeError,
        "segments",
    ),
    "segments of no sequence": (
        lambda: recompute(Net(2), segments=2),
        ArgumentTypeError,
        "SequentialCell",
    ),
    "a list of cells": (
        lambda: recompute(nn.CellList([nn.Dense(2, 2)])),
        ArgumentTypeError,
        "CellList",
    ),
    "twice": (lambda: recompute(recompute(Net(2))), UsageError, "recomputed"),
    "segments twice": (
        lambda: recompute(recompute(Net(2).blocks)),
        UsageError,
        "recomputed",
    ),
    "the whole after a part": (
        lambda: recompute(each(Net(3))),
        UsageError,
        "recomputed",
    ),
    "a function of batch_norm": (
        lambda: recompute(Functional()),
        UsageError,
        "batch_norm",
    ),
}


class Functional(nn.Cell):
    def construct(self, x, mean, var):
        return ops.batch_norm(x, mean, var, training=True)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


# A recomputed Cell in segments, nested, copied or given nests: it runs twice for a
# gradient alone, and needs less memory.


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
    for forward, runs in (
        (lambda: net(X), 9),
        (lambda: ms.value_and_grad(net, None, net.trainable_params())(X), 18),
    ):
        RUNS.clear()
        forward()
        assert len(RUNS) == runs
    RUNS.clear()
    with ms._no_grad():
        net(X)
    assert len(RUNS) == 9


@pytest.mark.parametrize(
    ("depth", "segments", "expected"),
    [(9, None, [3, 3, 3]), (5, None, [3, 2]), (7, 2, [4, 3]), (1, None, [1])],
)
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
    """A Tensor in a nest or under a keyword gets its gradient; MindSpore's default way
    drops it without a word.
    """

    def gradient(cell):
        def loss(x):
            y = ops.tanh(x @ cell.w)
            out = cell(({"x": y}, y * 3), scale=2.0, more=y)["out"]
            return (out[0] * out[1]).sum()

        return [g.asnumpy() for g in ms.grad(loss, None, [cell.w])(X)]

    assert equal(gradient(Nested()), gradient(recompute(Nested())))


@pytest.mark.parametrize("mode", MODES)
def test_copy(mode):
    """A copy recomputes itself, with its own Parameters, and its statistics move once
    as well.
    """
    plain, net = make(), sequence(make())
    twin, expected = (
        copy.deepcopy(net),
        gradients(plain, plain.trainable_params(), mode),
    )
    before = [p.asnumpy().copy() for p in net.get_parameters()]
    names = ("dense", "out", "norm")
    for p, other in zip(twin.get_parameters(), plain.get_parameters(), strict=True):
        assert p.shape == other.shape, names
    found = gradients(twin, twin.trainable_params(), mode)
    assert equal([p.asnumpy() for p in net.get_parameters()], before)
    assert equal(
        [p.asnumpy() for p in twin.get_parameters()],
        [p.asnumpy() for p in plain.get_parameters()],
    )
    assert mode != "pynative" or equal(found, expected)


PEAK = Path(__file__).with_name("mindspore_peak.py")


@pytest.mark.deep
@pytest.mark.parametrize("mode", MODES)
def test_memory(mode):
    """Peak memory of one gradient over what is held before it, each in its own
    process.
    """
    plain, recomputed = (int(peak(mode, how)) for how in ("plain", "recomputed"))
    assert recomputed < 0.7 * plain, (plain, recomputed)


def peak(mode, how):
    done = subprocess.run(
        [sys.executable, str(PEAK), mode, how],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]
