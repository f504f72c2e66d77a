"""The workers of an optimizer: those of its module, those that hold parts of its
parameters, or this one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from inspect import unwrap
from typing import cast, final, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import (
    Options,
    State,
    UntilWeight,
    explain,
    shared_until_weight_error,
)
from gradaccum_torch.private.fsdp import units_holding, units_of
from gradaccum_torch.private.names import (
    are_flattened,
    is_sharded,
    mesh_of,
    module_averaging,
)
from gradaccum_torch.window.watch import delivering_zeros
from gradaccum_torch.workers.deferred import Deferred, GradientSync, require_deferrable
from gradaccum_torch.workers.fsdp import ShardGroup, Shards
from gradaccum_torch.workers.group import (
    group_alone,
    group_of,
    require_parameters,
    require_same_options,
)
from gradaccum_torch.workers.interface import (
    Held,
    Joined,
    Sums,
    Workers,
    require_no_join,
)
from gradaccum_torch.workers.stages import StageGroup

_SYNCS = get_args(GradientSync)
_AVERAGES = "AVG"
"""Of `torch.distributed.ReduceOp`."""


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
    if process_group is None:
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
    if (
        not workers.several
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
    ):
        _require_no_reduction(optimizer)
    return _require_allowed(workers, parameters, options)


def _require_no_reduction(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless no method of `optimizer` averages over workers, which have divided
    by weights of their own by then.

    A method that reduces by ``ReduceOp.SUM`` may add up updates or, as Prodigy, numbers
    of shards.
    """
    kinds = [
        kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer
    ]
    methods = [
        unwrap(getattr(each, "__func__", each))
        for kind in kinds
        for each in vars(kind).values()
        if callable(each)
    ]
    called = {
        name
        for each in methods
        for name in getattr(getattr(each, "__code__", None), "co_names", ())
    }
    if _AVERAGES in called:
        fix = (
            "Write gradaccum.wrap(optimizer, ...,"
            " process_group=torch.distributed.group.WORLD), or module= where"
            " DistributedDataParallel "
        )
        fix += "reduces the gradients."
        found = (
            f"a {type(optimizer).__name__}, which averages over workers by itself, and"
            " nothing that says which workers share the window"
        )
        raise explain(
            UsageError,
            "process_group",
            expected="the workers that an optimizer reduces over",
            found=found,
            fix=fix,
        )


def _require_allowed(
    workers: Workers, parameters: Sequence[Tensor], options: Options
) -> Workers:
    # After the comparison of the workers' options: where one alone has this one, that
    # tells all of them.
    several = workers.place is None or workers.place[1] > 1
    if several and isinstance(options.steps, UntilWeight):
        raise shared_until_weight_error(options.steps)
    if options.noise_decay is not None and any(map(is_sharded, parameters)):
        expected, found = (
            "whole parameters on each worker",
            (
                "sharded ones, whose gradients are those of all workers in each"
                " micro-batch"
            ),
        )
        fix = (
            "Leave noise_scale out, or measure it under DistributedDataParallel with"
            " module=."
        )
        raise explain(
            ArgumentValueError, "noise_scale", expected=expected, found=found, fix=fix
        )
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
    return (
        Alone(optimizer, options.separate_sums)
        if module is None
        else group_of(module, optimizer, options)
    )


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
    """One worker alone. An unknown `DistributedDataParallel` may still average each
    micro-batch's gradients, so weights must be equal.
    """

    several, place = False, (0, 1)

    def __init__(self, optimizer: torch.optim.Optimizer, separate: bool) -> None:
        self._optimizer, self._separate = optimizer, separate
        self._compared = False

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

    def require_one_weight(self, fields: State) -> None:
        module = self._averaging() if not self._compared else None
        if module is not None:
            require_no_join(module)
            weights = torch.tensor(
                [fields.weight, -fields.weight],
                dtype=torch.float64,
                device=self._parameters()[0].device,
            )
            dist.all_reduce(weights, dist.ReduceOp.MAX, group=module.process_group)
            most, minus_least = weights.tolist()
            if most != -minus_least:
                raise _weights_error(fields.weight, most, -minus_least)
            self._compared = True

    def window_ended(self) -> None:
        self._compared = False

    def taking_part(self) -> AbstractContextManager[None] | None:
        if self._averaging() is None:
            return None
        if not self._separate:
            fix = "Write gradaccum.wrap(optimizer, ..., module=parallel)."
            expected = (
                "items on every worker, where DistributedDataParallel averages each"
                " micro-batch's gradients"
            )
            raise explain(UsageError, "weight", expected=expected, got=0, fix=fix)
        return delivering_zeros(self._parameters())

    def require_no_graph(self) -> None: ...

    def _averaging(self) -> DistributedDataParallel | None:
        return self._module if dist.is_available() and dist.is_initialized() else None

    @cached_property
    def _module(self) -> DistributedDataParallel | None:
        """The module that averages, looked for once, through all objects."""
        return module_averaging(self._parameters())

    def _parameters(self) -> list[Tensor]:
        return [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        ]


def _weights_error(own: float, most: float, least: float) -> UsageError:
    expected = (
        "windows of one weight on every worker, where DistributedDataParallel averages"
        " each micro-batch's gradients"
    )
    fix = (
        "Write gradaccum.wrap(optimizer, ..., module=parallel). The window cannot be"
        " closed: call opt.discard() on every worker."
    )
    return explain(
        UsageError,
        "weight",
        expected=expected,
        found=f"{own:g} here, from {least:g} to {most:g} on the workers",
        fix=fix,
    )
