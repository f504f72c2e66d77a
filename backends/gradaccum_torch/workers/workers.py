"""Finds the workers that share an optimizer's windows. If a module or a process group
was passed to `gradaccum.wrap`, these are the workers of this module or group. Without a
module or group, these are the workers over which the optimizer's parameters are
sharded. If the parameters are not sharded either, the optimizer shares its windows with
no other worker.
"""

from __future__ import annotations

import warnings
from typing import cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentValueError, GradAccumWarning
from gradaccum.kit import (
    Options,
    UntilWeight,
    measures,
    require_choice,
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
from gradaccum_torch.workers import checks
from gradaccum_torch.workers.deferred import DeferredReduction, GradientSync
from gradaccum_torch.workers.fsdp import ShardGroup
from gradaccum_torch.workers.group import WorkerGroup
from gradaccum_torch.workers.interface import Workers

ALONE = "alone"
"""The value of ``process_group=`` for a process that does not share its windows."""
UNNAMED_WORKERS = (
    "gradaccum: {} processes are running, but it is not known which of them share this"
    " optimizer's windows, so each process divides by the weight of its own"
    " micro-batches. Write module=DistributedDataParallel(model), or process_group="
    ' with the workers that share the windows. Write process_group="alone" if this'
    " process trains by itself, or if something else averages each micro-batch's"
    " gradients, which is correct only if all processes pass the same weights."
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
        raise ArgumentValueError(
            "optimizer: expected parameters that FSDP1 has not flattened; got"
            " parameters of FullyShardedDataParallel (FSDP1). Shard the model with"
            " torch.distributed.fsdp.fully_shard (FSDP2) instead."
        )
    sync = require_choice("gradient_sync", gradient_sync, get_args(GradientSync))
    is_alone = isinstance(process_group, str) and process_group == ALONE
    if module is not None or process_group is None or is_alone:
        workers = workers_of_module(optimizer, module, options, sync)
        workers.is_alone = is_alone
    else:
        group = cast(dist.ProcessGroup, process_group)
        workers = make_worker_group(group, optimizer, options)
        checks.warn_of_unequal_parameters(optimizer, group)
    if norm_group is not None:
        workers.stages = cast(dist.ProcessGroup, norm_group)
        workers.device = parameters[0].device
        checks.require_same_lines(checks.describe_options(options), workers.stages)
    elif not (workers.is_shared or is_alone) and processes() > 1:
        text = UNNAMED_WORKERS.format(processes())
        warnings.warn(text, GradAccumWarning, stacklevel=5)
    # Check for until_weight only after the workers' options have been compared. If only
    # some workers pass until_weight, the comparison raises an error on all workers.
    if workers.place[1] > 1 and isinstance(options.steps, UntilWeight):
        raise shared_until_weight_error(options.steps)
    return workers


def workers_of_module(
    optimizer: torch.optim.Optimizer, module: object, options: Options, sync: str
) -> Workers:
    candidates = parameters_of(optimizer)
    if isinstance(module, torch.nn.Module):
        candidates = list(module.parameters())
    is_parallel = isinstance(module, DistributedDataParallel)
    if not is_parallel and any(map(is_sharded, candidates)):
        return make_shard_group(optimizer, module, options, sync)
    if module is None:
        return Workers()
    parallel = checks.parallel_module(cast(torch.nn.Module, module))
    return make_worker_group(parallel.process_group, optimizer, options, parallel)


def make_worker_group(
    group: dist.ProcessGroup,
    optimizer: torch.optim.Optimizer,
    options: Options,
    module: DistributedDataParallel | None = None,
) -> WorkerGroup:
    workers = WorkerGroup(group, optimizer, options, module)
    workers.add_parameters(workers.parameters())
    lines = checks.describe_options(options)
    lines += checks.describe_parameters(optimizer, module)
    checks.require_same_lines(lines, group)
    return workers


def make_shard_group(
    optimizer: torch.optim.Optimizer, module: object, options: Options, sync: str
) -> ShardGroup:
    parameters = parameters_of(optimizer)
    if isinstance(module, torch.nn.Module):
        module_parameters: list[Tensor] = [*module.parameters()]
        for unit in units_of(module):
            module_parameters += unit.parameters
        checks.require_parameters(module, module_parameters, parameters)
    meshes = [mesh_of(parameter) for parameter in parameters if is_sharded(parameter)]
    mesh = max(meshes, key=lambda mesh: mesh.size())
    if measures(options):
        checks.require_meshes_within(parameters, mesh.mesh.flatten().tolist())
    if module is not None:
        lines = checks.describe_options(options, sync)
        checks.require_same_lines(lines, *mesh.get_all_groups())
    units = units_holding(parameters)
    deferred_reduction = None
    if sync == "window":
        checks.require_deferrable(units, options)
        deferred_reduction = DeferredReduction(units, mesh)
    return ShardGroup(optimizer, mesh, options.reduction == "sum", deferred_reduction)
