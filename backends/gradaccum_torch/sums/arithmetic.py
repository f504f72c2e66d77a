"""The arithmetic of a window's sum, in ``.grad`` or in buffers: its dtype, adding,
dividing, casting and its norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum.kit import has_exact_inverse
from gradaccum_torch.private.names import (
    elements,
    flattened,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    is_sharded,
    local,
    mesh_of,
    version,
)

HALF = (torch.float16, torch.bfloat16)
"""The dtypes that are summed in float32 unless the user says otherwise."""

BLOCK = 2**19
"""Elements per thread that a CPU adds at once where it copies them into another dtype
first: the copy stays in its cache.
"""


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of autograd's gradient: the parameter's, unless the user has set
    ``parameter.grad_dtype``.
    """
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def sum_dtype(parameter: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the sum: by default float32 for half precision, else the
    gradient's own; complex stays.
    """
    own = gradient_dtype(parameter)
    if own.is_complex:
        return own
    if accumulate_dtype is not None:
        return accumulate_dtype
    return torch.float32 if own in HALF else own


@torch.no_grad()
def fits(gradient: Tensor, divisor: float, dtype: torch.dtype) -> bool:
    if not elements(gradient).numel():
        return True
    (peak,) = norms_of([elements(gradient)], math.inf)
    return bool(torch.isfinite((peak / divisor).to(dtype)))


@torch.no_grad()
def narrowed(gradient: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """Return `gradient` / `divisor` in another dtype, divided in the wider one, in
    place where that is its own.
    """
    gradient = gradient.to(torch.promote_types(gradient.dtype, dtype))
    divide([gradient], divisor)
    return gradient.to(dtype)


def divide(gradients: Sequence[Tensor], divisor: float) -> None:
    """Divide in place, unless `divisor` is 1."""
    if divisor == 1:
        return
    # For a Python number a CPU makes one tensor per gradient, which takes longer than
    # dividing a small one.
    if not are_alike(gradients):
        with without_graph(gradients):
            for tensors in together(dense_parts(gradients)):
                foreach_div_(tensors, divisor)
    elif has_exact_inverse(divisor):  # The same bits in half the time.
        foreach_mul_(gradients, operand(1 / divisor, gradients[0].dtype))
    else:
        foreach_div_(gradients, operand(divisor, gradients[0].dtype))


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: float) -> None:
    for tensors in together(dense_parts(gradients)) if factor != 1 else ():
        foreach_mul_(tensors, factor)


def add(held: Tensor, gradient: Tensor) -> Tensor:
    """Return `held` plus `gradient` in the dtype of `held`, in place where it can
    be.
    """
    if gradient.requires_grad:
        gradient = gradient.detach()
    if held.is_sparse:
        return (
            held.add_(gradient)
            if gradient.is_sparse
            else gradient.to(held.dtype) + held
        )
    if gradient.numel() > 2 * BLOCK and _is_copied_first(held, gradient):
        size = BLOCK * torch.get_num_threads()
        for total, part in zip(
            torch.split(held.view(-1), size),
            torch.split(gradient.view(-1), size),
            strict=True,
        ):
            total.add_(part)
        return held
    return held.add_(gradient)


def _is_copied_first(held: Tensor, gradient: Tensor) -> bool:
    of_two_dtypes = (
        type(held) is Tensor and held.is_cpu and gradient.dtype is not held.dtype
    )
    return (
        of_two_dtypes
        and not gradient.is_sparse
        and held.is_contiguous()
        and gradient.is_contiguous()
    )


# The global 2-norm of a window's sum, which is also its finite check: many tensors in
# few calls, and one wait for the device.
#
# On a CPU one more call takes as long as the norm of a thousand numbers, so small
# tensors are copied side by side and have one norm together. An accelerator has one
# kernel for many tensors. Of a tensor that is split over processes each process has a
# part: the processes reduce the norms first, so that every element counts once and all
# processes decide alike.


SMALL = 4096
"""Elements up to which a CPU copies a tensor in less time than one more call takes."""
FAINT, FAINT_HALF = 2.0**-31, 2.0**-13
"""Smaller norms are measured again. Squares below 2^-126 may vanish, so that 2^40
elements lose a 2^-24th of a square of 2^-62 at most. The second is for tensors whose
norm is a float16, which has few bits below 2^-14.
"""
FEW = 4
"""Up to so many small tensors the copy is one call too many."""


NORM_BLOCK = 2**18
"""Elements of one tensor whose norm is taken alone: torch adds the squares of a longer
one up in float32, with errors that grow.
"""


class Measured(NamedTuple):
    """The measurements of a window's sum."""

    norm: float
    """Its global 2-norm."""
    finite: bool
    """Whether every element is finite."""
    notes: list[float]
    """The values of the notes that were asked for beside it."""


UNMEASURED = Measured(math.nan, True, [])
"""For a window whose end needs no norm: ``on_overflow="ignore"``."""


def measure(gradients: Sequence[Tensor], notes: Sequence[Tensor] = ()) -> Measured:
    """Return the global 2-norm, and whether every element is finite, with one wait for
    the device while the norm is finite.

    Where squares overflow or vanish, the norm is taken of the elements scaled by the
    largest.
    """
    if are_alike(gradients):
        return _measured(gradients, norms_in_few_calls(gradients), notes)
    with without_graph(gradients):
        tensors = dense_parts(gradients)
        return _measured(tensors, norms_of(tensors), notes)


def _measured(
    tensors: Sequence[Tensor], norms: Sequence[Tensor], notes: Sequence[Tensor]
) -> Measured:
    norm, *read = _fetch(norms, notes)
    if FAINT_HALF <= norm < math.inf or (
        FAINT <= norm < math.inf and torch.float16 not in map(DTYPE, norms)
    ):
        return Measured(norm, True, read)
    peak = largest(tensors)
    return (
        Measured(_scaled_norm(tensors, peak), True, read)
        if math.isfinite(peak)
        else Measured(math.inf, False, read)
    )


@torch.no_grad()
def largest(gradients: Sequence[Tensor]) -> float:
    """Return the largest magnitude, NaN or inf if there is one; waits for the device
    once.
    """
    peaks = norms_of(
        [tensor for tensor in dense_parts(gradients) if tensor.numel()], math.inf
    )
    return float(side_by_side(peaks).max()) if peaks else 0.0


def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Return norms of shape ``()`` whose norm is that of all `tensors`: one per tensor,
    or one for tensors split the same way.
    """
    norms: list[Tensor] = []
    for group in together(tensors):
        if type(group[0]) is Tensor or not is_sharded(group[0]):
            norms += foreach_norm(group, order)
        elif order == math.inf:
            norms.append(_whole_peak(group))
        else:
            whole: Any = torch.linalg.vector_norm(
                torch.stack(list(foreach_norm(group, order))), order
            )
            norms.append(whole.full_tensor())
    return norms


def norms_in_few_calls(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return norms whose norm is that of all `tensors`, which are alike."""
    small = [tensor for tensor in tensors if tensor.numel() <= SMALL]
    if len(small) <= FEW:
        return foreach_norm(tensors)
    large = (
        [tensor for tensor in tensors if tensor.numel() > SMALL]
        if len(small) < len(tensors)
        else []
    )
    return [
        *(foreach_norm(large) if large else ()),
        torch.linalg.vector_norm(flattened(small)),
    ]


def are_small(tensors: Sequence[Tensor]) -> bool:
    """True if side by side they have the norm, to the last bit, that
    `norms_in_few_calls` takes of them.
    """
    sizes = list(map(Tensor.numel, tensors))
    few = len(sizes) <= FEW or max(sizes) > SMALL or sum(sizes) > NORM_BLOCK
    return not few and are_alike(tensors) and all(map(Tensor.is_contiguous, tensors))


def _scaled_norm(tensors: Sequence[Tensor], peak: float) -> float:
    """Return the global 2-norm of `tensors`, scaled by their largest magnitude `peak`.

    Two powers of two scale without rounding: a reciprocal of `peak` may lose bits or be
    inf.
    """
    exponent = math.frexp(peak)[1] - 1
    half, rest = 2.0 ** -(exponent // 2), 2.0 ** (exponent // 2 - exponent)
    (scaled,) = (
        _fetch(
            [norm for tensor in tensors for norm in norms_of([tensor * half * rest])]
        )
        if peak
        else (0.0,)
    )
    return scaled * 2.0**exponent


def _fetch(norms: Sequence[Tensor], notes: Sequence[Tensor] = ()) -> list[float]:
    scalars = [*norms, *notes]
    read: list[float] = (
        [scalars[0].item()]
        if len(scalars) == 1
        else side_by_side(scalars).tolist()
        if scalars
        else []
    )
    return [math.hypot(*read[: len(norms)]), *read[len(norms) :]]


def _whole_peak(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude of tensors split over processes, inf for NaN, with
    one reduction.
    """
    from torch.distributed.tensor import DTensor, Partial

    parts = [part for part in map(local, tensors) if part.numel()]
    peaks = (
        torch.stack(list(foreach_norm(parts, math.inf)))
        if parts
        else local(tensors[0]).abs().new_zeros(1)
    )
    mesh = mesh_of(tensors[0])
    # A maximum over processes may lose a NaN.
    peak = DTensor.from_local(
        peaks.max().nan_to_num(nan=math.inf, posinf=math.inf),
        mesh,
        [Partial("max")] * mesh.ndim,
        run_check=False,
    )
    return peak.full_tensor()


# Lists of tensors, given to torch in as few calls as their kinds allow.


DTYPE, GRAD, IS_CPU, IS_SPARSE, REQUIRES_GRAD = map(
    attrgetter, ("dtype", "grad", "is_cpu", "is_sparse", "requires_grad")
)
"""Attributes as functions: ``map(DTYPE, tensors)`` makes no Python call."""

_EXACT = {torch.float32, torch.float64}


def dense_parts(gradients: Sequence[Tensor]) -> list[Tensor]:
    return (
        list(map(elements, gradients))
        if any(map(IS_SPARSE, gradients))
        else list(gradients)
    )


def added_up(gradient: Tensor) -> Tensor:
    """Return `gradient` with each element once: a sparse one coalesced; one of which
    processes have parts (``Partial``) reduced.

    torch before 2.12 adds up the parts' norms, and torch 2.6 loses a division of parts
    in place.
    """
    if type(gradient) is Tensor or not is_sharded(gradient):
        return gradient.coalesce() if gradient.is_sparse else gradient
    from torch.distributed.tensor import Replicate

    split: Any = gradient
    whole = [Replicate() if each.is_partial() else each for each in split.placements]
    return (
        gradient
        if whole == list(split.placements)
        else split.redistribute(placements=whole)
    )


_AS_IT_IS = nullcontext()


def without_graph(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Compute without a graph inside the block; nothing is switched if there is
    none.
    """
    return torch.no_grad() if any(map(REQUIRES_GRAD, tensors)) else _AS_IT_IS


@lru_cache(maxsize=8)
def operand(number: float, dtype: torch.dtype) -> Tensor:
    """Return `number` as a cached CPU tensor, shape ``()``, never to be written into:
    making one takes longer than a small division.
    """
    return torch.tensor(number, dtype=dtype, device="cpu")


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """True if all are dense, without a graph, on a CPU and of one dtype, float32 or
    float64: fewer calls give the same bits.
    """
    return (
        set(map(type, tensors)) == {Tensor}
        and all(map(IS_CPU, tensors))
        and len(dtypes := set(map(DTYPE, tensors))) == 1
        and dtypes <= _EXACT
        and not any(map(IS_SPARSE, tensors))
        and not any(map(REQUIRES_GRAD, tensors))
    )


def together(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group `tensors` for multi-tensor calls: those of one process, and those split
    alike.
    """
    if set(map(type, tensors)) == {Tensor}:
        return [list(tensors)]
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = (
            None
            if type(tensor) is Tensor
            else (
                type(tensor),
                getattr(tensor, "device_mesh", None),
                getattr(tensor, "placements", None),
            )
        )
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def side_by_side(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars into a vector on the first one's device, in float64 where the
    device has it.
    """
    first = scalars[0]
    if len({(scalar.dtype, scalar.device) for scalar in scalars}) > 1:
        dtype = torch.float32 if first.is_mps else torch.float64
        scalars = [scalar.to(device=first.device, dtype=dtype) for scalar in scalars]
    return torch.stack(list(scalars))


# Writes into tensors: torch counts every write, except through ``.data`` and into the
# parts of a `DTensor`.


class Versions:
    """The versions of `tensors` as they are now."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._noted = [(tensor, version(tensor)) for tensor in tensors]

    def moved(self) -> bool:
        """True if something wrote into one of them since."""
        return any(version(tensor) != noted for tensor, noted in self._noted)
