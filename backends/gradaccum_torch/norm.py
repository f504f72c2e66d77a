"""2-norms of many tensors in few calls.

On a CPU one more call takes as long as the norm of a thousand numbers, so small tensors are copied side by side and have one norm
together. An accelerator has a kernel for many tensors, which is left to do it. Of tensors that are split over processes each process
has a part: their norms are reduced over the processes first, so that every element counts once and all processes decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

SMALL = 4096
"""Elements up to which a CPU copies a tensor in less time than one more call takes."""
FEW = 4
"""Up to so many small tensors the copy is one call too many."""


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are on a CPU and have one dtype, float32 or float64, so that calls can be saved and no rounding is another."""
    dtype = tensors[0].dtype if tensors else None
    return dtype in (torch.float32, torch.float64) and all(
        type(tensor) is Tensor and tensor.dtype is dtype and tensor.is_cpu for tensor in tensors
    )


def together(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """`tensors` in lists that torch takes in one call each: those of one process, and those split over the same processes."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = None if type(tensor) is Tensor else (type(tensor), getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Norms of shape ``()`` whose norm is that of all `tensors`: one for each tensor, or one for all that are split the same way."""
    norms = []
    for group in together(tensors):
        of_each: list[Tensor] = list(torch._foreach_norm(group, order))
        norms += [_whole(of_each, order)] if hasattr(group[0], "full_tensor") else of_each
    return norms


def norms_in_few_calls(tensors: list[Tensor]) -> list[Tensor]:
    """`norms_of` dense tensors of any shapes, dtypes and devices, with one for many small ones together."""
    small = [tensor for tensor in tensors if tensor.numel() <= SMALL]
    if len(small) <= FEW or not are_alike(tensors):
        return norms_of(tensors)
    copy = _flatten_dense_tensors(small)  # type: ignore[no-untyped-call]
    return [*norms_of([tensor for tensor in tensors if tensor.numel() > SMALL]), torch.linalg.vector_norm(copy)]


def side_by_side(scalars: Sequence[Tensor]) -> Tensor:
    """Scalars of all dtypes and devices as one vector on the first one's device, in float64 where the device has it."""
    first = scalars[0]
    if any(scalar.dtype is not first.dtype or scalar.device != first.device for scalar in scalars):
        dtype = torch.float32 if first.is_mps else torch.float64
        scalars = [scalar.to(device=first.device, dtype=dtype) for scalar in scalars]
    return torch.stack(list(scalars))


def _whole(norms: list[Tensor], order: float) -> Tensor:
    """The norm of tensors that are split over processes, from the norm of each, with one reduction."""
    total: Any = torch.linalg.vector_norm(torch.stack(norms), order)
    whole: Tensor = total.full_tensor()
    return whole
