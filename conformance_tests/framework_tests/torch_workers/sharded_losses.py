"""Cross-entropy over class shards: its collectives, a group of its own, loss scaling, and what torch alone refuses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.checks import check
from gradaccum_torch import sharded_cross_entropy, verify_loss_scaling
from gradaccum_torch.workers.cross_entropy import _CrossEntropy

SIZES = (4, 3)
LOGITS = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, -100, 4, 6, 1, 3])


def own(rank: int) -> Tensor:
    return LOGITS.split(SIZES, 1)[rank].clone().requires_grad_()


class Counted(TorchDispatchMode):
    """The collectives of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@check
def sharded_loss_reduces_twice(rank: int) -> None:
    for sizes, asked in ((SIZES, []), (None, ["allgather_.default"])):
        with Counted() as forward:
            loss = sharded_cross_entropy(own(rank), LABELS, shard_sizes=sizes, label_smoothing=0.1)
        with Counted() as backward:
            loss.backward()  # type: ignore[no-untyped-call]
        assert forward.names == [*asked, *["allreduce_.default"] * 2], forward.names
        assert backward.names == []


class IgnoresUpstream(_CrossEntropy):
    """The mistake that is often made: right for a loss that is the last call, and wrong for a scaled one."""

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _CrossEntropy.backward(ctx, torch.ones_like(upstream))


@check
def sharded_loss_is_linear(rank: int) -> None:
    weight, index = own(rank), LABELS - 4 * rank
    report = verify_loss_scaling(lambda: sharded_cross_entropy(weight * 2, LABELS, label_smoothing=0.1), {"weight": weight})
    assert report == (True, {"weight": 0.0}, ()), report
    maximum, sums = torch.zeros(6), torch.ones(2, 6)
    report = verify_loss_scaling(lambda: IgnoresUpstream.apply(weight * 2, index, maximum, sums, 0.0, 7).mean(), {"weight": weight})
    assert (report.linear, report.culprits) == (False, ("IgnoresUpstream",)), report


@check
def sharded_loss_within_a_group(rank: int) -> None:
    """Of two groups of one process, each has its own; the other one is refused."""
    groups = [dist.new_group([each]) for each in range(2)]
    shard, labels = torch.arange(6.0).reshape(2, 3), torch.tensor([rank, 2])
    torch.testing.assert_close(sharded_cross_entropy(shard, labels, group=groups[rank]), cross_entropy(shard, labels))
    with refused(gradaccum.UsageError, "other processes"):
        sharded_cross_entropy(shard, labels, group=groups[1 - rank])


@check
def sharded_loss_refusals(rank: int) -> None:
    """On every worker at once, so that all can go on."""
    shard, labels = torch.zeros(3, rank + 1), torch.zeros(3, dtype=torch.int64)
    for kind, words, options in (
        (gradaccum.ArgumentValueError, "last dimension", {"shard_sizes": [5, 5]}),
        (gradaccum.ArgumentValueError, "shard_sizes", {"shard_sizes": [rank + 1]}),
        (gradaccum.ArgumentTypeError, "shard_sizes", {"shard_sizes": "four"}),
        (gradaccum.ArgumentTypeError, "group", {"group": "workers"}),
    ):
        with refused(kind, words):
            sharded_cross_entropy(shard, labels, **options)
    assert sharded_cross_entropy(shard, labels + 3, check_labels=False).isfinite()
