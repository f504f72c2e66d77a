"""The sum of a window and its arithmetic: its dtype, adding one gradient to another, dividing, and casting to a narrower dtype.

These functions take plain tensors, so that both places a sum can live in (``.grad`` or a buffer) use the same code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradaccum.kit import has_exact_inverse
from gradaccum_torch.norm import norms_of
from gradaccum_torch.tensors import are_alike, dense_parts, operand, together, without_graph
from gradaccum_torch.torch_private import elements, foreach_div_, foreach_mul_

HALF = (torch.float16, torch.bfloat16)
"""The dtypes that are summed in float32 unless the user says otherwise."""

BLOCK = 2**19
"""Elements per thread that a CPU adds at once where it copies them into another dtype first: the copy stays in its cache."""


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that autograd gives its gradient: its own, unless the user has set ``parameter.grad_dtype``."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def sum_dtype(parameter: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the sum: float32 for float16 and bfloat16 unless given, else the gradient's own; complex stays as it is."""
    own = gradient_dtype(parameter)
    if own.is_complex:
        return own
    if accumulate_dtype is not None:
        return accumulate_dtype
    return torch.float32 if own in HALF else own


@torch.no_grad()
def fits(gradient: Tensor, divisor: float, dtype: torch.dtype) -> bool:
    """Whether a finite `gradient` divided by `divisor` is finite in `dtype`; it is rounded on the way as `narrowed` does it."""
    if not elements(gradient).numel():
        return True
    (peak,) = norms_of([elements(gradient)], math.inf)
    return bool(torch.isfinite((peak / divisor).to(dtype)))


@torch.no_grad()
def narrowed(gradient: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """`gradient` / `divisor` in another dtype; divided in the wider of the two, in place where that is its own."""
    gradient = gradient.to(torch.promote_types(gradient.dtype, dtype))
    divide([gradient], divisor)
    return gradient.to(dtype)


def divide(gradients: Sequence[Tensor], divisor: float) -> None:
    """Divide in place; no pass over the gradients for a divisor of 1."""
    if divisor == 1:
        return
    with without_graph(gradients):
        for tensors in together(dense_parts(gradients)):
            # For a Python number a CPU makes one tensor per gradient, which takes longer than dividing a small one.
            if not are_alike(tensors):
                foreach_div_(tensors, divisor)
            elif has_exact_inverse(divisor):  # The same bits in half the time.
                foreach_mul_(tensors, operand(1 / divisor, tensors[0].dtype))
            else:
                foreach_div_(tensors, operand(divisor, tensors[0].dtype))


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply in place: undoes `divide`, up to rounding."""
    for tensors in together(dense_parts(gradients)) if factor != 1 else ():
        foreach_mul_(tensors, factor)


def add(held: Tensor, gradient: Tensor) -> Tensor:
    """`held` plus `gradient` in the dtype of `held`, in place where it can be."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if held.is_sparse:
        return held.add_(gradient) if gradient.is_sparse else gradient.to(held.dtype) + held
    if gradient.numel() > 2 * BLOCK and _is_copied_first(held, gradient):
        _add_in_blocks(held.view(-1), gradient.view(-1), BLOCK * torch.get_num_threads())
        return held
    return held.add_(gradient)


def _is_copied_first(held: Tensor, gradient: Tensor) -> bool:
    """Whether the addition copies a `gradient` that has blocks into the dtype of `held` first, as only a CPU does."""
    of_two_dtypes = type(held) is Tensor and held.is_cpu and gradient.dtype is not held.dtype
    return of_two_dtypes and not gradient.is_sparse and held.is_contiguous() and gradient.is_contiguous()


def _add_in_blocks(held: Tensor, gradient: Tensor, size: int) -> None:
    for total, part in zip(torch.split(held, size), torch.split(gradient, size), strict=True):
        total.add_(part)
