"""The module that several workers train together: checked, and its own reduction left out.

`torch.nn.parallel.DistributedDataParallel` averages gradients in every backward pass unless it is told to wait. Here the window's sum is
reduced instead, so it waits for good. It still sends the model when it is built. Its buffers are sent at the end of a window, where all
workers meet.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Options, explain, is_known
from gradaccum_torch.torch_private import is_sharded, leave_reduction_out, reduced_by, registered_comm_hooks, send_buffers, were_sharded
from gradaccum_torch.workers.checks import FIX, require_group
from gradaccum_torch.workers.group import WorkerGroup


def group_of(module: object, optimizer: torch.optim.Optimizer, options: Options) -> WorkerGroup:
    """The workers that train `module` together. Collective: every worker of its process group calls this.

    Raises:
        ArgumentTypeError: `module` is no `torch.nn.parallel.DistributedDataParallel`, or its parameters are sharded.
        ArgumentValueError: `optimizer` has other whole parameters, or ones that `module` ignores, or parameters that are sharded over other
            workers; or other workers have other options.
        UsageError: it has a communication hook, which would never be called.
    """
    parallel = _require_parallel(module)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    workers = WorkerGroup(parallel.process_group, optimizer, parallel)
    workers.require_parameters(parameters)
    if registered_comm_hooks(parallel):
        raise comm_hook_error()
    require_same_options(options, parallel.process_group)
    leave_reduction_out(parallel, comm_hook_error)
    send_buffers(parallel)
    return workers


def group_alone(group: object, optimizer: torch.optim.Optimizer, options: Options) -> WorkerGroup:
    """The workers of a process group whose copies of a model no module keeps alike. Collective, as `group_of`.

    Raises:
        ArgumentTypeError: `group` is no process group.
        ArgumentValueError: as `group_of`; or other workers have other parameters.
        UsageError: `torch.distributed` is not initialised, or this process is not in the group.
    """
    require_group(group, "process_group")
    assert isinstance(group, dist.ProcessGroup)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    workers = WorkerGroup(group, optimizer)
    workers.require_parameters(parameters)
    require_same_options(options, group, parameters=f"{len(parameters)} of {sum(map(Tensor.numel, parameters))} elements")
    return workers


def comm_hook_error() -> UsageError:
    """The error for a communication hook, registered before `gradaccum.wrap` or after it."""
    fix = "Leave register_comm_hook out: the window's sum is reduced by all_reduce."
    found = "a registered hook, which would never be called"
    return explain(UsageError, "module", expected="a module without a communication hook", found=found, fix=fix)


def _require_parallel(module: object) -> DistributedDataParallel:
    if not isinstance(module, DistributedDataParallel):
        found = f"an object of type {type(module).__name__}"
        raise explain(ArgumentTypeError, "module", expected="a DistributedDataParallel or fully_shard module", found=found, fix=FIX)
    if any(map(is_sharded, reduced_by(module))):
        fix = "Leave module= out: their gradients are reduced in each backward pass."
        raise explain(ArgumentTypeError, "module", expected="a module whose parameters are whole", found="sharded parameters", fix=fix)
    if were_sharded(module.parameters()):
        found = "parts of tensor-parallel parameters, of which norm and overflow would be this part's own"
        fix = "Give the model fully_shard on a mesh of two dimensions in the place of DistributedDataParallel."
        raise explain(ArgumentValueError, "module", expected="a module whose parameters are whole", found=found, fix=fix)
    return module


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
