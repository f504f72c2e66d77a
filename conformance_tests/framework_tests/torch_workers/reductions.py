"""What the end of a window sends: how often, in which layouts, and never twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    Branches,
    all_windows,
    alone,
    build,
    learn,
    micro_batches,
    refused,
    require_equal,
    sgd,
    together,
)
from gradaccum_torch.workers.reduction import all_reduce


@check
def two_reductions_per_window(rank: int) -> None:
    """One of a few numbers and one of the sums, whatever the number of micro-batches."""
    called: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        together(rank)
    finally:
        dist.all_reduce = original
    size = sum(p.numel() for p in Branches().parameters())
    rare = sum(p.numel() for p in Branches().rare.parameters())
    assert [count for count in called if count > 20] == [size, size - rare]
    assert len(called) == 4


@check
def large_and_strided_sums_are_reduced(rank: int) -> None:
    """Above a mebibyte a tensor travels alone; a layout that is not contiguous, as of a convolution in channels_last, is packed."""
    tensors = [torch.full((600, 600), 1.0 + rank), torch.full((700, 600), 2.0 + rank).t(), torch.full((3, 2), 3.0 + rank).t()]
    all_reduce([tensors[0], tensors[1] if rank else tensors[1].contiguous(), tensors[2]], dist.group.WORLD)
    assert [float(tensor.min()) for tensor in (tensors[0], tensors[2])] == [3.0, 7.0]
    if rank:
        assert tensors[1].unique().tolist() == [5.0]


@check
def failed_update_is_not_reduced_twice(rank: int) -> None:
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    # Not "mean": twice the sum over twice the weight would be the same.
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel, reduction="sum")
    hook = opt.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
    batches = micro_batches(rank)
    with refused(ZeroDivisionError):
        for batch in batches[:4]:
            learn(parallel, opt, batch)
        opt.flush()
    hook.remove()
    with refused(gradaccum.UsageError, "flush()"):
        opt.state_dict()
    opt.flush()
    require_equal(model, alone(all_windows()[:1], reduction="sum")[0])
