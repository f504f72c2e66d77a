"""The workers of an optimizer: those of its module, those that hold parts of its
parameters, or this one alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, GradAccumWarning
from gradaccum.kit import (
    Options,
    UntilWeight,
    explain,
    measures,
    shared_until_weight_error,
)
from gradaccum_torch.torch_private.fsdp import units_holding, units_of
from gradaccum_torch.torch_private.names import (
    are_flattened,
    is_sharded,
    mesh_of,
    parameters_of,
    processes,
)
from gradaccum_torch.workers.checks import (
    require_group,
    require_parallel,
    require_parameters,
    require_reduced,
    require_same_options,
    require_same_parameters,
    warn_of_unequal_parameters,
)
from gradaccum_torch.workers.deferred import Deferred, GradientSync, require_deferrable
from gradaccum_torch.workers.fsdp import ShardGroup, Shards
from gradaccum_torch.workers.group import WorkerGroup
from gradaccum_torch.workers.interface import Workers
from gradaccum_torch.workers.stages import StageGroup

ALONE = "alone"
"""What the user gives for ``process_group=`` where a process shares no window."""
UNSAID = (
    "gradaccum: {} processes are up, and nothing says which of them share this"
    " optimizer's windows, so that each process divides by its own weights. Write"
    " module=DistributedDataParallel(model), or process_group= with the workers that"
    ' share them. Write process_group="alone" if this process trains by itself, or if'
    " something else averages the gradients of each micro-batch, which is right only"
    " where all processes have the same weights."
)


def workers_of(
    optimizer: torch.optim.Optimizer,
    module: object,
    options: Options,
    gradient_sync: object = "micro_batch",
    process_group: object = None,
    norm_group: object = None,
) -> Workers:
    parameters = parameters_of(optimizer)
    if are_flattened(parameters):
        raise explain(
            ArgumentValueError,
            "optimizer",
            expected="parameters that FSDP1 has not flattened",
            found="those of FullyShardedDataParallel (FSDP1)",
            fix="Shard the model with torch.distributed.fsdp.fully_shard (FSDP2).",
        )
    is_alone = isinstance(process_group, str) and process_group == ALONE
    if process_group is None or (is_alone and module is None):
        workers = _workers_of_module(
            optimizer, parameters, module, options, gradient_sync
        )
    elif (
        module is None
        and gradient_sync == "micro_batch"
        and not units_holding(parameters)
    ):
        workers = _workers_of_group(process_group, optimizer, options)
    else:
        raise explain(
            ArgumentValueError,
            "process_group",
            expected="no module= and no fully_shard beside it",
            found="one",
            fix="Leave it out: module= has a process group, and FSDP2 reduces gradients"
            " by itself.",
        )
    if norm_group is not None:
        workers.stages = StageGroup(norm_group, options, parameters[0].device)
    elif not (workers.several or is_alone) and processes() > 1:
        text = UNSAID.format(processes())
        warnings.warn(text, GradAccumWarning, stacklevel=5)
    # After the comparison of the workers' options: where one alone has this one, that
    # tells all of them.
    several = workers.place is None or workers.place[1] > 1
    if several and isinstance(options.steps, UntilWeight):
        raise shared_until_weight_error(options.steps)
    return workers


def _workers_of_module(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    module: object,
    options: Options,
    gradient_sync: object,
) -> Workers:
    sync = _require_sync(gradient_sync)
    if _shares_parameters(module, parameters):
        return _shard_group(optimizer, parameters, module, options, sync)
    if sync != "micro_batch":
        raise explain(
            ArgumentValueError,
            "gradient_sync",
            expected="to stand beside a module= of fully_shard",
            got=sync,
            fix="Leave it out: with a DistributedDataParallel module gradients are"
            " reduced once per window.",
        )
    if module is None:
        require_reduced(optimizer)
        return Workers()
    parallel = require_parallel(module)
    workers = WorkerGroup(parallel.process_group, optimizer, options, parallel)
    workers.require_parameters(parameters)
    require_same_options(options, parallel.process_group)
    require_same_parameters(optimizer, parallel, parallel.process_group)
    return workers


def _workers_of_group(
    group: object, optimizer: torch.optim.Optimizer, options: Options
) -> WorkerGroup:
    require_group(group, "process_group")
    workers = WorkerGroup(cast(dist.ProcessGroup, group), optimizer, options)
    workers.require_parameters(workers.parameters())
    require_same_options(options, workers.group)
    require_same_parameters(optimizer, None, workers.group)
    warn_of_unequal_parameters(optimizer, workers.group)
    return workers


def _shares_parameters(module: object, parameters: Sequence[Tensor]) -> bool:
    """True if its parameters are split over processes, not copies under
    `DistributedDataParallel`.
    """
    if isinstance(module, DistributedDataParallel):
        return False
    if isinstance(module, torch.nn.Module):
        return any(map(is_sharded, module.parameters()))
    return module is None and any(map(is_sharded, parameters))


def _shard_group(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    module: object,
    options: Options,
    sync: GradientSync,
) -> ShardGroup:
    units = units_holding(parameters)
    meshes = [mesh_of(parameter) for parameter in parameters if is_sharded(parameter)]
    mesh = max(meshes, key=DeviceMesh.size)
    if measures(options):
        _require_one_mesh(meshes, mesh)
    if isinstance(module, torch.nn.Module):
        within = [each for unit in units_of(module) for each in unit.parameters]
        require_parameters(module, [*module.parameters(), *within], parameters)
        groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        require_same_options(options, *groups, gradient_sync=sync)
    shards = Shards(optimizer, units)
    if sync != "micro_batch":
        require_deferrable(units, parameters, options, sync, module)
    shards.require_averages()
    deferred = Deferred(units, mesh, sync) if sync != "micro_batch" else None
    return ShardGroup(mesh, shards, options.reduction == "sum", deferred)


def _require_one_mesh(meshes: Sequence[DeviceMesh], mesh: DeviceMesh) -> None:
    """Raise unless all sharded parameters are on the workers of `mesh`, the largest:
    elsewhere a norm would be that of some workers.
    """
    ranks = set(mesh.mesh.flatten().tolist())
    for other_mesh in meshes:
        others = set(other_mesh.mesh.flatten().tolist())
        if others != ranks:
            raise explain(
                ArgumentValueError,
                "optimizer",
                expected="sharded parameters on the same workers, for one norm",
                found=f"one on the ranks {sorted(others)}, of {sorted(ranks)}",
                fix="Make each expert a DTensor over all ranks, as"
                " DTensor.from_local(expert, mesh, [Shard(0)]), or give the experts an"
                " optimizer of their own.",
            )


def _require_sync(sync: object) -> GradientSync:
    choices = get_args(GradientSync)
    if not isinstance(sync, str):
        raise explain(
            ArgumentTypeError,
            "gradient_sync",
            expected=f"one of {choices}",
            got=sync,
            fix='Write gradient_sync="window".',
        )
    if sync not in choices:
        raise explain(
            ArgumentValueError,
            "gradient_sync",
            expected=f"one of {choices}",
            got=sync,
            fix="Check its spelling.",
        )
    return cast(GradientSync, sync)
