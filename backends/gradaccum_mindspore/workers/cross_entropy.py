"""The cross entropy of classes that several workers hold, and the gathering of their
items.

The checks, which run while compiling too, raise on the worker whose arguments are
wrong; the others wait for it until the engine's timeout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import (
    explain,
    require_classes,
    require_loss_options,
    require_shard_sizes,
)

FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
INTEGERS = (ms.int64, ms.int32, ms.int16, ms.int8, ms.uint8)


def require_kinds(
    shape: tuple[int, ...], dtype: Any, labels_shape: tuple[int, ...], labels_dtype: Any
) -> None:
    """Raise unless logits are floating ``(*batch, own classes)`` and labels integers
    ``(*batch)``.
    """
    if dtype not in FLOATS:
        fix = "Pass what the last layer gives, before any softmax."
        raise explain(
            ArgumentTypeError,
            "logits_shard",
            expected="a floating dtype",
            found=f"{dtype}",
            fix=fix,
        )
    if labels_dtype not in INTEGERS:
        fix = (
            "Pass the number of each item's class. Probabilities of all classes are not"
            " supported."
        )
        raise explain(
            ArgumentTypeError,
            "labels",
            expected="an integer dtype",
            found=f"{labels_dtype}",
            fix=fix,
        )
    if len(shape) == 0 or tuple(labels_shape) != tuple(shape[:-1]):
        expected = "shape (*batch) for logits of shape (*batch, own classes)"
        found = f"shape {tuple(labels_shape)} for logits of shape {tuple(shape)}"
        fix = (
            "Put the classes last: logits_shard.movedim(1, -1). Every worker passes the"
            " labels of all items."
        )
        raise explain(
            ArgumentValueError, "labels", expected=expected, found=found, fix=fix
        )


def require_group(group: Any) -> tuple[int, int]:
    """Raise unless this process is in `group`; return its rank and the number of
    processes: 0 and 1 without communication.
    """
    if group is not None and not isinstance(group, str):
        fix = "Pass the name that mindspore.communication.create_group was given."
        raise explain(
            ArgumentTypeError,
            "group",
            expected="the name of a communication group, or None",
            got=group,
            fix=fix,
        )
    if not GlobalComm.INITED:
        if group is None and int(os.environ.get("MS_WORKER_NUM", "1")) == 1:
            return 0, 1
        fix = "Call mindspore.communication.init() first."
        raise explain(
            UsageError,
            "group",
            expected="communication that is initialised",
            found="none in this process",
            fix=fix,
        )
    try:
        name = group or GlobalComm.WORLD_COMM_GROUP
        return int(get_rank(name)), int(get_group_size(name))
    except (RuntimeError, ValueError) as error:
        fix = (
            "Create it on its workers first:"
            " mindspore.communication.create_group(group, ranks)."
        )
        raise explain(
            UsageError,
            "group",
            expected="a communication group of this worker",
            got=group,
            fix=fix,
        ) from error


@constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
def placement(
    group: Any,
    shard_sizes: Any,
    options: tuple[Any, Any, Any],
    logits: tuple[Any, Any],
    labels: tuple[Any, Any],
) -> tuple[int, tuple[int, ...], Tensor, Tensor]:
    """Return the numbers that a call starts from, once all its arguments are right.

    Returns:
        The number of this worker's first class; each worker's number of classes; the
        label's share of the target and that of every class: Tensors of shape ``()``,
        because MindSpore rounds a Python number to float32 beside float64.
    """
    require_loss_options(*options)
    require_kinds(*logits, *labels)
    rank, workers = require_group(group)
    own = int(logits[0][-1])
    sizes = (
        (own,) * workers
        if shard_sizes is None
        else require_shard_sizes(shard_sizes, own, rank, workers)
    )
    smoothing = options[1]
    wide = ms.float64 if logits[1] == ms.float64 else ms.float32
    uniform = smoothing / require_classes(sum(sizes))
    return sum(sizes[:rank]), sizes, Tensor(1 - smoothing, wide), Tensor(uniform, wide)


class GatherItems(nn.Cell):  # type: ignore[misc]
    """Gathers the items of all workers, by rank, along axis 0. Collective: every worker
    of the group calls it, with equal shapes.

    The gradient of a worker's items is the sum over the workers. Make it once, as a
    part of the network: for PyNative, `mindspore.jit` and graph mode. MindSpore's
    `ops.AllGather` has no gradient on a CPU.

    Args:
        group: the name of a communication group; None: all workers, or this process
            alone where communication is not initialised.

    Inputs: x: shape ``(items, ...)``, any floating dtype, or an integer dtype, which
        has no gradient. A float64 number beyond float32's range
            arrives as an inf, one below it as 0.

    Outputs:
        Shape ``(workers * items, ...)``, the dtype of `x`.

    Raises:
        ArgumentTypeError: `group` is no text.
        UsageError: communication is not initialised where there are several workers, or
            there is no such group.
    """

    def __init__(self, group: str | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.rank, self.workers = require_group(group)
        if self.workers > 1:
            name = GlobalComm.WORLD_COMM_GROUP if group is None else group
            self.gather, self.add_up = (
                ops.AllGather(name),
                ops.AllReduce(ops.ReduceOp.SUM, name),
            )

    def construct(self, x: Tensor) -> Tensor:
        if self.workers == 1:
            return x
        if x.dtype == ms.float64:
            return gather_exactly(self.gather, x, self.workers).reshape(
                (-1, *x.shape[1:])
            )
        if x.dtype == ms.bfloat16:  # A CPU does not gather it.
            return self.gather(x.astype(ms.float32)).astype(ms.bfloat16)
        return self.gather(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        if self.workers == 1:
            return (dout,)
        items = x.shape[0]
        mine = slice(self.rank * items, (self.rank + 1) * items)
        if x.dtype == ms.float64:
            return (
                gather_exactly(self.gather, dout, self.workers)[:, mine].sum(axis=0),
            )
        return (self.add_up(dout.astype(ms.float32))[mine].astype(x.dtype),)


def gather_exactly(
    gather: Callable[[Tensor], Tensor], mine: Tensor, workers: int
) -> Tensor:
    """Return a float64 tensor of each worker, shape ``(workers, *shape)``.

    The CPU gathers float64 rounded to float32, so each number travels as a sum of three
    of float32, which is exact; one beyond float32's range arrives as an inf, one below
    it as 0.
    """
    high = mine.astype(ms.float32)
    rest = ops.where(ops.isfinite(high), mine - high.astype(ms.float64), 0.0)
    middle = rest.astype(ms.float32)
    low = (rest - middle.astype(ms.float64)).astype(ms.float32)
    parts = (
        gather(ops.stack((high, middle, low)))
        .astype(ms.float64)
        .reshape((workers, 3, *mine.shape))
    )
    return parts[:, 0] + parts[:, 1] + parts[:, 2]


LOWEST = -1e38
"""Stands for the maximum of no logit, and for -inf; what is subtracted from it stays
finite in float32.
"""


def sharded_cross_entropy(
    logits_shard: Tensor,
    labels: Tensor,
    *,
    group: str | None = None,
    shard_sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the loss of `mindspore.ops.cross_entropy` over all classes, from this
    worker's slice. Every worker of the group calls it.

    The first worker holds the first classes, and so on; slices may differ in size. All
    workers get the same loss, and each the gradient of its own logits; `GatherItems`
    adds up the features' gradient. For PyNative, `mindspore.jit` and graph mode.
    Half-precision logits are computed with in float32. The gradient has no derivative.

    Args:
        logits_shard: shape ``(*batch, own classes)``, any floating dtype. It may have
            no class at all, but has to take part.
        labels: shape ``(*batch)``, an integer dtype, numbered over all classes, the
            same on every worker.
        group: the name of the communication group of the workers that hold the classes;
            None: all workers, or this process alone where communication is not
            initialised.
        shard_sizes: the number of classes of each worker, by its rank in the group.
            None: as many on each as on this one.
        ignore_index: items with this label have no loss and no gradient.
        label_smoothing: in [0, 1]: this share of the target is spread evenly over all
            classes.
        reduction: "mean" (over the items that are not ignored), "sum" or "none".

    Returns:
        Shape ``()``, or ``(*batch)`` for "none". float64 for float64 logits, otherwise
        float32. The mean over no item is NaN; its gradient is zero. Compiled code
        cannot raise for a value: the loss and the gradient of a label that is no class
        are NaN.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument has the wrong type, dtype,
            shape or range.
        UsageError: communication is not initialised where there are several workers, or
            there is no such group.
    """
    first, sizes, share, uniform = placement(
        group,
        shard_sizes,
        (ignore_index, label_smoothing, reduction),
        (logits_shard.shape, logits_shard.dtype),
        (labels.shape, labels.dtype),
    )
    ignored = labels == ignore_index
    index = ops.select(ignored, ops.full_like(labels, -1), labels - first).astype(
        ms.int32
    )
    own = _own_statistics(ops.stop_gradient(logits_shard), index, ignored)
    maximum, total, target, even, votes = _merged(
        _gathered(own, group, len(sizes)), sizes
    )
    if label_smoothing == 0:
        # A logit of -inf, which masks a class, would make it NaN.
        even = ops.zeros_like(even)
    losses = CLASS_SHARDED_LOSSES(
        logits_shard, index, maximum, total, target, even, share, uniform
    )
    return _reduced(losses, votes, 2 * len(sizes), reduction)


def _own_statistics(shard: Tensor, index: Tensor, ignored: Tensor) -> Tensor:
    """Return rows of this worker: its maximum, and less that the sums of exponentials
    and of logits; the target's logit; its votes.

    A worker has one vote for a target that it holds, and two for an ignored item. A sum
    of one is a target, two per worker an ignored item; any other sum is a label that is
    no class, or that differs between workers.
    """
    wide = ms.float64 if shard.dtype == ms.float64 else ms.float32
    votes = ops.select(
        ignored, ops.full_like(index, 2), ops.full_like(index, 0)
    ).astype(wide)
    if shard.shape[-1] == 0:
        nothing = ops.zeros_like(votes)
        return ops.stack((nothing + LOWEST, nothing, nothing, nothing, votes))
    logits = shard.astype(wide)
    maximum = ops.clamp(logits.max(axis=-1), min=LOWEST)
    shifted = logits - maximum.expand_dims(-1)
    here, place = _here(shard, index)
    target = ops.gather_elements(logits, logits.ndim - 1, place).squeeze(-1)
    target = ops.select(here, target, ops.zeros_like(target))
    return ops.stack(
        (
            maximum,
            ops.exp(shifted).sum(-1),
            shifted.sum(-1),
            target,
            votes + here.astype(wide),
        )
    )


def _gathered(own: Tensor, group: str | None, workers: int) -> Tensor:
    """Return all workers' rows, shape ``(workers, 5, *batch)``."""
    if workers == 1:
        return own.expand_dims(0)
    gather = ops.AllGather() if group is None else ops.AllGather(group)
    if own.dtype != ms.float64:
        return ops.stop_gradient(gather(own)).reshape((workers, *own.shape))
    return ops.stop_gradient(gather_exactly(gather, own, workers))


def _merged(rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the maximum of all workers, and less that their sums of exponentials, the
    target's logit and the sum of logits; the votes.
    """
    maximum = rows[:, 0].max(axis=0)
    total = ops.zeros_like(maximum)
    even = ops.zeros_like(maximum)
    for worker in range(len(sizes)):
        less = rows[worker, 0] - maximum
        total = total + rows[worker, 1] * ops.exp(less)
        even = even + rows[worker, 2] + less * sizes[worker]
    return maximum, total, rows[:, 3].sum(0) - maximum, even, rows[:, 4].sum(0)


class ClassShardedLosses(nn.Cell):  # type: ignore[misc]
    """The losses of all items from what the workers know together; no communication,
    forward or backward.
    """

    def construct(
        self,
        shard: Tensor,
        index: Tensor,
        maximum: Tensor,
        total: Tensor,
        target: Tensor,
        even: Tensor,
        share: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        return ops.log(total) - share * target - uniform * even

    def bprop(
        self,
        shard: Tensor,
        index: Tensor,
        maximum: Tensor,
        total: Tensor,
        target: Tensor,
        even: Tensor,
        share: Tensor,
        uniform: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Any:
        gradient = _gradient(shard, index, maximum, total, target, share, uniform, dout)
        none = ops.zeros_like(maximum)
        return (
            gradient,
            ops.zeros_like(index),
            none,
            none,
            none,
            none,
            ops.zeros_like(share),
            ops.zeros_like(uniform),
        )


CLASS_SHARDED_LOSSES = ClassShardedLosses()
"""A cell cannot be made in compiled code; this one holds nothing."""


def _gradient(
    shard: Tensor,
    index: Tensor,
    maximum: Tensor,
    total: Tensor,
    target: Tensor,
    share: Tensor,
    uniform: Tensor,
    upstream: Tensor,
) -> Tensor:
    scale = upstream / total
    if shard.shape[-1] == 0:
        # Compiled code gathers again in the backward pass, unless nothing there depends
        # on it: then the other workers would wait.
        return ops.zeros_like(shard) * scale.expand_dims(-1).astype(shard.dtype)
    others = ops.exp(
        shard.astype(maximum.dtype) - maximum.expand_dims(-1)
    ) * scale.expand_dims(-1) - (upstream * uniform).expand_dims(-1)
    here, place = _here(shard, index)
    axis = others.ndim - 1
    kept = ops.gather_elements(others, axis, place)
    mine = (ops.exp(target) * scale - upstream * (share + uniform)).expand_dims(-1)
    return ops.tensor_scatter_elements(
        others, place, ops.select(here.expand_dims(-1), mine, kept), axis
    ).astype(shard.dtype)


def _here(shard: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each item's target is in this shard, and an index, shape
    ``(*batch, 1)``, that is always inside it.
    """
    here = ops.logical_and(index >= 0, index < shard.shape[-1])
    return here, ops.select(here, index, ops.zeros_like(index)).expand_dims(-1)


def _reduced(losses: Tensor, votes: Tensor, ignoring: int, reduction: str) -> Tensor:
    """Return the reduced losses: zero for ignored items, NaN for those whose votes are
    neither an ignored item's nor a target's.
    """
    ignored = votes == ignoring
    sound = ops.logical_or(ignored, votes == 1)
    factor = ops.select(
        sound, ops.ones_like(losses), ops.full_like(losses, float("nan"))
    )
    kept = ops.select(ignored, ops.zeros_like(losses), losses * factor)
    if reduction == "none":
        return kept
    return (
        kept.sum() / ops.logical_not(ignored).astype(losses.dtype).sum()
        if reduction == "mean"
        else kept.sum()
    )
