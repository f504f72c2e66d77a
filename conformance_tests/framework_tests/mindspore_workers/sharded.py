"""A data-parallel backbone under a head whose classes the workers share: mixed
precision, a dynamic scale, one norm, one overflow flag.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import set_mode
from conformance_tests.framework_tests.mindspore_workers.checks import check
from conformance_tests.framework_tests.mindspore_workers.common import (
    WORLD,
    require_same_everywhere,
)
from conformance_tests.framework_tests.mindspore_workers.refusals import files
from conformance_tests.framework_tests.refusing import refused
from gradaccum_mindspore import (
    GatherItems,
    TrainOneStepCell,
    load_checkpoint_into,
    redistributed,
)
from gradaccum_mindspore.workers.collectives import sum_over_workers

STEPS, OWN, CLASSES = 2, 3, (5, 3)
"""Micro-batches of a window, items of each on each worker, classes of each worker."""
WINDOWS = 3
RANDOM = np.random.RandomState(3)
X = RANDOM.randn(WINDOWS * STEPS, WORLD * OWN, 4).astype(np.float32)
Y = RANDOM.randint(0, sum(CLASSES), X.shape[:2]).astype(np.int32)
BACKBONE, HEAD = (
    RANDOM.randn(4, 4).astype(np.float16),
    RANDOM.randn(sum(CLASSES), 4).astype(np.float32),
)
RATE, CLIP = 0.25, 0.5


def of_rank(rank: int) -> slice:
    return slice(sum(CLASSES[:rank]), sum(CLASSES[: rank + 1]))


class AddUp(nn.Cell):
    """Adds up what each worker has. All of them compute one loss from the sum, so that
    its gradient is that of what each has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x: Any) -> Any:
        return self.all_reduce(x)

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (dout,)


class Network(nn.Cell):
    """The summed loss of the items of all workers."""

    def __init__(self, rank: int, dtype: Any = ms.float16) -> None:
        super().__init__()
        self.backbone = Parameter(Tensor(BACKBONE).astype(dtype), name="backbone")
        self.head = Parameter(
            Tensor(HEAD[of_rank(rank)]), name="head", layerwise_parallel=True
        )
        self.gather = GatherItems()
        self.add_up = AddUp()
        numbers = np.arange(sum(CLASSES), dtype=np.int32)
        self.classes = Tensor(numbers[of_rank(rank)])

    def construct(self, x: Any, labels: Any) -> Any:
        features = self.gather(
            ops.tanh(ops.matmul(x, self.backbone.astype(ms.float32).T))
        )
        logits = ops.matmul(features, self.head.T)
        largest = self.gather(ops.stop_gradient(logits).max(axis=-1))
        largest = largest.reshape((WORLD, -1)).max(axis=0)
        logits = logits - ops.stop_gradient(largest).expand_dims(-1)
        is_target = self.gather(labels).expand_dims(-1) == self.classes
        total = self.add_up(ops.exp(logits).sum(-1))
        target = self.add_up((logits * is_target.astype(ms.float32)).sum(-1))
        return (ops.log(total) - target).sum()


def optimizer_of(network: Network, **options: Any) -> Any:
    scale = gradaccum.DynamicLossScale(2.0**10, growth_interval=1)
    given = {
        "steps": STEPS,
        "reduction": "sum_per_item",
        "loss_scale": scale,
        "master_weights": True,
        "clip_norm": CLIP,
        **options,
    }
    return gradaccum.wrap(
        nn.SGD(network.trainable_params(), RATE), data_parallel=True, **given
    )


class Truth:
    """One process that has all items and classes, in float64."""

    def __init__(self, dtype: type) -> None:
        self.dtype, self.backbone, self.head = (
            dtype,
            BACKBONE.astype(np.float64),
            HEAD.astype(np.float64),
        )

    def window(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """Make the update of the large batch; its loss and norm."""
        features = np.tanh(x @ self.backbone.astype(self.dtype).astype(np.float64).T)
        logits = features @ self.head.T
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        off = shifted / shifted.sum(1, keepdims=True)
        loss = -np.log(off[np.arange(len(y)), y]).mean()
        off[np.arange(len(y)), y] -= 1
        by_head = off.T @ features / len(y)
        by_backbone = ((off @ self.head) * (1 - features**2)).T @ x / len(y)
        norm = np.sqrt(np.square(by_head).sum() + np.square(by_backbone).sum())
        self.head -= RATE * min(1, CLIP / norm) * by_head
        self.backbone -= RATE * min(1, CLIP / norm) * by_backbone
        return loss, norm


@check
def sharded_head_makes_the_large_batch(rank: int) -> None:
    """The second window has an inf in the gradient of one worker's classes: all skip
    it.
    """
    mine = slice(rank * OWN, (rank + 1) * OWN)
    for mode, dtype, off in (("pynative", "float32", 2e-5), ("graph", "float16", 1e-3)):
        set_mode(mode)
        network, truth = Network(rank, getattr(ms, dtype)), Truth(getattr(np, dtype))
        opt = optimizer_of(network)
        step = TrainOneStepCell(network, opt)
        for window in range(WINDOWS):
            rows = slice(window * STEPS, (window + 1) * STEPS)
            if window == 1:
                bad = Tensor(
                    np.full(
                        network.head.shape, np.inf if rank == 1 else 1.0, np.float32
                    )
                )
                for _ in range(STEPS):
                    opt((ops.ones_like(network.backbone.value()), bad), OWN)
                assert (
                    opt.result.overflow,
                    opt.result.applied,
                    opt.result.loss_scale,
                ) == (True, False, 2.0**10), mode
                continue
            for x, y in zip(X[rows], Y[rows], strict=True):
                step(Tensor(x[mine]), Tensor(y[mine]))
            loss, norm = truth.window(X[rows].reshape(-1, 4), Y[rows].reshape(-1))
            np.testing.assert_allclose(
                [opt.result.loss, opt.result.grad_norm],
                [loss, norm],
                rtol=off,
                err_msg=mode,
            )
        backbone = (
            opt.storage.masters.masters[0] if dtype == "float16" else network.backbone
        )
        np.testing.assert_allclose(
            backbone.asnumpy(), truth.backbone, rtol=0, atol=off, err_msg=mode
        )
        np.testing.assert_allclose(
            network.head.asnumpy(),
            truth.head[of_rank(rank)],
            rtol=0,
            atol=off,
            err_msg=mode,
        )
        require_same_everywhere(
            [opt.result.grad_norm, opt.result.loss, network.backbone.asnumpy().tolist()]
        )
    assert np.abs(truth.head - HEAD).max() > 1e-2


@check
def sharded_head_loads_its_own_file(rank: int) -> None:
    """Between two windows too: each worker has other classes."""
    opt = optimizer_of(Network(rank))
    saved = {p.name: Tensor(p.asnumpy().copy(), p.dtype) for p in opt.get_parameters()}
    load_checkpoint_into(opt, saved)
    with pytest.raises(gradaccum.CheckpointError, match=f"of rank {1 - rank} of 2"):
        load_checkpoint_into(
            opt, {**saved, "gradaccum.workers": Tensor([0, 1 - rank, WORLD], ms.int32)}
        )


@check
def sharded_head_is_not_redistributed(rank: int) -> None:
    """The values are of one moment: the error names the shards, not the moment alone.
    One worker's values show no shards: the load does.
    """
    network = Network(rank)
    opt = optimizer_of(network)
    TrainOneStepCell(network, opt)(Tensor(X[0, :OWN]), Tensor(Y[0, :OWN]))
    states = files(rank, nn.CellList([network, opt], auto_prefix=False))
    with refused(
        gradaccum.CheckpointError,
        "head",
        "(5, 4), (3, 4)",
        "layerwise_parallel",
        "its own file",
    ):
        redistributed(states, 1)
    kept = [state if place == rank else None for place, state in enumerate(states)]
    with refused(
        gradaccum.CheckpointError,
        "layerwise_parallel",
        "redistributed",
        "their own files",
    ):
        load_checkpoint_into(opt, redistributed(kept, WORLD)[rank])


class Weighted(nn.Cell):
    """The weighted sum of the items of all workers."""

    def __init__(self, weights: np.ndarray) -> None:
        super().__init__()
        self.gather, self.weights = GatherItems(), Tensor(weights)

    def construct(self, x: Any) -> Any:
        return (self.gather(x) * self.weights).sum()


@check
def float64_items_are_gathered_exactly(rank: int) -> None:
    """Numbers that float32 does not hold, and their gradient; the others' gradients
    come back added up. Beyond its range they are inf.
    """
    values = np.random.RandomState(5).randn(WORLD, 2, 3)
    weights = np.random.RandomState(6).randn(WORLD, 2 * WORLD, 3)
    for mode in ("pynative", "graph"):
        set_mode(mode)
        weighted = Weighted(weights[rank])
        total, gradient = ms.value_and_grad(weighted)(Tensor(values[rank]))
        np.testing.assert_allclose(
            float(total.asnumpy()),
            (values.reshape(-1, 3) * weights[rank]).sum(),
            rtol=1e-14,
        )
        np.testing.assert_array_equal(
            gradient.asnumpy(), (weights[0] + weights[1])[2 * rank : 2 * rank + 2]
        )
        np.testing.assert_array_equal(
            weighted.gather(Tensor(values[rank])).asnumpy(), values.reshape(-1, 3)
        )
        extremes = np.array([np.inf, -np.inf, np.nan, 1e300, 1e-300])
        np.testing.assert_array_equal(
            weighted.gather(Tensor(extremes)).asnumpy(),
            [np.inf, -np.inf, np.nan, np.inf, 0.0] * WORLD,
        )
    np.testing.assert_array_equal(
        sum_over_workers(extremes[:4]), [np.inf, -np.inf, np.nan, np.inf]
    )
    set_mode("pynative")


@check
def sharded_head_is_refused(rank: int) -> None:
    for argument, value in (
        ("reduction", "mean"),
        ("on_overflow", "drop_micro_batch"),
    ):
        with pytest.raises(
            gradaccum.ArgumentValueError, match=f"^{argument}: .*layerwise_parallel"
        ):
            optimizer_of(Network(rank), **{argument: value})
