"""The reductions at the end of a window: how often, in which layouts, and never twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    WORLD,
    Branches,
    all_windows,
    alone,
    build,
    learn,
    micro_batches,
    require_equal,
    sgd,
    together,
)
from gradaccum_torch.workers.group import all_reduce

PARTS = 271
"""The elements of a weight or a loss, however many workers there are."""
COUNTED = 33
"""Sparse sums, and the bits of the learning rates."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """The elements of each reduction that is made inside."""
    called: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield called
    finally:
        dist.all_reduce = original


@check
def one_reduction_per_window(rank: int) -> None:
    """Numbers and small sums together, whatever the number of micro-batches; once more where the guess which sums exist was wrong."""
    with counted() as called:
        together(rank)
    size = sum(p.numel() for p in Branches().parameters())
    rare = sum(p.numel() for p in Branches().rare.parameters())
    numbers = 2 * PARTS + 3 + COUNTED + 6  # The weight and the loss.
    assert called == [numbers, numbers + size, numbers + size, numbers + size - rare]
    model = build()
    opt = gradaccum.wrap(sgd(model), steps=3, module=DistributedDataParallel(model, find_unused_parameters=True))
    with counted() as called:
        for batch in micro_batches(rank)[:3] * 4:
            learn(model, opt, batch)
    assert called == [numbers, *[numbers + size] * 4]


@check
def numbers_ride_with_every_dtype(rank: int) -> None:
    """A bucket of bfloat16 could not hold a count, so there the numbers travel alone."""
    expected, _ = alone(all_windows(torch.float32), torch.float32)
    size = sum(p.numel() for p in Branches().parameters())
    numbers = 2 * PARTS + 3 + COUNTED + 6  # The weight and the loss.
    for dtype, rides, off in (("float64", True, 1e-6), ("bfloat16", False, 2**-5)):
        with counted() as called:
            model, opt, _ = together(rank, torch.float32, accumulate_dtype=dtype)
        assert called[:2] == ([numbers, numbers + size] if rides else [numbers, size])
        assert opt.result.optimizer_step == 2
        require_equal(model, expected, off=off)


@check
def sums_come_and_go(rank: int) -> None:
    """A branch that the workers take in some windows only, one of them or both; then a window that is empty on both."""
    taken = [(False, True), (False, False), (True, True), (False, False), (False, False), (True, False)]
    windows = [[(x, y, rare) for (x, y, _), rare in zip((micro_batches(0)[0], micro_batches(1)[0]), both, strict=True)] for both in taken]
    for options in ({}, {"clip_norm": 0.05}):
        model = build()
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        opt = gradaccum.wrap(sgd(model), steps=1, module=parallel, **options)
        for window in windows:
            learn(parallel, opt, window[rank])
        opt.flush()
        require_equal(model, alone(windows, **options)[0])


@check
def model_is_cast_between_windows(rank: int) -> None:
    """What rode in the last window has another dtype now, and rides again."""
    model, reference = build(torch.float32), build(torch.float32)
    parallel = DistributedDataParallel(model)
    opt = gradaccum.wrap(sgd(model), steps=1, module=parallel, reduction="item_mean")
    other = gradaccum.wrap(sgd(reference), steps=2, reduction="item_mean")
    for dtype in (torch.float32, torch.float64):
        model.to(dtype), reference.to(dtype)
        x = torch.ones(1, 4, dtype=dtype)
        with counted() as called:
            opt.backward(parallel(x * (1 + rank)).sum() + 0 * model.rare(model.first(x)).sum(), weight=70001.0 + rank)
            opt.step()
        for each in range(WORLD):
            other.backward(reference(x * (1 + each)).sum() + 0 * reference.rare(reference.first(x)).sum(), weight=70001.0 + each)
            other.step()
    assert len(called) == 1
    require_equal(model, reference)


@check
def large_and_strided_sums_are_reduced(rank: int) -> None:
    """Above four mebibytes a tensor travels alone; a layout that is not contiguous, as of a convolution in channels_last, is packed."""
    tensors = [torch.full((1100, 1000), 1.0 + rank), torch.full((1200, 1000), 2.0 + rank).t(), torch.full((3, 2), 3.0 + rank).t()]
    with counted() as called:
        all_reduce([tensors[0], tensors[1] if rank else tensors[1].contiguous(), tensors[2]], dist.group.WORLD)
    assert called == [1_100_000, 1_200_000, 6]
    assert [float(tensor.min()) for tensor in (tensors[0], tensors[2])] == [3.0, 7.0]
    if rank:
        assert tensors[1].unique().tolist() == [5.0]


@check
def large_sums_follow_the_numbers(rank: int) -> None:
    """They are reduced one by one, once all workers know which of them exist."""
    model, reference = (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 500_000)).double() for _ in range(2))
    parallel = DistributedDataParallel(model)
    reference.load_state_dict(model.state_dict())
    opt, other = gradaccum.wrap(sgd(model), steps=1, module=parallel), gradaccum.wrap(sgd(reference), steps=2)
    for first in range(2):
        with counted() as called:
            parallel(torch.full((1, 4), 1.0 + rank + first).double()).square().mean().backward()
            opt.step()
            opt.zero_grad()
        for each in range(WORLD):
            reference(torch.full((1, 4), 1.0 + each + first).double()).square().mean().backward()
            other.step()
            other.zero_grad()
    assert called == [2 * PARTS + 3 + COUNTED + 4 + 15 + 500_000, 1_500_000]
    require_equal(model, reference)


@check
def failed_update_is_not_reduced_twice(rank: int) -> None:
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    # Not "mean": twice the sum over twice the weight would be the same.
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel, reduction="sum", noise_scale=0.5)
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
    again = build()
    parallel = DistributedDataParallel(again, find_unused_parameters=True)
    unhurt = gradaccum.wrap(sgd(again), steps=4, module=parallel, reduction="sum", noise_scale=0.5)
    for batch in batches[:4]:
        learn(parallel, unhurt, batch)
    unhurt.flush()
    assert opt.result == unhurt.result
    assert opt.result.noise_scale == opt.result.noise_scale, "not NaN"
