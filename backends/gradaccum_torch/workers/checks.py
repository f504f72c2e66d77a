"""Checks of what several workers give: parameters, process groups, and the arguments of a call that they make together.

A check of one worker's own arguments raises on that worker; the others wait for it until the engine's timeout. Labels may differ between
workers, so the check of labels is part of the communication and raises on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_torch.fsdp_private import units_holding
from gradaccum_torch.torch_private import mesh_of, reduced_by

FIX = "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model)), or module=fully_shard(model)."
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def require_tensors(logits_shard: Any, labels: Any) -> None:
    """Refuse anything but floating logits ``(*batch, own classes)`` and integer labels ``(*batch)`` on the same device.

    Raises:
        ArgumentTypeError: one is no tensor, a sharded one, or of another kind of dtype.
        ArgumentValueError: their shapes or devices do not belong together.
    """
    for name, value in (("logits_shard", logits_shard), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise explain(ArgumentTypeError, name, expected="a torch.Tensor", got=value, fix=f"Pass {name} as a tensor.")
        if hasattr(value, "to_local"):
            found, fix = f"a {type(value).__name__}", f"Pass this worker's part: {name}.to_local()."
            raise explain(ArgumentTypeError, name, expected="a plain tensor", found=found, fix=fix)
    if not logits_shard.is_floating_point():
        fix = "Pass what the last layer gives, before any softmax."
        raise explain(ArgumentTypeError, "logits_shard", expected="a floating dtype", found=f"{logits_shard.dtype}", fix=fix)
    if labels.dtype not in _INTEGERS:
        fix = "Pass the number of each item's class. Probabilities of all classes are not supported."
        raise explain(ArgumentTypeError, "labels", expected="an integer dtype", found=f"{labels.dtype}", fix=fix)
    _require_shapes(logits_shard, labels)


def _require_shapes(logits_shard: Tensor, labels: Tensor) -> None:
    if logits_shard.ndim == 0 or labels.shape != logits_shard.shape[:-1]:
        expected = "shape (*batch) for logits of shape (*batch, own classes)"
        found = f"shape {tuple(labels.shape)} for logits of shape {tuple(logits_shard.shape)}"
        fix = "Put the classes last: logits_shard.movedim(1, -1). Every worker passes the labels of all items."
        raise explain(ArgumentValueError, "labels", expected=expected, found=found, fix=fix)
    if labels.device != logits_shard.device:
        fix = "Write labels.to(logits_shard.device)."
        raise explain(ArgumentValueError, "labels", expected=f"the device {logits_shard.device}", found=f"{labels.device}", fix=fix)


def require_parameters(module: torch.nn.Module, own: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Each of an optimizer's `parameters` is one of `module`, which are its `own`.

    Raises:
        ArgumentValueError: one is not.
    """
    known = set(map(id, own))
    strangers = sum(id(parameter) not in known for parameter in parameters)
    if strangers:
        expected, found = "the module whose parameters the optimizer has", f"a {type(module).__name__} without {strangers} of them"
        raise explain(ArgumentValueError, "module", expected=expected, found=found, fix=FIX)


def require_none_ignored(module: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
    """`module` was not told to ignore any of `parameters`, whose sums are then each worker's own, and so is their norm.

    Raises:
        ArgumentValueError: it was.
    """
    reduced = set(map(id, reduced_by(module)))
    ignored = sum(id(parameter) not in reduced for parameter in parameters)
    if ignored:
        expected, found = "a module that reduces the optimizer's parameters", f"one that was told to ignore {ignored} of them"
        fix = "Give them an optimizer of their own, or make each a part of a DTensor: DTensor.from_local(expert, mesh, [Shard(0)])."
        raise explain(ArgumentValueError, "module", expected=expected, found=found, fix=fix)


def require_same_workers(group: dist.ProcessGroup, sharded: Sequence[Tensor]) -> None:
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


def require_group(group: Any, argument: str = "group") -> tuple[int, int]:
    """The rank of this process in `group`, and the number of processes in it.

    Raises:
        ArgumentTypeError: `group` is no process group.
        UsageError: `torch.distributed` is not initialised, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        fix = "Call torch.distributed.init_process_group() first; leave the call or the argument out where there is one process."
        raise explain(UsageError, argument, expected="an initialised torch.distributed", found="none in this process", fix=fix)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        fix = "Call it only on the processes that hold classes."
        raise explain(UsageError, argument, expected="a group that this process is in", found="a group of other processes", fix=fix)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        fix = "Pass what torch.distributed.new_group or mesh.get_group() returned."
        raise explain(ArgumentTypeError, argument, expected="a torch.distributed.ProcessGroup or None", got=group, fix=fix)
    return dist.get_rank(group), dist.get_world_size(group)


def require_first_derivative() -> None:
    """Refuse a backward pass that is to be differentiated: `torch` would take its gradient for a constant, and say nothing.

    Raises:
        UsageError: autograd records the backward pass.
    """
    if torch.is_grad_enabled():
        fix = "Use torch.nn.functional.cross_entropy of the whole logits for a second derivative."
        raise explain(UsageError, "create_graph", expected="False under sharded_cross_entropy", found="True", fix=fix)


def label_error(differ: bool, classes: int) -> ArgumentValueError:
    """The error for labels that are not the same on every worker, or for one that is no class."""
    if differ:
        fix = "Gather the items of all workers first, features and labels alike."
        return explain(ArgumentValueError, "labels", expected="the same labels on every worker", found="labels that differ", fix=fix)
    expected, fix = f"classes in [0, {classes}) or ignore_index", "Number the classes over all workers, not within a shard."
    return explain(ArgumentValueError, "labels", expected=expected, found="another label", fix=fix)
