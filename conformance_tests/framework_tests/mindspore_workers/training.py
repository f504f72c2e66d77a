"""MindSpore's own training, in its data-parallel mode: `nn.TrainOneStepCell`, `Model.train` and the package's cell under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

import gradaccum
from conformance_tests.framework_tests.mindspore_common import BIAS, WEIGHT, X, Y, make_net, set_mode
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import WORLD, Truth, require_same_everywhere
from conformance_tests.framework_tests.mindspore_workers.counting import compiled_graphs, require_one_branch
from gradaccum_mindspore import FlushAtEpochEnd, TrainOneStepCell

STEPS, SIZE = 2, 3


@contextmanager
def data_parallel_mode(mode: str, **options: Any) -> Iterator[None]:
    set_mode(mode)
    ms.set_auto_parallel_context(parallel_mode="data_parallel", **options)
    try:
        yield
    finally:
        ms.reset_auto_parallel_context()
        set_mode("pynative")


def large_batches() -> list[np.ndarray]:
    """The parameters after windows over both workers, of which each has every second row."""
    truth, ones = Truth(), np.ones((SIZE * STEPS * WORLD, 1))
    for first in range(0, len(X), len(ones)):
        truth.window([(X[first : first + len(ones)], Y[first : first + len(ones)], ones)])
    return truth.arrays


class HalfSquare(nn.Cell):
    def construct(self, logits: Any, labels: Any) -> Any:
        return (logits - labels).square().mean()


def optimizer_of(net: nn.Cell, **options: Any) -> Any:
    return gradaccum.wrap(nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=STEPS, data_parallel=True, **options)


def require_large_batches(net: nn.Cell, opt: Any) -> None:
    for found, expected, start in zip((net.weight, net.bias), large_batches(), (WEIGHT, BIAS), strict=True):
        assert np.abs(expected - start).max() > 1e-3
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=0, atol=3e-6)
    assert opt.result.optimizer_step == len(X) // (SIZE * STEPS * WORLD)
    require_same_everywhere([p.asnumpy().tolist() for p in (net.weight, net.bias)])


@check
def stock_cell_makes_the_large_batch(rank: int) -> None:
    """Its own reducer does not run."""
    x, y = X[rank::WORLD], Y[rank::WORLD]
    for mode, gradients_mean in (("pynative", False), ("pynative", True), ("graph", False)):
        with data_parallel_mode(mode, gradients_mean=gradients_mean), compiled_graphs() as graphs:
            net = make_net()
            opt = optimizer_of(net)
            cell = nn.TrainOneStepCell(nn.WithLossCell(net, HalfSquare()), opt)
            for first in range(0, len(x), SIZE):
                cell(Tensor(x[first : first + SIZE]), Tensor(y[first : first + SIZE]))
            require_large_batches(net, opt)
        if mode == "graph":
            require_one_branch(graphs)


@check
def model_train_makes_the_large_batch(rank: int) -> None:
    for mode, own_cell in (("pynative", True), ("graph", True), ("graph", False)):
        with data_parallel_mode(mode, gradients_mean=True):
            net = make_net()
            opt = optimizer_of(net, **({"loss_scale": 1024.0} if own_cell else {}))
            model = Model(net, HalfSquare(), opt)
            if own_cell:
                model = Model(TrainOneStepCell(nn.WithLossCell(net, HalfSquare()), opt))
            data = NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False, num_shards=WORLD, shard_id=rank).batch(SIZE)
            model.train(1, data, dataset_sink_mode=False)
            require_large_batches(net, opt)


@check
def epochs_end_together(rank: int) -> None:
    """With `FlushAtEpochEnd` a worker with fewer rows takes part in the windows of the other; its last micro-batch is short."""
    shares = [(X[:14], Y[:14]), (X[14:], Y[14:])]
    micro_batches = [[(x[first : first + SIZE], y[first : first + SIZE]) for first in range(0, len(x), SIZE)] for x, y in shares]
    truth = Truth()
    for first in (0, STEPS, 2 * STEPS) * 2:
        held = [batch for worker in micro_batches for batch in worker[first : first + STEPS]]
        truth.window([(x, y, np.ones((len(x), 1))) for x, y in held])
    with data_parallel_mode("pynative"):
        net = make_net()
        opt = optimizer_of(net)
        data = NumpySlicesDataset(shares[rank], ["x", "y"], shuffle=False).batch(SIZE)
        model = Model(TrainOneStepCell(nn.WithLossCell(net, HalfSquare()), opt))
        model.train(2, data, callbacks=[FlushAtEpochEnd(opt)], dataset_sink_mode=False)
    assert opt.result.optimizer_step == 6
    for found, expected in zip((net.weight, net.bias), truth.arrays, strict=True):
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=0, atol=1e-5)
    require_same_everywhere([p.asnumpy().tolist() for p in (net.weight, net.bias)])
