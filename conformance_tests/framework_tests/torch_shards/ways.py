"""The three ways in which FSDP2 reduces a window: each is the large batch of all workers, and their numbers are equal everywhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import (
    WAYS,
    Way,
    alone,
    batches,
    check,
    learn,
    numbers,
    require_equal,
    require_same_everywhere,
    sharded,
    train,
    windows_of,
    wrap,
)
from gradaccum_torch.private import GLOO_SUMS

OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.05},
    {"skip_norm": 1e-3},
    {"loss_scale": 1024.0},
    {"reduction": "sum"},
    {"reduction": "item_mean", "summed": True},
]


@check
def every_way_is_the_large_batch(rank: int) -> None:
    """Items and branches differ between micro-batches, and one branch is never taken."""
    for options in OPTIONS:
        given = {name: value for name, value in options.items() if name != "summed"}
        summed = "summed" in options
        reference, other = alone(windows_of(), summed=summed, **given)
        for way in WAYS:
            model = sharded(way)
            opt = wrap(model, way, **given)
            train(model, opt, rank, summed=summed)
            require_equal(model, reference)
            assert math.isclose(opt.result.grad_norm, other.result.grad_norm, rel_tol=1e-12), (way, options)
            assert math.isclose(opt.result.loss, other.result.loss, rel_tol=1e-12), (way, options, opt.result, other.result)
            assert opt.result._replace(grad_norm=0, loss=0) == other.result._replace(grad_norm=0, loss=0)
            require_same_everywhere(opt.result)
            assert all(parameter.grad is None for parameter in model.parameters())


@check
def branches_of_one_worker(rank: int) -> None:
    """Where FSDP2 waits, workers may take different branches: the others add zeros, and a branch that nobody took has no gradient."""
    everyone = [[(x, worker == 1 and index == 0) for index, (x, _) in enumerate(batches(worker, 3))] for worker in range(2)]
    reference, _ = alone([everyone[0] + everyone[1]])
    for way in (way for way in WAYS if way.sync != "micro_batch"):
        model = sharded(way)
        opt = wrap(model, way)
        for batch in everyone[rank]:
            learn(model, opt, batch)
        require_equal(model, reference)


@check
def overflow_on_one_worker_skips_on_all(rank: int) -> None:
    for way in WAYS:
        model = sharded(way)
        before = numbers(model)
        opt = wrap(model, way, loss_scale=gradaccum.DynamicLossScale(1024.0))
        for index, (x, rare) in enumerate(batches(rank, 3)):
            learn(model, opt, (x * (math.inf if rank == 1 and index == 0 else 1), rare))
        assert opt.result.skipped
        assert opt.result.overflow
        assert opt.result.loss_scale == 512.0
        assert all(map(torch.equal, numbers(model), before))
        train(model, opt, rank, 3)
        assert opt.result.applied
        require_same_everywhere(opt.result)
        require_equal(model, alone(windows_of((3,)))[0])


@check
def half_precision_is_computed_and_not_summed(rank: int) -> None:
    """FSDP2's idiom: float32 parameters, bfloat16 in the forward pass, gradients reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if GLOO_SUMS:
        with refused(gradaccum.UsageError, "torch 2.11"):
            wrap(sharded(WAYS[0], torch.float32), WAYS[0])
        return
    reference = None
    for way in WAYS:
        model = sharded(way, torch.float32, mp_policy=policy)
        opt = wrap(model, way, clip_norm=0.5)
        for batch in batches(rank, 6, torch.float32):
            learn(model, opt, batch)
        reference = reference or model
        require_equal(model, reference, off=2.0**-20)
        require_same_everywhere(opt.result)
    assert reference is not None
    require_equal(reference, alone(windows_of(dtype=torch.float32), dtype=torch.float32, clip_norm=0.5)[0], off=2.0**-7)


@check
def half_precision_parameters_are_summed_sharded(rank: int) -> None:
    way = Way("micro_batch", (2,))
    if GLOO_SUMS:
        return
    model = sharded(way, torch.bfloat16)
    opt = wrap(model, way, master_weights=True)
    for batch in batches(rank, 2, torch.bfloat16):
        learn(model, opt, batch)
    sums = opt.state_dict()["gradaccum"]["sums"]
    assert all(total.dtype == torch.float32 for total in sums.values())
    assert sums[0].to_local().numel() < sums[0].numel()
    for batch in batches(rank, 6, torch.bfloat16)[2:]:
        learn(model, opt, batch)
    reference, _ = alone(windows_of(dtype=torch.bfloat16), dtype=torch.bfloat16, master_weights=True)
    require_equal(model, reference, off=2.0**-6)
    require_same_everywhere(opt.result)
