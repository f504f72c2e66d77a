"""The private names of FSDP2: a torch that lacks one is refused, and what they do is done."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any
from unittest import mock

from torch.distributed.fsdp import fully_shard

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import (
    Way,
    alone,
    build,
    check,
    mesh_of,
    require_equal,
    sharded,
    train,
    windows_of,
    wrap,
)
from gradaccum_torch import private

FLAT, WINDOW = Way("micro_batch", (2,)), Way("window", (2,))


@check
def names_that_torch_lacks(rank: int) -> None:
    """A private name of FSDP2 without which a window might be wrong in silence is refused as the optimizer is wrapped."""
    model, exists = sharded(FLAT), private.exists
    for name in private.fsdp_names():
        private._require_names.cache_clear()
        with mock.patch.object(private, "exists", lambda asked, name=name: asked != name and exists(asked)):
            if name.endswith("._fsdp_param_groups"):
                continue  # An older torch has a single group.
            with refused(gradaccum.UsageError, name.rpartition(":")[2], "DistributedDataParallel"):
                wrap(model, FLAT)
    private._require_names.cache_clear()


@check
def pass_of_fsdp_ends_with_the_window(rank: int) -> None:
    """FSDP2 lets go of its last unit's buffer at the end of each of three backward passes, and at that of the window."""
    state, name = resolve_name("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"), "_root_post_backward_final_callback"
    model = sharded(WINDOW)
    opt = wrap(model, WINDOW)
    with mock.patch.object(state, name, autospec=True, side_effect=getattr(state, name)) as ended:
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
        other = common.ShardPlacementResult(None, common.HSDPMeshInfo(mesh_of((2, 1)), shard_mesh_dim=1, replicate_mesh_dim=0))
        own = set(map(id, model.first.parameters()))
        fully_shard(model, mesh=mesh_of((2,)), shard_placement_fn=lambda parameter: other if id(parameter) in own else None)
        return model

    for way in (FLAT, WINDOW):
        model = two_units()
        train(model, wrap(model, way), rank)
        require_equal(model, alone(windows_of())[0])
