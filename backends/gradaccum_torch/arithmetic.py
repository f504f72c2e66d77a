"""Arithmetic with gradients and their sums: dtypes, addition, division, casts, norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.kit import has_exact_inverse
from gradaccum_torch.torch_private.names import elements, is_sharded, local, mesh_of

HALF = (torch.float16, torch.bfloat16)
"""Gradients of these dtypes are summed in float32, unless ``accumulate_dtype`` is set.
"""
FAINT = 2.0**-31
"""If the computed norm of a float32 tensor is below this bound, the squares of the
tensor's elements may have underflowed.
"""
FAINT_HALF = 2.0**-13
"""If the norm of a float16 tensor, computed in float16, is below this bound, the
squares of the tensor's elements may have underflowed.
"""


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which autograd computes the parameter's gradient: the
    parameter's dtype, unless the user has set ``parameter.grad_dtype``.
    """
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def sum_dtype(parameter: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the parameter's gradients are summed. By default this
    is float32 for half-precision gradients, and the gradient's dtype otherwise. A
    complex gradient always keeps its dtype.
    """
    dtype = gradient_dtype(parameter)
    if dtype.is_complex:
        return dtype
    if accumulate_dtype is not None:
        return accumulate_dtype
    return torch.float32 if dtype in HALF else dtype


def add(total: Tensor, gradient: Tensor) -> Tensor:
    """Add `gradient` to `total`, in place if possible. Return the sum in the dtype of
    `total`.
    """
    gradient = gradient.detach()
    if not total.is_sparse or gradient.is_sparse:
        return total.add_(gradient)
    return gradient.to(total.dtype) + total


def divide(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide `tensors` in place, unless `divisor` is 1. The tensors must not require
    gradients.
    """
    if divisor == 1:
        return
    for group in groups_of(map(elements, tensors)):
        if has_exact_inverse(divisor):
            # 1 / divisor is exact, so multiplying by it gives the same bits as
            # dividing, in half the time.
            torch._foreach_mul_(group, scalar_for(group, 1 / divisor))
        else:
            torch._foreach_div_(group, scalar_for(group, divisor))


def scalar_for(group: Sequence[Tensor], number: float) -> Any:
    """Return `number`, converted into a tensor if that makes a ``torch._foreach`` call
    on `group` faster. The result of the call is the same, bit for bit.

    On a CPU, torch 2.13 converts a Python number into a tensor once for each tensor in
    the group, which takes longer than multiplying a small tensor. Therefore, this
    function converts the number only once. On other devices it returns the number
    unchanged, because a tensor would have to be copied to the device. The number is
    also unchanged if a tensor in the group has shape ``()``, because `number` as a
    tensor would make torch compute in float64.
    """
    if type(group[0]) is Tensor and all(
        tensor.is_cpu and tensor.ndim for tensor in group
    ):
        return torch.tensor(number, dtype=torch.float64, device="cpu")
    return number


@torch.no_grad()
def narrowed(gradient: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """Return `gradient` / `divisor` in `dtype`. The quotient is computed in the wider
    of the two dtypes.
    """
    wide_gradient = gradient.to(torch.promote_types(gradient.dtype, dtype))
    if divisor != 1:
        wide_gradient = wide_gradient / divisor
    return wide_gradient.to(dtype)


@torch.no_grad()
def fits(total: Tensor, divisor: float, dtype: torch.dtype) -> bool:
    """True if `total` / `divisor` is finite in `dtype`. This synchronizes with the
    device.
    """
    if not elements(total).numel():
        return True
    peak = elements(total).abs().max() / divisor
    return bool(torch.isfinite(peak.to(dtype)))


def measure(sums: Iterable[Tensor]) -> tuple[float, bool]:
    """Return the global norm of `sums`, and whether all elements of `sums` are finite.
    This synchronizes with the device.
    """
    tensors = [real_elements(total) for total in sums]
    norm = norm_of(tensors)
    is_float16 = torch.float16 in [tensor.dtype for tensor in tensors]
    faint = FAINT_HALF if is_float16 else FAINT
    if not faint <= norm < math.inf and tensors:
        # Compute the norm again in float64, because the squares of finite elements may
        # have overflowed or underflowed.
        norm = norm_of(map(doubled, tensors))
    return (norm, True) if norm < math.inf else (math.inf, False)


def doubled(tensor: Tensor) -> Tensor:
    """Return `tensor` in float64. A tensor on an MPS device is copied to the CPU,
    because MPS has no float64.
    """
    return (tensor.cpu() if tensor.is_mps else tensor).double()


def real_elements(tensor: Tensor) -> Tensor:
    numbers = elements(tensor)
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the global 2-norm of `tensors`. If a tensor is sharded over processes, its
    norm includes the shards of all processes.
    """
    norms: list[Tensor] = []
    for group in groups_of(tensors):
        group_norms = torch._foreach_norm(group)
        if is_sharded(group[0]):
            part: Any = torch.linalg.vector_norm(torch.stack(group_norms))
            norms.append(part.full_tensor())
        else:
            norms.extend(group_norms)
    if not norms:
        return 0.0
    device = norms[0].device
    if any(norm.device != device for norm in norms):
        norms = [norm.cpu() for norm in norms]
    return math.hypot(*torch.stack(norms).tolist())


def groups_of(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors that one ``torch._foreach`` call can process: one list of
    plain tensors, and one list of sharded tensors per mesh and placement.
    """
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        key: object = None
        if is_sharded(tensor):
            key = (mesh_of(tensor), getattr(tensor, "placements", ()))
        groups.setdefault(key, []).append(tensor)
    yield from groups.values()


def complete(gradient: Tensor) -> Tensor:
    """Return `gradient` with its partial sums added up: a sparse gradient is coalesced,
    and a `DTensor` with the placement ``Partial`` is reduced over the processes.
    """
    if not is_sharded(gradient):
        return gradient.coalesce() if gradient.is_sparse else gradient
    from torch.distributed.tensor import Replicate

    sharded_gradient: Any = gradient
    placements = [
        Replicate() if placement.is_partial() else placement
        for placement in sharded_gradient.placements
    ]
    if placements == list(sharded_gradient.placements):
        return gradient
    complete_gradient: Tensor = sharded_gradient.redistribute(placements=placements)
    return complete_gradient


@torch.no_grad()
def all_finite(gradients: Iterable[Tensor]) -> bool:
    """True if all `gradients` are finite. This synchronizes with the device."""
    return measure([complete(gradient) for gradient in gradients])[1]


def is_zero(tensor: Tensor) -> bool:
    """True if the part of `tensor` that this process stores contains only zeros. This
    synchronizes with the device.
    """
    return not local(elements(tensor)).any()
