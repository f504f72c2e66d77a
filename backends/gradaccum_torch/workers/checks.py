"""Checks of what several workers pass to `gradaccum.wrap`: a module, a process group,
parameters, options.

A check of one worker's own arguments raises on that worker; the others wait for it
until the engine's timeout.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumWarning,
    UsageError,
    kit,
)
from gradaccum.kit import explain
from gradaccum_torch.torch_private import names
from gradaccum_torch.torch_private.fsdp import units_holding

FIX = (
    "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model)),"
    " or module=fully_shard(model)."
)
UNEQUAL_PARAMETERS = (
    "gradaccum: the workers of process_group= hold different parameters, and equal"
    " updates leave them different. Send the parameters of one worker to all, by"
    " torch.distributed.broadcast, or load one checkpoint on all, before the first"
    " step."
)
CLOSE = 1e-3


# The module, and the process group.


def require_group(group: Any, argument: str = "group") -> tuple[int, int]:
    """Raise unless this process is in the process group `group`; return its rank and
    the number of processes.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise explain(
            UsageError,
            argument,
            expected="an initialised torch.distributed",
            found="none in this process",
            fix="Call torch.distributed.init_process_group() first; leave the call or"
            " the argument out where there is one process.",
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise explain(
            UsageError,
            argument,
            expected="a group that this process is in",
            found="a group of other processes",
            fix="Call it only on the processes that hold classes.",
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise explain(
            ArgumentTypeError,
            argument,
            expected="a torch.distributed.ProcessGroup or None",
            got=group,
            fix="Pass what torch.distributed.new_group or mesh.get_group() returned.",
        )
    return dist.get_rank(group), dist.get_world_size(group)


def require_parallel(module: object) -> DistributedDataParallel:
    """Raise unless `module` is a `DistributedDataParallel`, or has one inside as Fabric's
    does; return it.
    """
    inner_modules: list[DistributedDataParallel] = []
    if isinstance(module, torch.nn.Module):
        inner_modules = [
            each
            for each in module.modules()
            if isinstance(each, DistributedDataParallel)
        ]
    if isinstance(module, torch.nn.Module) and len(inner_modules) == 1:
        count = len(list(inner_modules[0].parameters()))
        if len(list(module.parameters())) == count:
            module = inner_modules[0]
    if not isinstance(module, DistributedDataParallel):
        raise explain(
            ArgumentTypeError,
            "module",
            expected="a DistributedDataParallel or fully_shard module",
            found=f"an object of type {type(module).__name__}",
            fix=FIX,
        )
    if any(map(names.is_sharded, names.reduced_by(module))):
        raise explain(
            ArgumentTypeError,
            "module",
            expected="a module whose parameters are whole",
            found="sharded parameters",
            fix="Leave module= out: their gradients are reduced in each backward pass.",
        )
    if names.were_sharded(module.parameters()):
        raise explain(
            ArgumentValueError,
            "module",
            expected="a module whose parameters are whole",
            found="parts of tensor-parallel parameters, of which norm and overflow"
            " would be this part's own",
            fix="Give the model fully_shard on a mesh of two dimensions in the place of"
            " DistributedDataParallel.",
        )
    if names.has_comm_hook(module):
        raise comm_hook_error()
    return module


def comm_hook_error() -> UsageError:
    return explain(
        UsageError,
        "module",
        expected="a module without a communication hook",
        found="a registered hook, which would never be called",
        fix="Leave register_comm_hook out: the window's sum is reduced by all_reduce.",
    )


def require_no_join(module: DistributedDataParallel) -> None:
    """Raise unless the loop runs outside of ``module.join()``."""
    if names.is_in_join(module):
        raise explain(
            UsageError,
            "join",
            expected="a loop without DistributedDataParallel.join()",
            found="one under it",
            fix="Leave join() out, and write gradaccum.wrap(optimizer, ...,"
            " module=parallel): opt.flush() takes part in the others' windows.",
        )


# A module that waits with its own reduction leaves the gradients of other optimizers
# unreduced.


SHARED_BY: WeakKeyDictionary[
    torch.optim.Optimizer, weakref.ref[DistributedDataParallel]
] = WeakKeyDictionary()
"""The module whose gradients are reduced for an optimizer, at its windows' ends."""
CHECKED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers that have no parameter of a module which waits for another one."""
GUARD: list[RemovableHandle] = []


def share_module(
    optimizer: torch.optim.Optimizer, module: DistributedDataParallel
) -> None:
    """Note that `optimizer` has the gradients of `module` reduced, and refuse steps of
    optimizers whose gradients the module no longer reduces.
    """
    SHARED_BY[optimizer] = weakref.ref(module)
    CHECKED.clear()
    if not GUARD:
        GUARD.append(register_optimizer_step_pre_hook(refuse_unreduced))


def refuse_unreduced(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if optimizer not in CHECKED:
        require_reduced(optimizer)
        CHECKED.add(optimizer)


names.untraced(refuse_unreduced)


def require_reduced(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the gradients of its parameters are reduced, where a module that
    trains them waits with its own reduction.
    """
    waiting = [each.parameters() for each in names.waiting_modules()]
    unreduced = ids_of(optimizer) & set(map(id, chain(*waiting)))
    for other, reference in SHARED_BY.items():
        if reference() is not None:
            unreduced -= ids_of(other)
    if unreduced:
        kind = type(optimizer).__name__
        raise explain(
            UsageError,
            "module",
            expected="module= for each optimizer of one DistributedDataParallel",
            found=f"{kind} without it, for {len(unreduced)} of the parameters",
            fix=f"Write gradaccum.wrap({kind}(...), steps=..., module=parallel).",
        )


def ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for parameter in names.parameters_of(optimizer)}


# The parameters.


def require_parameters(
    module: torch.nn.Module,
    module_parameters: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> None:
    known = set(map(id, module_parameters))
    strangers = sum(id(parameter) not in known for parameter in parameters)
    if strangers:
        raise explain(
            ArgumentValueError,
            "module",
            expected="the module whose parameters the optimizer has",
            found=f"a {type(module).__name__} without {strangers} of them",
            fix=FIX,
        )


def require_none_ignored(
    module: DistributedDataParallel, parameters: Sequence[Tensor]
) -> None:
    reduced = set(map(id, names.reduced_by(module)))
    ignored = sum(id(parameter) not in reduced for parameter in parameters)
    if ignored:
        raise explain(
            ArgumentValueError,
            "module",
            expected="a module that reduces the optimizer's parameters",
            found=f"one that was told to ignore {ignored} of them",
            fix="Give them an optimizer of their own, or make each a part of a DTensor:"
            " DTensor.from_local(expert, mesh, [Shard(0)]).",
        )


def require_same_workers(group: dist.ProcessGroup, sharded: Sequence[Tensor]) -> None:
    """Raise unless each of `sharded` is split over exactly the workers of `group`."""
    if units_holding(sharded):
        raise explain(
            ArgumentValueError,
            "module",
            expected="sharded parameters with their whole gradients",
            found="parameters of fully_shard, which averages their gradients by itself",
            fix="Give the parameters of fully_shard an optimizer of their own, or put"
            " all under fully_shard.",
        )
    workers = sorted(dist.get_process_group_ranks(group))
    for parameter in sharded:
        ranks = sorted(names.mesh_of(parameter).mesh.flatten().tolist())
        if ranks != workers:
            raise explain(
                ArgumentValueError,
                "module",
                expected=f"sharded parameters over the ranks {workers} of the module",
                found=f"one over the ranks {ranks}",
                fix="Give it an optimizer of its own.",
            )


def describe_parameters(
    optimizer: torch.optim.Optimizer,
    module: DistributedDataParallel | None,
    with_settings: bool = False,
) -> list[str]:
    """Return a line for each parameter: its name, as far as there is one, its shape,
    its dtype, and the settings of its group beside the learning rate.
    """
    named = () if module is None else module.named_parameters()
    names_by_id = {id(parameter): name for name, parameter in named}
    lines: list[str] = []
    for group in optimizer.param_groups:
        settings = {
            name: value
            for name, value in group.items()
            if with_settings
            and name != "lr"
            and isinstance(value, bool | int | float | tuple)
        }
        given_names = group.get("param_names", [""] * len(group["params"]))
        for parameter, given_name in zip(group["params"], given_names, strict=True):
            name = names_by_id.get(id(parameter), given_name)
            shape = tuple(parameter.shape)
            lines.append(f"{name} {shape} {parameter.dtype} {settings}")
    return lines


def require_same_parameters(
    optimizer: torch.optim.Optimizer,
    module: DistributedDataParallel | None,
    group: dist.ProcessGroup,
) -> None:
    """Raise unless all workers have the same parameters in one order, and the same
    settings for them; collective.
    """
    lines = describe_parameters(optimizer, module, with_settings=True)
    gathered: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(gathered, lines, group=group)
    for rank, other in enumerate(gathered):
        if other != gathered[0]:
            raise _order_error(gathered[0], other, rank)


def _order_error(
    first: Sequence[str], other: Sequence[str], rank: int
) -> ArgumentValueError:
    longest = max(len(first), len(other))
    lines = [*first, *["nothing"] * (longest - len(first))]
    others = [*other, *["nothing"] * (longest - len(other))]
    index = next(index for index in range(longest) if lines[index] != others[index])
    return explain(
        ArgumentValueError,
        "optimizer",
        expected="the same parameters in the same order on every worker",
        found=f"parameter {index}: {lines[index]} on rank 0, {others[index]} on rank"
        f" {rank}",
        fix="Build its groups from lists; a set has another order in each process.",
    )


@torch.no_grad()
def warn_of_unequal_parameters(
    optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """Warn unless the parameters are equal on all workers, as far as their sums tell;
    collective.
    """
    totals = [
        parameter.detach().double().sum()
        for parameter in names.parameters_of(optimizer)
        if not names.is_sharded(parameter) and not parameter.is_complex()
    ]
    if not totals:
        return
    total = torch.stack(totals)
    bounds = torch.cat([total, -total])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    most, minus_least = bounds.chunk(2)
    room = CLOSE * most.abs().clamp(min=CLOSE)
    if (most + minus_least > room).any():
        warnings.warn(UNEQUAL_PARAMETERS, GradAccumWarning, stacklevel=6)


# The options.


def require_same_options(
    options: kit.Options, *groups: dist.ProcessGroup, **others: str
) -> None:
    """Raise unless all workers gave the same options; collective, and on every
    worker.
    """
    # Two workers' functions and scalers are different objects.
    steps = options.steps if kit.is_known(options.steps) else "a function"
    scaler = type(options.scaler)
    given = dict(options._asdict(), steps=steps, scaler=scaler, **others)
    everyone = [(dist.get_rank(), str(given))]
    for group in groups:
        gathered: list[list[tuple[int, str]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = sorted(chain(*gathered))
    for rank, other in everyone:
        if other != everyone[0][1]:
            raise explain(
                ArgumentValueError,
                "options",
                expected=f"the same options on every worker: {everyone[0][1]}",
                found=f"{other} on rank {rank}",
                fix="Give every worker the same options.",
            )


# Gradients that cannot be added up.


def sparse_error() -> UsageError:
    return explain(
        UsageError,
        ".grad",
        expected="dense gradients beside module= and process_group=",
        found="a sparse one on some worker",
        fix="Build the layer with dense gradients: torch.nn.Embedding(...,"
        " sparse=False).",
    )


def discarded_error() -> UsageError:
    return explain(
        UsageError,
        "the end of a window",
        expected="every worker to end the window whose sums are being added up",
        found="a worker that called discard() after its last backward pass had begun",
        fix="Call opt.discard() on every worker. To leave out a micro-batch of one"
        " worker, give its loss with weight=0.",
    )


def unequal_copies_error() -> UsageError:
    return explain(
        UsageError,
        "grad_placements",
        expected="equal gradients on the workers that hold copies of a shard",
        found="norms that differ",
        fix="Write weight.to_local(grad_placements=[Partial(), ...]), which adds up"
        " gradients of different items. The window cannot be closed: call"
        " opt.discard() on every worker.",
    )


COLLECTIVES = {
    f"{name}Backward"
    for name in (
        "Redistribute",
        "_AllGather",
        "_AllGatherBase",
        "_AllReduce",
        "_AlltoAll",
        "_AlltoAllSingle",
        "_Reduce_Scatter",
    )
}
"""The nodes of autograd's graph that `torch.distributed.tensor` and
`torch.distributed.nn` make.
"""


def require_no_collective(loss: Tensor) -> None:
    """Raise unless the backward pass of `loss`, of weight 0, has no collective, in
    which other workers would wait for this one.
    """
    nodes = [loss.grad_fn]
    seen = set[object]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        if node.name() in COLLECTIVES:
            raise explain(
                UsageError,
                "weight",
                expected="items, where other workers may wait for the backward pass",
                found=f"0 for a loss with a {node.name()}",
                fix='Write reduction="sum_per_item", opt.weigh(0) and loss.backward():'
                " the other workers need the gradients of its keys.",
            )
