"""The three ways in which FSDP2 reduces a window, each the large batch of all workers;
also of a torch that lacks a private name.
"""

from __future__ import annotations

import math
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.common import (
    require_same_everywhere,
)
from gradaccum_torch.torch_private.fsdp import GLOO_SUMS

from .common import (
    WAYS,
    Way,
    alone,
    batches,
    build,
    check,
    learn,
    mesh_of,
    numbers,
    require_equal,
    require_equal_results,
    sharded,
    train,
    windows_of,
    wrap,
)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.05},
    {"skip_norm": 1e-3},
    {"loss_scale": 1024.0},
    {"reduction": "sum"},
    {"reduction": "sum_per_item", "summed": True},
]


@check
def every_way_is_the_large_batch(rank: int) -> None:
    """Items and branches differ between micro-batches, and one branch is never
    taken.
    """
    for options in OPTIONS:
        given = {name: value for name, value in options.items() if name != "summed"}
        summed = "summed" in options
        reference, other = alone(windows_of(), summed=summed, **given)
        for way in WAYS:
            model = sharded(way)
            opt = wrap(model, way, **given)
            train(model, opt, rank, summed=summed)
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
    """FSDP2's idiom: float32 parameters, bfloat16 in the forward pass, gradients
    reduced in float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
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
    require_equal(
        reference,
        alone(windows_of(dtype=torch.float32), dtype=torch.float32, clip_norm=0.5)[0],
        off=2.0**-7,
    )


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
    reference, _ = alone(
        windows_of(dtype=torch.bfloat16), dtype=torch.bfloat16, master_weights=True
    )
    require_equal(model, reference, off=2.0**-6)
    require_same_everywhere(opt.result)


FLAT, WINDOW = Way("micro_batch", (2,)), Way("window", (2,))


@check
def pass_of_fsdp_ends_with_the_window(rank: int) -> None:
    """FSDP2 lets go of its last unit's buffer at the end of each of three backward
    passes, and at that of the window.
    """
    state, name = (
        resolve_name("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"),
        "_root_post_backward_final_callback",
    )
    model = sharded(WINDOW)
    opt = wrap(model, WINDOW)
    with mock.patch.object(
        state, name, autospec=True, side_effect=getattr(state, name)
    ) as ended:
        train(model, opt, rank, 3)
    assert ended.call_count == 4, ended.call_count


@check
def parameters_on_two_meshes(rank: int) -> None:
    """One module then has two units."""
    common: Any = resolve_name("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        return  # An older torch has one mesh for each module.

    def two_units() -> Any:
        model = build()
        other = common.ShardPlacementResult(
            None,
            common.HSDPMeshInfo(
                mesh_of((2, 1)), shard_mesh_dim=1, replicate_mesh_dim=0
            ),
        )
        own = set(map(id, model.first.parameters()))
        fully_shard(
            model,
            mesh=mesh_of((2,)),
            shard_placement_fn=lambda parameter: (
                other if id(parameter) in own else None
            ),
        )
        return model

    for way in (FLAT, WINDOW):
        model = two_units()
        train(model, wrap(model, way), rank)
        require_equal(model, alone(windows_of())[0])
