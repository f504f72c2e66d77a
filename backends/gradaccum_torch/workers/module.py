"""The module that several workers train together: checked, and its own reduction left out.

`torch.nn.parallel.DistributedDataParallel` averages gradients in every backward pass unless it is told to wait. Here the window's sum is
reduced instead, so it waits for good. It still sends the model when it is built, and buffers with the first forward pass after an update.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Options, explain
from gradaccum_torch.torch_private import is_sharded, leave_reduction_out, registered_comm_hooks
from gradaccum_torch.workers.group import WorkerGroup

_FIX = "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model))."


def group_of(module: object, optimizer: torch.optim.Optimizer, options: Options) -> WorkerGroup:
    """The workers that train `module` together. Collective: every worker of its process group calls this.

    Raises:
        ArgumentTypeError: `module` is no `torch.nn.parallel.DistributedDataParallel`, or its parameters are sharded.
        ArgumentValueError: it has other parameters than `optimizer`; or other workers have other options.
        UsageError: it has a communication hook, which would never be called.
    """
    parallel = _require_parallel(module)
    _require_parameters(parallel, optimizer)
    if registered_comm_hooks(parallel):
        fix = "Leave register_comm_hook out: the window's sum is reduced by all_reduce."
        found = "a registered hook, which would never be called"
        raise explain(UsageError, "module", expected="a module without a communication hook", found=found, fix=fix)
    _require_same_options(options, parallel.process_group)
    leave_reduction_out(parallel)
    return WorkerGroup(parallel.process_group, parallel)


def _require_parallel(module: object) -> DistributedDataParallel:
    if not isinstance(module, DistributedDataParallel):
        found = f"an object of type {type(module).__name__}"
        raise explain(ArgumentTypeError, "module", expected="a torch.nn.parallel.DistributedDataParallel", found=found, fix=_FIX)
    if any(map(is_sharded, module.parameters())):
        fix = "Leave module= out: their gradients are reduced in each backward pass."
        raise explain(ArgumentTypeError, "module", expected="a module whose parameters are whole", found="sharded parameters", fix=fix)
    return module


def _require_parameters(module: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    own = set(map(id, module.parameters()))
    strangers = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        expected, found = "the module whose parameters the optimizer has", f"a module without {strangers} of them"
        raise explain(ArgumentValueError, "module", expected=expected, found=found, fix=_FIX)


def _require_same_options(options: Options, group: dist.ProcessGroup) -> None:
    # Two workers' functions and scalers are different objects.
    steps = "a function" if callable(options.steps) else options.steps
    mine = str(dict(options._asdict(), steps=steps, scaler=type(options.scaler)))
    everyone: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            expected, found = f"the same options on every worker: {everyone[0]}", f"{other} on rank {rank}"
            raise explain(ArgumentValueError, "options", expected=expected, found=found, fix="Give every worker the same options.")
