"""Softmax cross-entropy of logits that are sharded by class: each worker holds a
contiguous slice of the classes.

The method is Megatron-LM's (Shoeybi et al., 2019, "Megatron-LM: Training Multi-Billion
Parameter Language Models Using Model Parallelism", section 3): the workers exchange a
few numbers per item, here in two all-reduces, and the backward computes the softmax
again, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import (
    explain,
    require_classes,
    require_loss_options,
    require_shard_sizes,
)
from gradaccum_torch.workers.checks import require_group

Group = dist.ProcessGroup | None
"""The workers that hold the classes; None: all processes."""

BLOCKS, SMALL = 16, 2**20
"""A temporary holds a sixteenth of the shard, or 2^20 elements, which a processor's
cache holds.
"""
EXACT = 2**24
"""float32 holds every int up to here."""


def sharded_cross_entropy(
    logits_shard: Tensor,
    labels: Tensor,
    *,
    group: Group = None,
    shard_sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    check_labels: bool = True,
) -> Tensor:
    """Return the loss of `torch.nn.functional.cross_entropy` over all classes, from
    this worker's slice; collective.

    The first worker holds the first classes, and so on; slices may be uneven, or empty.
    All get the same loss, and each the gradient of its own logits. The layer that
    multiplies the features by the class weights must all-reduce their gradient.

    Half-precision logits are computed with in float32. Loss scaling and accumulation
    work; second derivatives do not.

    Args:
        logits_shard: shape ``(*batch, own classes)``, any floating dtype.
        labels: shape ``(*batch)``, an integer dtype, numbered over all classes, the
            same on every worker.
        group: the workers that hold the classes; None: all processes.
        shard_sizes: the number of classes by rank in the group. None: each call
            all-gathers it.
        ignore_index: items with this label have no loss and no gradient.
        label_smoothing: in [0, 1]: the share of the target that is spread evenly over
            all classes.
        reduction: "mean" (over the items that are not ignored), "sum" or "none".
        check_labels: False spares the check's wait for the device. A label that is no
            class then has the loss of a target logit equal to the largest, and a
            gradient without a target.

    Returns:
        Shape ``()``, or ``(*batch)`` for "none". float64 for float64 logits, otherwise
        float32, where `torch` rounds the loss of half-precision logits. The mean over
        no item is NaN, as in `torch`; its gradient is zero.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument has the wrong type, dtype,
            shape or range. A label that is no class, and labels that differ between
            workers, raise on every worker.
        UsageError: `torch.distributed` is not initialised, or this process is not in
            the group.
    """
    require_loss_options(ignore_index, label_smoothing, reduction)
    require_tensors(logits_shard, labels)
    first, classes = _place(logits_shard, group, shard_sizes)
    ignored = labels == ignore_index
    index = (labels.long() - first).masked_fill(ignored, -1)
    with torch.no_grad():
        shard = logits_shard.detach()
        seen = _seen(labels, ignored, classes, shard) if check_labels else []
        maximum = _maximum(shard, seen, group, classes)
        sums = _sums(shard, index, maximum, group, smoothed=label_smoothing > 0)
    losses: Tensor = _CrossEntropy.apply(
        logits_shard, index, maximum, sums, label_smoothing, classes
    )  # type: ignore[no-untyped-call]
    return _reduced(losses.masked_fill(ignored, 0), ignored, reduction)


def _place(
    shard: Tensor, group: Group, shard_sizes: Sequence[int] | None
) -> tuple[int, int]:
    rank, workers = require_group(group)
    own = shard.shape[-1]
    sizes = (
        _asked(shard, group, workers)
        if shard_sizes is None
        else require_shard_sizes(shard_sizes, own, rank, workers)
    )
    return sum(sizes[:rank]), require_classes(sum(sizes))


def _asked(shard: Tensor, group: Group, workers: int) -> Sequence[int]:
    own = torch.tensor([shard.shape[-1]], device=shard.device)
    sizes = [torch.empty_like(own) for _ in range(workers)]
    dist.all_gather(sizes, own, group=group)
    return list(map(int, torch.cat(sizes).tolist()))


def _seen(labels: Tensor, ignored: Tensor, classes: int, shard: Tensor) -> list[Tensor]:
    """Return the labels and their negatives, modulo 2^24, inf for no class: their
    maxima over the workers show which differ.
    """
    wrong = ~ignored & ((labels < 0) | (labels >= classes))
    numbers = (labels.long() % EXACT).to(_wide(shard)).masked_fill(wrong, torch.inf)
    return [numbers, -numbers]


def _maximum(shard: Tensor, seen: list[Tensor], group: Group, classes: int) -> Tensor:
    own = (
        shard.amax(-1).to(_wide(shard))
        if shard.shape[-1]
        else _wide_full(shard, -torch.inf)
    )
    rows = torch.stack([own, *seen])
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=group)
    if seen:
        _require_labels(rows[1], -rows[2], classes)
    return rows[0]


def _require_labels(highest: Tensor, lowest: Tensor, classes: int) -> None:
    """Raise unless all labels are equal classes, on all workers together."""
    if bool((highest == lowest).logical_and(highest < torch.inf).all()):
        return
    raise label_error(differ=not bool(highest.isinf().any()), classes=classes)


def _sums(
    shard: Tensor, index: Tensor, maximum: Tensor, group: Group, smoothed: bool
) -> Tensor:
    """Return, less the maximum, the sum of exponentials, the target's logit and, if
    `smoothed`, the sum of logits.
    """
    sums = _wide_full(shard, 0.0).repeat(2 + smoothed, *[1] * maximum.ndim)
    for block in _blocks(shard):
        part = shard[..., block] - maximum.unsqueeze(-1)
        if smoothed:
            sums[2] += part.sum(-1)
        sums[0] += part.exp_().sum(-1)
    if shard.shape[-1]:
        here, safe = _here(shard, index)
        sums[1] = torch.where(
            here, shard.gather(-1, safe.unsqueeze(-1)).squeeze(-1) - maximum, 0
        )
    dist.all_reduce(sums, group=group)
    return sums


class _CrossEntropy(torch.autograd.Function):
    """The losses of all items; no communication, forward or backward."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        index: Tensor,
        maximum: Tensor,
        sums: Tensor,
        smoothing: float,
        classes: int,
    ) -> Tensor:
        ctx.save_for_backward(shard, index, maximum, sums)
        ctx.smoothing, ctx.uniform = smoothing, smoothing / classes
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        return losses - ctx.uniform * sums[2] if smoothing else losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        shard, index, maximum, sums = ctx.saved_tensors
        scale = upstream / sums[0]
        gradient = torch.empty_like(shard)
        for block in _blocks(shard):
            part = (
                (shard[..., block] - maximum.unsqueeze(-1))
                .exp_()
                .mul_(scale.unsqueeze(-1))
            )
            gradient[..., block] = (
                part.sub_((upstream * ctx.uniform).unsqueeze(-1))
                if ctx.smoothing
                else part
            )
        if shard.shape[-1]:
            # In the wide dtype to the end: half precision would first round a
            # probability of almost 1.
            target = sums[1].exp() * scale - upstream * (
                1 - ctx.smoothing + ctx.uniform
            )
            _put(gradient, index, target)
        return gradient, None, None, None, None, None


def _put(gradient: Tensor, index: Tensor, target: Tensor) -> None:
    here, safe = _here(gradient, index)
    place = safe.unsqueeze(-1)
    kept = gradient.gather(-1, place)
    gradient.scatter_(
        -1,
        place,
        torch.where(here.unsqueeze(-1), target.unsqueeze(-1).to(gradient.dtype), kept),
    )


def _here(shard: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    here = (index >= 0) & (index < shard.shape[-1])
    return here, index.masked_fill(~here, 0)


def _blocks(shard: Tensor) -> Iterator[slice]:
    classes, items = shard.shape[-1], max(shard[..., :1].numel(), 1)
    width = max(-(-classes // BLOCKS), SMALL // items, 1)
    return (
        slice(start, min(start + width, classes)) for start in range(0, classes, width)
    )


def _wide(shard: Tensor) -> torch.dtype:
    return torch.promote_types(shard.dtype, torch.float32)


def _wide_full(shard: Tensor, value: float) -> Tensor:
    return torch.full(shard.shape[:-1], value, dtype=_wide(shard), device=shard.device)


def _reduced(losses: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def require_tensors(logits_shard: Any, labels: Any) -> None:
    """Raise unless logits are floating ``(*batch, own classes)`` and labels integers
    ``(*batch)`` on the same device.
    """
    for name, value in (("logits_shard", logits_shard), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise explain(
                ArgumentTypeError,
                name,
                expected="a torch.Tensor",
                got=value,
                fix=f"Pass {name} as a tensor.",
            )
        if hasattr(value, "to_local"):
            found, fix = (
                f"a {type(value).__name__}",
                f"Pass this worker's part: {name}.to_local().",
            )
            raise explain(
                ArgumentTypeError, name, expected="a plain tensor", found=found, fix=fix
            )
    if not logits_shard.is_floating_point():
        fix = "Pass what the last layer gives, before any softmax."
        raise explain(
            ArgumentTypeError,
            "logits_shard",
            expected="a floating dtype",
            found=f"{logits_shard.dtype}",
            fix=fix,
        )
    if labels.dtype not in _INTEGERS:
        fix = (
            "Pass the number of each item's class. Probabilities of all classes are not"
            " supported."
        )
        raise explain(
            ArgumentTypeError,
            "labels",
            expected="an integer dtype",
            found=f"{labels.dtype}",
            fix=fix,
        )
    _require_shapes(logits_shard, labels)


def _require_shapes(logits_shard: Tensor, labels: Tensor) -> None:
    if logits_shard.ndim == 0 or labels.shape != logits_shard.shape[:-1]:
        expected = "shape (*batch) for logits of shape (*batch, own classes)"
        found = (
            f"shape {tuple(labels.shape)} for logits of shape"
            f" {tuple(logits_shard.shape)}"
        )
        fix = (
            "Put the classes last: logits_shard.movedim(1, -1). Every worker passes the"
            " labels of all items."
        )
        raise explain(
            ArgumentValueError, "labels", expected=expected, found=found, fix=fix
        )
    if labels.device != logits_shard.device:
        fix = "Write labels.to(logits_shard.device)."
        raise explain(
            ArgumentValueError,
            "labels",
            expected=f"the device {logits_shard.device}",
            found=f"{labels.device}",
            fix=fix,
        )


def require_first_derivative() -> None:
    """Raise unless autograd does not record the backward pass, whose gradient it would
    take for a constant.
    """
    if torch.is_grad_enabled():
        fix = (
            "Use torch.nn.functional.cross_entropy of the whole logits for a second"
            " derivative."
        )
        raise explain(
            UsageError,
            "create_graph",
            expected="False under sharded_cross_entropy",
            found="True",
            fix=fix,
        )


def label_error(differ: bool, classes: int) -> ArgumentValueError:
    if differ:
        fix = "Gather the items of all workers first, features and labels alike."
        return explain(
            ArgumentValueError,
            "labels",
            expected="the same labels on every worker",
            found="labels that differ",
            fix=fix,
        )
    expected, fix = (
        f"classes in [0, {classes}) or ignore_index",
        "Number the classes over all workers, not within a shard.",
    )
    return explain(
        ArgumentValueError, "labels", expected=expected, found="another label", fix=fix
    )
