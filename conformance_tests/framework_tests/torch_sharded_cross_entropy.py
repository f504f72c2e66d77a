"""Cross-entropy over class shards against the dense loss: run by `test_torch_sharded_cross_entropy`, in processes or in threads."""

from __future__ import annotations

import itertools
import math
import re
import sys
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import gradaccum
from gradaccum_torch import sharded_cross_entropy, verify_loss_scaling
from gradaccum_torch.workers.cross_entropy import _CrossEntropy

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ITEMS, CLASSES = 6, 7
SIZES = {2: [(4, 3), (1, 6), (7, 0), (0, 7)], 4: [(2, 2, 2, 1), (3, 1, 3, 0), (0, 7, 0, 0)]}
UPSTREAM = 2.0**10


class Case(NamedTuple):
    sizes: tuple[int, ...]
    reduction: str = "mean"
    smoothing: float = 0.0
    ignored: int = -100
    dtype: torch.dtype = torch.float32
    offset: float = 0.0
    batch: tuple[int, ...] = (ITEMS,)


class Counted(TorchDispatchMode):
    """The collectives of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def cases(workers: int) -> list[Case]:
    every = [Case(*each) for each in itertools.product(SIZES[workers], ("mean", "sum", "none"), (0.0, 0.1, 1.0))]
    even = SIZES[workers][0]
    others = [{"ignored": 2}, {"offset": 1e4}, {"batch": (2, 3)}, {"batch": ()}, {"batch": (0,), "reduction": "sum"}]
    dtypes = [{"dtype": dtype, "smoothing": s} for dtype in (torch.float64, torch.float16, torch.bfloat16) for s in (0.0, 0.1)]
    return every + [Case(even, **each) for each in (*others, *dtypes)]


def problem(case: Case) -> tuple[Tensor, Tensor]:
    """All logits, and labels of which the second is ignored and the others are in every shard."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*case.batch, CLASSES, generator=generator) + case.offset
    labels = (torch.arange(math.prod(case.batch)) * 2 % CLASSES).reshape(case.batch)
    if labels.numel() > 1:
        labels.view(-1)[1] = case.ignored
    return logits.to(case.dtype), labels


def slice_of(case: Case, rank: int) -> slice:
    return slice(sum(case.sizes[:rank]), sum(case.sizes[: rank + 1]))


def bound(case: Case, wide: torch.dtype, size: float) -> float:
    """How far two computations of a loss, or of a gradient, may be apart, each with so many roundings of terms of so large a `size`.

    A logit less the maximum is exact to one rounding of the difference, which the exponential turns into a relative error of as many
    roundings as the difference is large; then the additions over classes and items, and eight operations for each item.
    """
    spread = 2 * 3 * 4
    additions = CLASSES + math.prod(case.batch) + spread + 8
    return 2 * additions * ROUNDOFF[wide] * size


def compare(case: Case, rank: int, **options: Any) -> None:
    logits, labels = problem(case)
    wide = torch.promote_types(case.dtype, torch.float32)
    whole = logits.to(wide, copy=True).requires_grad_()
    options |= {"ignore_index": case.ignored, "label_smoothing": case.smoothing, "reduction": case.reduction}
    dense = cross_entropy(whole.reshape(-1, CLASSES), labels.flatten(), **options)
    shard = logits[..., slice_of(case, rank)].clone().requires_grad_()
    known = {"shard_sizes": case.sizes} if case.reduction == "sum" else {}
    loss = sharded_cross_entropy(shard, labels.to(torch.int32), **known, **options)
    upstream = UPSTREAM * torch.linspace(1, 2, max(loss.numel(), 1), dtype=wide)[: loss.numel()]
    dense.backward(upstream.reshape(dense.shape))
    loss.backward(upstream.reshape(loss.shape))
    size = max(float(dense.detach().abs().max()) if dense.numel() else 0.0, math.log(CLASSES)) + 24
    assert loss.dtype == wide
    assert loss.shape == (labels.shape if case.reduction == "none" else ())
    assert float((loss.detach().reshape(dense.shape) - dense.detach()).abs().sum()) <= bound(case, wide, size) * max(dense.numel(), 1), (
        case,
        loss,
        dense,
    )
    assert shard.grad.dtype == case.dtype  # type: ignore[union-attr]
    off = (shard.grad.to(wide) - whole.grad[..., slice_of(case, rank)]).abs()  # type: ignore[union-attr,index]
    allowed = bound(case, wide, 2 * UPSTREAM) + ROUNDOFF[case.dtype] * whole.grad[..., slice_of(case, rank)].abs()  # type: ignore[index]
    assert (off <= allowed).all(), (case, off.max(), allowed)


def check_counts(rank: int, workers: int) -> None:
    case = Case(SIZES[workers][0], smoothing=0.1)
    logits, labels = problem(case)
    for sizes, asked in ((case.sizes, []), (None, ["allgather_.default"])):
        shard = logits[..., slice_of(case, rank)].clone().requires_grad_()
        with Counted() as forward:
            loss = sharded_cross_entropy(shard, labels, shard_sizes=sizes, label_smoothing=0.1)
        with Counted() as backward:
            loss.backward()
        assert forward.names == [*asked, *["allreduce_.default"] * 2], forward.names
        assert backward.names == []


class IgnoresUpstream(_CrossEntropy):
    """The mistake that is often made: right for a loss that is the last call, and wrong for a scaled one."""

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _CrossEntropy.backward(ctx, torch.ones_like(upstream))


def check_linearity(rank: int, workers: int) -> None:
    case = Case(SIZES[workers][0], smoothing=0.1)
    logits, labels = problem(case)
    weight = logits[..., slice_of(case, rank)].clone().requires_grad_()
    report = verify_loss_scaling(lambda: sharded_cross_entropy(weight * 2, labels, label_smoothing=0.1), {"weight": weight})
    assert report == (True, {"weight": 0.0}, ()), report
    maximum, sums = torch.zeros(ITEMS), torch.ones(2, ITEMS)
    index = labels - slice_of(case, rank).start
    report = verify_loss_scaling(lambda: IgnoresUpstream.apply(weight * 2, index, maximum, sums, 0.0, CLASSES).mean(), {"weight": weight})
    assert (report.linear, report.culprits) == (False, ("IgnoresUpstream",)), report


def check_accumulation(rank: int, workers: int) -> None:
    """A window of two micro-batches of unequal numbers of items, with a loss scale, is the large batch."""
    case = Case(SIZES[workers][0])
    logits, labels = problem(case)
    shard = logits[..., slice_of(case, rank)]
    weight = torch.nn.Parameter(shard.clone())
    opt: Any = gradaccum.wrap(torch.optim.SGD([weight], lr=1.0), steps=2, loss_scale=gradaccum.StaticLossScale(1024.0))
    for rows in (slice(0, 2), slice(2, ITEMS)):
        count = int((labels[rows] != case.ignored).sum())
        opt.backward(sharded_cross_entropy(weight[rows], labels[rows]), weight=count)
        opt.step()
        opt.zero_grad()
    whole = logits.clone().requires_grad_()
    cross_entropy(whole, labels).backward()
    off = (shard - weight.detach() - whole.grad[..., slice_of(case, rank)]).abs().max()  # type: ignore[index]
    assert float(off) <= bound(case, torch.float32, 12.0), off


def check_extremes(rank: int, workers: int) -> None:
    """Logits of -inf as a mask, a batch with nothing but ignored labels, and half-precision gradients near a probability of one."""
    sizes = SIZES[workers][0]
    mine = slice_of(Case(sizes), rank)
    logits, labels = torch.zeros(3, CLASSES), torch.tensor([0, 1, 0])
    logits[:, 3:] = -math.inf
    shard = logits[:, mine].requires_grad_()
    loss = sharded_cross_entropy(shard, labels)
    loss.backward()
    torch.testing.assert_close(loss, cross_entropy(logits, labels))
    assert shard.grad is not None
    assert shard.grad.isfinite().all()
    empty = torch.zeros(2, CLASSES)[:, mine].requires_grad_()
    nothing = sharded_cross_entropy(empty, torch.tensor([-100, -100]))
    nothing.backward()
    assert nothing.isnan()
    assert empty.grad is not None
    assert not empty.grad.any()
    sure = torch.zeros(1, CLASSES, dtype=torch.bfloat16)
    sure[0, 0] = 12.0
    part = sure[:, mine].clone().requires_grad_()
    sharded_cross_entropy(part, torch.tensor([0])).backward()
    exact = torch.softmax(sure.double(), -1) - torch.eye(1, CLASSES)
    torch.testing.assert_close(part.grad.double(), exact[:, mine], rtol=2.0**-8, atol=(CLASSES + 1) * 2.0**-24)  # type: ignore[union-attr]


def refused(kind: type[Exception], words: str, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        sharded_cross_entropy(*args, **options)


def check_refusals(rank: int, workers: int) -> None:
    """Labels: on every worker at once, so that all can go on."""
    shard, labels = torch.zeros(3, rank + 1), torch.zeros(3, dtype=torch.int64)
    classes = workers * (workers + 1) // 2
    value, kind = gradaccum.ArgumentValueError, gradaccum.ArgumentTypeError
    refused(value, f"[0, {classes})", shard, labels + classes)
    refused(value, f"[0, {classes})", shard, labels - 1)
    refused(value, f"[0, {classes})", shard, labels + classes * rank)
    refused(value, "differ", shard, labels + rank)
    refused(value, "differ", shard, labels - 100 * min(rank, 1))
    refused(value, "last dimension", shard, labels, shard_sizes=[5] * workers)
    refused(value, "shard_sizes", shard, labels, shard_sizes=[rank + 1])
    refused(kind, "shard_sizes", shard, labels, shard_sizes="four")
    refused(kind, "group", shard, labels, group="workers")
    assert sharded_cross_entropy(shard, labels + classes, check_labels=False).isfinite()


def check(rank: int, workers: int) -> None:
    for case in cases(workers):
        compare(case, rank)
    check_accumulation(rank, workers)
    check_extremes(rank, workers)
    check_refusals(rank, workers)


def check_subgroup(rank: int) -> None:
    """Of two groups of one process, each has its own; the other one is refused."""
    groups = [dist.new_group([each]) for each in range(2)]
    shard, labels = torch.arange(6.0).reshape(2, 3), torch.tensor([rank, 2])
    torch.testing.assert_close(sharded_cross_entropy(shard, labels, group=groups[rank]), cross_entropy(shard, labels))
    refused(gradaccum.UsageError, "other processes", shard, labels, group=groups[1 - rank])


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    check(rank, 2)
    check_counts(rank, 2)
    check_linearity(rank, 2)
    check_subgroup(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2])
