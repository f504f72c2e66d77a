"""Cross-entropy over class shards against the dense loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.checks import check
from gradaccum_mindspore import sharded_cross_entropy

ROUNDOFF = {ms.float64: 2.0**-53, ms.float32: 2.0**-24, ms.float16: 2.0**-11, ms.bfloat16: 2.0**-8}
ITEMS, CLASSES = 6, 8
LABELS = np.asarray([0, 2, -100, 4, 7, 3], np.int32)
UPSTREAM = 2.0**10
LOGITS = 3 * np.random.default_rng(0).standard_normal((ITEMS, CLASSES))


def dense(logits: Any, labels: Any, label_smoothing: float = 0.0, ignore_index: int = -100) -> tuple[Any, Any]:
    """The losses and the gradient of each by its own logits, in float64: `mindspore.ops.cross_entropy` rounds the smoothing to float32."""
    kept, rows = labels != ignore_index, np.arange(len(labels))
    shifted = logits - logits.max(-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    target = np.full_like(logits, label_smoothing / logits.shape[-1])
    target[rows, np.where(kept, labels, 0)] += 1 - label_smoothing
    return -(target * log_softmax).sum(-1) * kept, (np.exp(log_softmax) - target) * kept[:, None]


def bound(dtype: Any, size: float) -> float:
    """So many roundings of terms of so large a `size`: of a difference of logits, at most 24; of the additions; and eight for each item."""
    return (24 + CLASSES + ITEMS + 8) * ROUNDOFF[dtype] * size


def columns(sizes: tuple[int, ...], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def compare(sizes: tuple[int, ...], rank: int, dtype: Any, reduction: str, run: Callable[..., Any], **options: Any) -> None:
    wide = ms.float64 if dtype == ms.float64 else ms.float32
    rounded = Tensor(LOGITS, dtype).astype(ms.float32).asnumpy().astype(np.float64) if dtype != ms.float64 else LOGITS
    losses, each = dense(rounded, LABELS, **options)
    upstream = UPSTREAM * np.linspace(1, 2, ITEMS)
    weights = {"none": upstream, "sum": upstream[:1], "mean": upstream[:1] / (LABELS != -100).sum()}[reduction]
    expected = losses * upstream if reduction == "none" else losses * weights
    mine = columns(sizes, rank)

    def weighted(logits: Any, labels: Any) -> Any:
        loss = sharded_cross_entropy(logits, labels, shard_sizes=sizes, reduction=reduction, **options)
        return (loss * Tensor(upstream if reduction == "none" else upstream[0], wide)).sum()

    loss, gradient = run(weighted, Tensor(LOGITS[:, mine], dtype), Tensor(LABELS))
    assert (loss.dtype, gradient.dtype, gradient.shape) == (wide, dtype, (ITEMS, sizes[rank]))
    assert abs(float(loss.asnumpy()) - expected.sum()) <= bound(wide, 30 * 2 * UPSTREAM * ITEMS), (sizes, dtype, reduction, options)
    wanted = (each * weights[:, None])[:, mine]
    found = gradient.astype(ms.float64 if dtype == ms.float64 else ms.float32).asnumpy()
    assert (np.abs(found - wanted) <= bound(wide, 2 * UPSTREAM) + ROUNDOFF[dtype] * np.abs(wanted)).all(), (
        sizes,
        dtype,
        reduction,
        options,
    )


def pynative(function: Callable[..., Any], *inputs: Any) -> Any:
    return ms.value_and_grad(function)(*inputs)


class Loss(nn.Cell):
    def construct(self, logits: Any, labels: Any) -> Any:
        return sharded_cross_entropy(logits, labels, shard_sizes=(5, 3), label_smoothing=0.1)


class Calls:
    """The collectives that are called from Python."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def instead(self, name: str) -> Any:
        real = getattr(ops, name)

        def make(*args: Any) -> Any:
            def call(x: Any) -> Any:
                self.names.append(name)
                return real(*args)(x)

            return call

        return make


@check
def sharded_loss_gathers_once(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls()
        for name in ("AllGather", "AllReduce"):
            patch.setattr(ops, name, calls.instead(name))
        pynative(lambda x, y: sharded_cross_entropy(x, y), Tensor(LOGITS[:, columns((4, 4), rank)], ms.float32), Tensor(LABELS))
        assert calls.names == ["AllGather"], "forward and backward together"


@check
def compiled_sharded_loss_is_the_same(rank: int) -> None:
    logits, labels = Tensor(LOGITS[:, columns((5, 3), rank)], ms.float32), Tensor(LABELS)
    losses, each = dense(LOGITS.astype(np.float32).astype(np.float64), LABELS, label_smoothing=0.1)
    count = (LABELS != -100).sum()
    compiled = ms.jit(Loss().construct)
    for mode, function in ((ms.PYNATIVE_MODE, lambda x, y: compiled(x, y)), (ms.GRAPH_MODE, Loss())):
        ms.set_context(mode=mode)
        loss, gradient = ms.value_and_grad(function)(logits, labels)
        assert abs(float(loss.asnumpy()) - losses.sum() / count) <= bound(ms.float32, 30.0)
        wanted = each[:, columns((5, 3), rank)] / count
        np.testing.assert_allclose(gradient.asnumpy(), wanted, rtol=0, atol=bound(ms.float32, 2.0))
    ms.set_context(mode=ms.PYNATIVE_MODE)


@check
def labels_that_are_no_class_make_nan(rank: int) -> None:
    logits = Tensor(np.zeros((2, 4)), ms.float32)
    for labels, sound in (([0, 7], True), ([0, 8], False), ([0, -1], False), ([5 * rank, 5], False), ([-100, -100], False)):
        assert np.isfinite(sharded_cross_entropy(logits, Tensor(labels, ms.int32)).asnumpy()) == sound, labels
    gradient = ms.grad(lambda x: sharded_cross_entropy(x, Tensor([-100, -100], ms.int32)))(logits)
    assert not gradient.asnumpy().any(), "nothing but ignored labels"


@check
def sharded_loss_within_a_group(rank: int) -> None:
    create_group(f"alone {rank}", [rank])
    logits, labels = Tensor(LOGITS, ms.float32), Tensor(LABELS)
    alone = sharded_cross_entropy(logits, labels, group=f"alone {rank}", reduction="sum")
    assert abs(float(alone.asnumpy()) - dense(LOGITS, LABELS)[0].sum()) <= bound(ms.float32, 30.0 * ITEMS)
    with pytest.raises(gradaccum.UsageError, match=r"^group: .*create_group"):
        sharded_cross_entropy(logits, labels, group="nobody")


@check
def sharded_losses_equal_the_dense_ones(rank: int) -> None:
    for sizes in ((4, 4), (7, 1), (8, 0)):
        for reduction in ("mean", "sum", "none"):
            compare(sizes, rank, ms.float32, reduction, pynative, label_smoothing=0.1)
    for dtype in ROUNDOFF:
        compare((5, 3), rank, dtype, "mean", pynative)
        compare((5, 3), rank, dtype, "mean", pynative, label_smoothing=0.1)
