"""Finds the workers of an optimizer: those of the module that was given, those that hold parts of its parameters, or none."""

from __future__ import annotations

import torch

from gradaccum.kit import Options
from gradaccum_torch.torch_private import is_sharded
from gradaccum_torch.workers.module import group_of
from gradaccum_torch.workers.sharded import ShardGroup
from gradaccum_torch.workers.workers import Alone, Workers


def workers_of(optimizer: torch.optim.Optimizer, module: object, options: Options) -> Workers:
    """The workers that a window of `optimizer` is added up over.

    Args:
        optimizer: the optimizer that is wrapped.
        module: the ``module=`` of `gradaccum.wrap`, or None.
        options: the checked options.

    Raises:
        ArgumentTypeError, ArgumentValueError, UsageError: as `group_of`.
    """
    if module is not None:
        return group_of(module, optimizer, options)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    meshes = [parameter.device_mesh for parameter in parameters if is_sharded(parameter)]
    return ShardGroup(max(meshes, key=lambda mesh: mesh.size())) if meshes else Alone()
