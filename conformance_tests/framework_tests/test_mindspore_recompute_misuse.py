"""Refusals of recomputation: at the call, or before a second run that would differ from the first."""

import sys

import mindspore as ms
import pytest
from mindspore import nn, ops

from conformance_tests.framework_tests.mindspore_common import HOOKS, MODES, pynative_after  # noqa: F401
from conformance_tests.framework_tests.mindspore_recompute_cells import Net, X, each, equal, gradients, make
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_mindspore.recomputation.module import recompute

pytestmark = HOOKS


class Channels(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.dropout = nn.Dense(4, 4), nn.Dropout1d(p=0.5)

    def construct(self, x):
        return self.dropout(self.dense(x).reshape(1, 6, 4)).sum()


@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_drawn_again(mode):
    """PyNative mode refuses it by name and leaves the random state; compiled code never draws twice."""
    net = recompute(make(Channels))
    if mode != "pynative":
        plain = make(Channels)
        assert equal(gradients(net, net.trainable_params(), mode), gradients(plain, plain.trainable_params(), mode))
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
    """Without `set_seed` MindSpore's functions draw from nowhere: refused. With it they are drawn again."""
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
    "too many segments": (lambda: recompute(Net(2).blocks, segments=3), ArgumentValueError, "segments: expected at most 2"),
    "no segments": (lambda: recompute(Net(2).blocks, segments=0), ArgumentValueError, "segments"),
    "half a segment": (lambda: recompute(Net(2).blocks, segments=1.5), ArgumentTypeError, "segments"),
    "segments of no sequence": (lambda: recompute(Net(2), segments=2), ArgumentTypeError, "SequentialCell"),
    "a list of cells": (lambda: recompute(nn.CellList([nn.Dense(2, 2)])), ArgumentTypeError, "CellList"),
    "twice": (lambda: recompute(recompute(Net(2))), UsageError, "recomputed"),
    "segments twice": (lambda: recompute(recompute(Net(2).blocks)), UsageError, "recomputed"),
    "the whole after a part": (lambda: recompute(each(Net(3))), UsageError, "recomputed"),
    "a function of batch_norm": (lambda: recompute(Functional()), UsageError, "batch_norm"),
}


class Functional(nn.Cell):
    def construct(self, x, mean, var):
        return ops.batch_norm(x, mean, var, training=True)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()
