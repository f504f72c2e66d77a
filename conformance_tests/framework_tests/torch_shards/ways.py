"""The three ways in which FSDP2 reduces a window, each the large batch of all
workers.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..torch_fsdp import GLOO_SUMS
from ..torch_workers.common import require_same_everywhere
from .common import (
    FLAT,
    WAITING,
    WAYS,
    alone,
    batches,
    check,
    each_way,
    learn,
    require_equal,
    require_equal_results,
    sharded,
    train,
    windows_of,
    wrap,
)


@check
def every_way_is_the_large_batch(rank: int) -> None:
    """Items and branches differ between micro-batches, and one branch is never
    taken.
    """
    for options in (
        {"clip_norm": 0.05, "loss_scale": 1024.0},
        {"skip_norm": 1e-3},
        {"reduction": "sum"},
    ):
        reference, other = alone(windows_of(3, 3), **options)
        for _, model, opt in each_way(**options):
            train(model, opt, rank)
            require_equal(model, reference)
            require_equal_results(opt, other)
            require_same_everywhere(opt.result)
            assert all(parameter.grad is None for parameter in model.parameters())


@check
def branches_of_one_worker(rank: int) -> None:
    """Where FSDP2 waits, workers may take different branches: the others add zeros, and
    a branch that nobody took has no gradient.
    """
    everyone = [
        [
            (x, worker == 1 and index == 0)
            for index, (x, _) in enumerate(batches(worker, 3))
        ]
        for worker in range(2)
    ]
    reference, _ = alone([everyone[0] + everyone[1]])
    for _, model, opt in each_way(WAITING):
        for batch in everyone[rank]:
            learn(model, opt, batch)
        require_equal(model, reference)


@check
def half_precision_is_computed_and_not_summed(rank: int) -> None:
    """FSDP2's idiom: float32 parameters, bfloat16 in the forward pass, gradients
    reduced in float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    if GLOO_SUMS:
        return
    dtype = torch.float32
    reference, _ = alone(windows_of(3, 3, dtype=dtype), dtype=dtype, clip_norm=0.5)
    off = 2.0**-7
    for way in WAYS:
        model = sharded(way, dtype, mp_policy=policy)
        opt = wrap(model, way, clip_norm=0.5)
        for batch in batches(rank, 6, dtype):
            learn(model, opt, batch)
        require_equal(model, reference, off=off)
        require_same_everywhere(opt.result)
        reference = model
        off = 2.0**-20


@check
def half_precision_parameters_are_summed_sharded(rank: int) -> None:
    if GLOO_SUMS:
        return
    dtype = torch.bfloat16
    model = sharded(FLAT, dtype)
    opt = wrap(model, FLAT, master_weights=True)
    for index, batch in enumerate(batches(rank, 6, dtype)):
        learn(model, opt, batch)
        if index == 1:
            sums = opt.state_dict()["gradaccum"]["sums"]
            assert all(total.dtype == torch.float32 for total in sums.values())
            assert sums[0].to_local().numel() < sums[0].numel()
    reference, _ = alone(
        windows_of(3, 3, dtype=dtype), dtype=dtype, master_weights=True
    )
    require_equal(model, reference, off=2.0**-6)
    require_same_everywhere(opt.result)
