"""Primitives over gradients: the norm and finite check of a window, its division, and adding one gradient to another.

They take plain lists of tensors, so that both places a sum can live in (``.grad`` or a buffer) use the same code. Only what returns
Python numbers waits for the device, and once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradaccum_torch.norm import are_alike, norms_in_few_calls, norms_of, side_by_side, together

BLOCK = 2**19
"""Elements per thread that a CPU adds at once where it copies them into another dtype first: the copy stays in its cache."""


def values(gradient: Tensor) -> Tensor:
    """The numbers of a gradient as a dense tensor that shares its memory; a sparse one must be coalesced."""
    return gradient._values() if gradient.is_sparse else gradient


def coalesced(gradient: Tensor) -> Tensor:
    """`gradient` with each row of a sparse one held once: the norm of rows held twice is not the norm of their sum."""
    return gradient.coalesce() if gradient.is_sparse else gradient


class Measured(NamedTuple):
    """What was measured of a window's sum."""

    norm: float
    """Its global 2-norm."""
    finite: bool
    """Whether every element is finite."""
    notes: list[float]
    """The values of the notes that were asked for beside it."""
    norms: list[Tensor]
    """Of one or several of the tensors each, shape ``()``."""


@torch.no_grad()
def measure(gradients: Sequence[Tensor], notes: Sequence[Tensor] = ()) -> Measured:
    """The global 2-norm, and whether every element is finite, with one wait for the device while the norm is finite.

    Large but finite elements, whose squares overflow, are finite: the norm is then taken of the elements divided by the largest.

    Args:
        gradients: the tensors, any shapes and dtypes.
        notes: scalars, shape ``()``, to be read in the same transfer.
    """
    tensors = list(map(values, gradients))
    norms = norms_in_few_calls(tensors)
    norm, *read = _fetch(norms, notes)
    if math.isfinite(norm):
        return Measured(norm, True, read, norms)
    peak = largest(tensors)
    if not math.isfinite(peak):
        return Measured(math.inf, False, read, norms)
    (scaled,) = _fetch([norm for tensor in tensors for norm in norms_of([tensor / peak])])
    return Measured(peak * scaled, True, read, norms)


@torch.no_grad()
def is_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether every element is finite."""
    return math.isfinite(largest(gradients))


@torch.no_grad()
def largest(gradients: Sequence[Tensor]) -> float:
    """The largest magnitude among all elements, NaN or inf if there is one; waits for the device once."""
    tensors = [tensor for gradient in gradients if (tensor := values(gradient)).numel()]
    if not tensors:
        return 0.0
    return float(side_by_side(norms_of(tensors, math.inf)).max())


@torch.no_grad()
def survives(gradient: Tensor, divisor: float, dtype: torch.dtype) -> bool:
    """Whether a finite `gradient` divided by `divisor` is finite in `dtype`; rounded on the way as `narrowed` does it."""
    if not values(gradient).numel():
        return True
    (peak,) = norms_of([values(gradient)], math.inf)
    return bool(torch.isfinite((peak / divisor).to(dtype)))


@torch.no_grad()
def narrowed(gradient: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """`gradient` / `divisor` in another dtype; divided in the wider of the two, in place where that is its own."""
    gradient = gradient.to(torch.promote_types(gradient.dtype, dtype))
    divide([gradient], divisor)
    return gradient.to(dtype)


@torch.no_grad()
def divide(gradients: Sequence[Tensor], divisor: float) -> None:
    """Divide in place; no pass over the gradients for a divisor of 1."""
    for tensors in together(list(map(values, gradients))) if divisor != 1 else ():
        # A CPU makes a tensor of a Python number for each tensor anew, which takes longer than dividing a small one.
        operand = torch.tensor(divisor, dtype=tensors[0].dtype, device="cpu") if are_alike(tensors) else divisor
        torch._foreach_div_(tensors, operand)


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply in place: undoes `divide`, up to rounding."""
    for tensors in together(list(map(values, gradients))) if factor != 1 else ():
        torch._foreach_mul_(tensors, factor)


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


def _add_in_blocks(held: Tensor, gradient: Tensor, elements: int) -> None:
    for total, part in zip(torch.split(held, elements), torch.split(gradient, elements), strict=True):
        total.add_(part)


def _fetch(norms: Sequence[Tensor], notes: Sequence[Tensor] = ()) -> list[float]:
    """The norm of all tensors from the norm of each, in float64, and then the notes, with one wait for the device."""
    scalars = [*norms, *notes]
    read: list[float] = [scalars[0].item()] if len(scalars) == 1 else side_by_side(scalars).tolist() if scalars else []
    return [math.hypot(*read[: len(norms)]), *read[len(norms) :]]


def same(norms: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether norms that were measured of the same tensors are equal; waits for the device."""
    return all(a.equal(b) for a, b in zip(norms, others, strict=True))
