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


def group_of(module: object, optimizer: torch.optim.Optimizer, options: Options) -> WorkerGroup:
    """The workers that train `module` together. Collective: every worker of its process group calls this.

    Raises:
        ArgumentTypeError: `module` is no `torch.nn.parallel.DistributedDataParallel`, or its parameters are sharded.
        ArgumentValueError: it has other parameters than `optimizer`; or other workers have other options.
        UsageError: it has a communication hook, which would never be called.
    """
    fix = "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model))."
    if not isinstance(module, DistributedDataParallel):
        expected = "a torch.nn.parallel.DistributedDataParallel"
        raise explain(ArgumentTypeError, "module", expected=expected, found=f"an object of type {type(module).__name__}", fix=fix)
    if any(map(is_sharded, module.parameters())):
        expected, fix = "a module whose parameters are whole", "Leave module= out: their gradients are reduced in each backward pass."
        raise explain(ArgumentTypeError, "module", expected=expected, found="sharded parameters", fix=fix)
    own = set(map(id, module.parameters()))
    strangers = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        expected, found = "the module whose parameters the optimizer has", f"a module without {strangers} of them"
        raise explain(ArgumentValueError, "module", expected=expected, found=found, fix=fix)
    if registered_comm_hooks(module):
        expected, fix = (
            "a module without a communication hook, as the window's sum is reduced in its place",
            "Leave register_comm_hook out.",
        )
        raise explain(UsageError, "module", expected=expected, found="a registered hook, which would never be called", fix=fix)
    group = module.process_group
    _require_same_options(options, group)
    leave_reduction_out(module)
    return WorkerGroup(group, module)


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
