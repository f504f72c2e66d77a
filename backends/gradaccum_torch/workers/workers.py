"""The workers of an optimizer: those of its module, those that hold parts of its
parameters, or this one alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import cast, final, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, GradAccumWarning
from gradaccum.kit import (
    Options,
    State,
    UntilWeight,
    explain,
    measures,
    shared_until_weight_error,
)
from gradaccum_torch.private.fsdp import units_holding, units_of
from gradaccum_torch.private.names import (
    are_flattened,
    is_sharded,
    mesh_of,
    processes,
)
from gradaccum_torch.workers.deferred import Deferred, GradientSync, require_deferrable
from gradaccum_torch.workers.fsdp import ShardGroup, Shards
from gradaccum_torch.workers.group import (
    group_alone,
    group_of,
    require_parameters,
    require_reduced,
    require_same_options,
)
from gradaccum_torch.workers.interface import (
    Held,
    Joined,
    Sums,
    Workers,
)
from gradaccum_torch.workers.stages import StageGroup

_SYNCS = get_args(GradientSync)
ALONE = "alone"
"""What the user gives for ``process_group=`` where a process shares no window."""
_UNSAID = (
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
    tied: object = None,
) -> Workers:
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    if are_flattened(parameters):
        found, fix = (
            "those of FullyShardedDataParallel (FSDP1)",
            "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2).",
        )
        raise explain(
            ArgumentValueError,
            "optimizer",
            expected="parameters that FSDP1 has not flattened",
            found=found,
            fix=fix,
        )
    is_alone = isinstance(process_group, str) and process_group == ALONE
    if process_group is None or (is_alone and module is None):
        workers = _found(optimizer, parameters, module, options, gradient_sync)
    elif (
        module is None
        and gradient_sync == "micro_batch"
        and not units_holding(parameters)
    ):
        workers = group_alone(process_group, optimizer, options)
    else:
        fix = (
            "Leave it out: module= has a process group, and FSDP2 reduces gradients by"
            " itself."
        )
        raise explain(
            ArgumentValueError,
            "process_group",
            expected="no module= and no fully_shard beside it",
            found="one",
            fix=fix,
        )
    if norm_group is not None or tied is not None:
        workers.stages = StageGroup(norm_group, tied, parameters, options)
    elif not (workers.several or is_alone) and processes() > 1:
        warnings.warn(_UNSAID.format(processes()), GradAccumWarning, stacklevel=5)
    return _require_allowed(workers, options)


def _require_allowed(workers: Workers, options: Options) -> Workers:
    # After the comparison of the workers' options: where one alone has this one, that
    # tells all of them.
    several = workers.place is None or workers.place[1] > 1
    if several and isinstance(options.steps, UntilWeight):
        raise shared_until_weight_error(options.steps)
    return workers


def _found(
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
        fix = (
            "Leave it out: with a DistributedDataParallel module gradients are reduced"
            " once per window."
        )
        raise explain(
            ArgumentValueError,
            "gradient_sync",
            expected="to stand beside a module= of fully_shard",
            got=sync,
            fix=fix,
        )
    if module is not None:
        return group_of(module, optimizer, options)
    require_reduced(optimizer)
    return Alone()


def _shares_parameters(module: object, parameters: Sequence[Tensor]) -> bool:
    """True if its parameters are split over processes, not copies under
    `DistributedDataParallel`.
    """
    if isinstance(module, DistributedDataParallel):
        return False
    return any(
        map(
            is_sharded,
            (
                module.parameters()
                if isinstance(module, torch.nn.Module)
                else parameters
                if module is None
                else ()
            ),
        )
    )


def _shard_group(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    module: object,
    options: Options,
    sync: GradientSync,
) -> ShardGroup:
    units = units_holding(parameters)
    mesh = max(
        (mesh_of(parameter) for parameter in parameters if is_sharded(parameter)),
        key=DeviceMesh.size,
    )
    if measures(options):
        _require_one_mesh(parameters, mesh)
    if isinstance(module, torch.nn.Module):
        within = [each for unit in units_of(module) for each in unit.parameters]
        require_parameters(module, [*module.parameters(), *within], parameters)
        require_same_options(
            options, *map(mesh.get_group, range(mesh.ndim)), gradient_sync=sync
        )
    shards = Shards(optimizer, units)
    if sync != "micro_batch":
        require_deferrable(units, parameters, options, sync, module)
    shards.require_averages()
    deferred = Deferred(units, mesh, sync) if sync != "micro_batch" else None
    return ShardGroup(mesh, shards, options.reduction == "sum", deferred)


def _require_one_mesh(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Raise unless all sharded parameters are on the workers of `mesh`, the largest:
    elsewhere a norm would be that of some workers.
    """
    ranks = set(mesh.mesh.flatten().tolist())
    for parameter in parameters:
        if is_sharded(parameter):
            others = set(mesh_of(parameter).mesh.flatten().tolist())
            if others != ranks:
                found = f"one on the ranks {sorted(others)}, of {sorted(ranks)}"
                fix = (
                    "Make each expert a DTensor over all ranks, as"
                    " DTensor.from_local(expert, mesh, [Shard(0)]), or give the experts"
                    " an optimizer of their own."
                )
                raise explain(
                    ArgumentValueError,
                    "optimizer",
                    expected="sharded parameters on the same workers, for one norm",
                    found=found,
                    fix=fix,
                )


def _require_sync(sync: object) -> GradientSync:
    if not isinstance(sync, str):
        raise explain(
            ArgumentTypeError,
            "gradient_sync",
            expected=f"one of {_SYNCS}",
            got=sync,
            fix='Write gradient_sync="window".',
        )
    if sync not in _SYNCS:
        raise explain(
            ArgumentValueError,
            "gradient_sync",
            expected=f"one of {_SYNCS}",
            got=sync,
            fix="Check its spelling.",
        )
    return cast(GradientSync, sync)


@final
class Alone(Workers):
    """One worker alone."""

    several, place = False, (0, 1)

    def join(
        self,
        fields: State,
        sums: Sums,
        zeros: Callable[[int], Tensor],
        numbers: Sequence[float],
        part: int | None = None,
    ) -> Joined:
        return Joined(fields, sums, numbers)

    def leave(self) -> Held:
        return "own" if self.stages is None else super().leave()

    def require_no_graph(self) -> None: ...
