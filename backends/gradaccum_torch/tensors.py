"""Gives lists of tensors to torch in as few calls as their kinds allow."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradaccum_torch.torch_private import elements

DTYPE, GRAD, IS_CPU, IS_SPARSE, REQUIRES_GRAD = map(attrgetter, ("dtype", "grad", "is_cpu", "is_sparse", "requires_grad"))
"""Attributes as functions: ``map(DTYPE, tensors)`` makes no Python call."""

_EXACT = (torch.float32, torch.float64)


def dense_parts(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The `elements` of each."""
    return list(map(elements, gradients)) if any(map(IS_SPARSE, gradients)) else list(gradients)


def coalesced(gradient: Tensor) -> Tensor:
    """`gradient` with each row of a sparse one held once: the norm of rows held twice is not the norm of their sum."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are on a CPU and have one dtype, float32 or float64, so that fewer calls give the same bits."""
    return (
        bool(tensors)
        and tensors[0].dtype in _EXACT
        and set(map(type, tensors)) == {Tensor}
        and len(set(map(DTYPE, tensors))) == 1
        and all(map(IS_CPU, tensors))
    )


def together(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """`tensors` in lists that torch takes in one call each: those of one process, and those split over the same processes."""
    if set(map(type, tensors)) == {Tensor}:
        return [list(tensors)]
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = None if type(tensor) is Tensor else (type(tensor), getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def side_by_side(scalars: Sequence[Tensor]) -> Tensor:
    """Scalars of all dtypes and devices as one vector on the first one's device, in float64 where the device has it."""
    first = scalars[0]
    if len({(scalar.dtype, scalar.device) for scalar in scalars}) > 1:
        dtype = torch.float32 if first.is_mps else torch.float64
        scalars = [scalar.to(device=first.device, dtype=dtype) for scalar in scalars]
    return torch.stack(list(scalars))
