"""The module that several workers train together: checked, and its own reduction left out.

`torch.nn.parallel.DistributedDataParallel` averages gradients in every backward pass unless it is told to wait. Here the window's sum is
reduced instead, so it waits for good. It still sends the model when it is built, and buffers with the first forward pass after an update.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Options, explain, is_known
from gradaccum_torch.fsdp_private import units_holding
from gradaccum_torch.torch_private import is_sharded, leave_reduction_out, mesh_of, registered_comm_hooks
from gradaccum_torch.workers.group import WorkerGroup

_FIX = "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model)), or module=fully_shard(model)."


def group_of(module: object, optimizer: torch.optim.Optimizer, options: Options) -> WorkerGroup:
    """The workers that train `module` together. Collective: every worker of its process group calls this.

    Raises:
        ArgumentTypeError: `module` is no `torch.nn.parallel.DistributedDataParallel`, or its parameters are sharded.
        ArgumentValueError: `optimizer` has other whole parameters, or parameters that are sharded over other workers; or other workers have
            other options.
        UsageError: it has a communication hook, which would never be called.
    """
    parallel = _require_parallel(module)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    require_parameters(parallel, list(parallel.parameters()), [each for each in parameters if not is_sharded(each)])
    _require_same_workers(parallel.process_group, [each for each in parameters if is_sharded(each)])
    if registered_comm_hooks(parallel):
        fix = "Leave register_comm_hook out: the window's sum is reduced by all_reduce."
        found = "a registered hook, which would never be called"
        raise explain(UsageError, "module", expected="a module without a communication hook", found=found, fix=fix)
    require_same_options(options, parallel.process_group)
    leave_reduction_out(parallel)
    return WorkerGroup(parallel.process_group, parallel)


def _require_parallel(module: object) -> DistributedDataParallel:
    if not isinstance(module, DistributedDataParallel):
        found = f"an object of type {type(module).__name__}"
        raise explain(ArgumentTypeError, "module", expected="a DistributedDataParallel or fully_shard module", found=found, fix=_FIX)
    if any(map(is_sharded, module.parameters())):
        fix = "Leave module= out: their gradients are reduced in each backward pass."
        raise explain(ArgumentTypeError, "module", expected="a module whose parameters are whole", found="sharded parameters", fix=fix)
    return module


def require_parameters(module: torch.nn.Module, own: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Each of an optimizer's `parameters` is one of `module`, which are its `own`.

    Raises:
        ArgumentValueError: one is not.
    """
    known = set(map(id, own))
    strangers = sum(id(parameter) not in known for parameter in parameters)
    if strangers:
        expected, found = "the module whose parameters the optimizer has", f"a {type(module).__name__} without {strangers} of them"
        raise explain(ArgumentValueError, "module", expected=expected, found=found, fix=_FIX)


def _require_same_workers(group: dist.ProcessGroup, sharded: Sequence[Tensor]) -> None:
    """Each of `sharded` is split over the workers of `group`, all of them and no others: each has seen the items of all.

    Raises:
        ArgumentValueError: one is not.
    """
    if units_holding(sharded):
        fix = "Give the parameters of fully_shard an optimizer of their own, or put all under fully_shard."
        found = "parameters of fully_shard, which averages their gradients by itself"
        raise explain(ArgumentValueError, "module", expected="sharded parameters with their whole gradients", found=found, fix=fix)
    workers = sorted(dist.get_process_group_ranks(group))
    for parameter in sharded:
        ranks = sorted(mesh_of(parameter).mesh.flatten().tolist())
        if ranks != workers:
            expected, found = f"sharded parameters over the ranks {workers} of the module", f"one over the ranks {ranks}"
            raise explain(ArgumentValueError, "module", expected=expected, found=found, fix="Give it an optimizer of its own.")


def require_same_options(options: Options, *groups: dist.ProcessGroup, **others: str) -> None:
    """All workers gave the same; collective. `groups` are the dimensions of their mesh, `others` further options.

    Raises:
        ArgumentValueError: on every worker, one gave others.
    """
    # Two workers' functions and scalers are different objects.
    steps = options.steps if is_known(options.steps) else "a function"
    everyone = [(dist.get_rank(), str(dict(options._asdict(), steps=steps, scaler=type(options.scaler), **others)))]
    for group in groups:
        gathered: list[list[tuple[int, str]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = sorted(itertools.chain(*gathered))
    for rank, other in everyone:
        if other != everyone[0][1]:
            expected, found = f"the same options on every worker: {everyone[0][1]}", f"{other} on rank {rank}"
            raise explain(ArgumentValueError, "options", expected=expected, found=found, fix="Give every worker the same options.")
