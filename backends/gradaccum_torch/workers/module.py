"""The module that several workers train together: checked, and its own reduction left out.

`torch.nn.parallel.DistributedDataParallel` averages gradients in every backward pass unless it is told to wait, and then over what ``.grad``
holds. Here the window's sum is reduced instead, so DDP is told to wait for good; it still broadcasts the model when it is built, and the
buffers with the first forward pass after each update.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Options, explain
from gradaccum_torch.workers.joining import Workers


def workers_of(module: object, optimizer: torch.optim.Optimizer, options: Options) -> Workers:
    """The workers that train `module` together. Collective: every worker of its process group calls this.

    Raises:
        ArgumentTypeError: `module` is no `torch.nn.parallel.DistributedDataParallel`.
        ArgumentValueError: it has other parameters than `optimizer`; or other workers have other options.
        UsageError: it has a communication hook, which would never be called.
    """
    fix = "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model))."
    if not isinstance(module, DistributedDataParallel):
        expected = "a torch.nn.parallel.DistributedDataParallel"
        raise explain(ArgumentTypeError, "module", expected=expected, found=f"an object of type {type(module).__name__}", fix=fix)
    own = set(map(id, module.parameters()))
    strangers = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        expected, found = "the module whose parameters the optimizer has", f"a module without {strangers} of them"
        raise explain(ArgumentValueError, "module", expected=expected, found=found, fix=fix)
    if module._comm_hooks:
        expected, fix = (
            "a module without a communication hook, as the window's sum is reduced in its place",
            "Leave register_comm_hook out.",
        )
        raise explain(UsageError, "module", expected=expected, found="a registered hook, which would never be called", fix=fix)
    group = module.process_group
    _require_same_options(options, group)
    _leave_reduction_out(module)
    return Workers(group, module)


def _leave_reduction_out(module: DistributedDataParallel) -> None:
    module.require_backward_grad_sync = False
    # With static_graph=True the first backward pass would enqueue the reduction whatever the flag above says.
    module._static_graph_delay_allreduce_enqueued = True


def _require_same_options(options: Options, group: dist.ProcessGroup) -> None:
    mine = str(options._replace(steps="callable" if callable(options.steps) else options.steps, scaler=type(options.scaler)))
    everyone: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            expected, found = f"the same options on every worker: {everyone[0]}", f"{other} on rank {rank}"
            raise explain(ArgumentValueError, "options", expected=expected, found=found, fix="Give every worker the same options.")
