"""Gives lists of tensors to torch in as few calls as their kinds allow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
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


_AS_IT_IS = nullcontext()


def without_graph(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Inside, what is computed from `tensors` alone has no graph. Most gradients have none, and then nothing is switched."""
    return torch.no_grad() if any(map(REQUIRES_GRAD, tensors)) else _AS_IT_IS


@lru_cache(maxsize=8)
def operand(number: float, dtype: torch.dtype) -> Tensor:
    """`number` on the CPU, shape ``()``, to compute with and never to write into.

    It is kept: most windows have the divisor of the one before, and making a tensor takes longer than dividing a small one.
    """
    return torch.tensor(number, dtype=dtype, device="cpu")


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
