"""The global 2-norm of a window's sum, which is also its finite check: many tensors in few calls, and one wait for the device.

On a CPU one more call takes as long as the norm of a thousand numbers, so small tensors are copied side by side and have one norm
together. An accelerator has one kernel for many tensors. Of a tensor that is split over processes each process has a part: the processes
reduce the norms first, so that every element counts once and all processes decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum_torch.tensors import DTYPE, are_alike, dense_parts, side_by_side, together, without_graph
from gradaccum_torch.torch_private import foreach_norm, is_sharded, local, mesh_of

SMALL = 4096
"""Elements up to which a CPU copies a tensor in less time than one more call takes."""
FAINT, FAINT_HALF = 2.0**-31, 2.0**-13
"""Smaller norms are measured again. Squares below 2^-126 may vanish, so that 2^40 elements lose a 2^-24th of a square of 2^-62 at most. The
second is for tensors whose norm is a float16, which has few bits below 2^-14."""
FEW = 4
"""Up to so many small tensors the copy is one call too many."""


class Measured(NamedTuple):
    """The measurements of a window's sum."""

    norm: float
    """Its global 2-norm."""
    finite: bool
    """Whether every element is finite."""
    notes: list[float]
    """The values of the notes that were asked for beside it."""
    norms: list[Tensor]
    """The norms that it was made of, shape ``()``: of one tensor each, or of several together."""


UNMEASURED = Measured(math.nan, True, [], [])
"""For a window whose end needs no norm: ``on_overflow="ignore"``."""


def measure(gradients: Sequence[Tensor], notes: Sequence[Tensor] = ()) -> Measured:
    """The global 2-norm, and whether every element is finite, with one wait for the device while the norm is finite.

    Large but finite elements, whose squares overflow, are finite, and the squares of small ones vanish, many of which may make up most of
    the norm. So where the plain norm is not finite or is faint, it is taken of the elements scaled by the largest.

    Args:
        gradients: the tensors, any shapes and dtypes.
        notes: scalars, shape ``()``, to be read in the same transfer.
    """
    with without_graph(gradients):
        return _measured(dense_parts(gradients), notes)


def _measured(tensors: list[Tensor], notes: Sequence[Tensor]) -> Measured:
    norms = norms_in_few_calls(tensors)
    norm, *read = _fetch(norms, notes)
    if FAINT_HALF <= norm < math.inf or (FAINT <= norm < math.inf and not _are_narrow(norms)):
        return Measured(norm, True, read, norms)
    peak = largest(tensors)
    if not math.isfinite(peak):
        return Measured(math.inf, False, read, norms)
    return Measured(_scaled_norm(tensors, peak), True, read, norms)


@torch.no_grad()
def is_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether every element is finite; waits for the device once."""
    return math.isfinite(largest(gradients))


@torch.no_grad()
def largest(gradients: Sequence[Tensor]) -> float:
    """The largest magnitude among all elements, NaN or inf if there is one; waits for the device once."""
    tensors = [tensor for tensor in dense_parts(gradients) if tensor.numel()]
    if not tensors:
        return 0.0
    return float(side_by_side(norms_of(tensors, math.inf)).max())


def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Norms of shape ``()`` whose norm is that of all `tensors`: one for each tensor, or one for all that are split the same way."""
    norms: list[Tensor] = []
    for group in together(tensors):
        if not is_sharded(group[0]):
            norms += foreach_norm(group, order)
        else:
            norms.append(_whole_peak(group) if order == math.inf else _whole(list(foreach_norm(group, order)), order))
    return norms


def norms_in_few_calls(tensors: list[Tensor]) -> list[Tensor]:
    """`norms_of` dense tensors of any shapes, dtypes and devices, with one for many small ones together."""
    small = [tensor for tensor in tensors if tensor.numel() <= SMALL]
    if len(small) <= FEW or not are_alike(tensors):
        return norms_of(tensors)
    large = [tensor for tensor in tensors if tensor.numel() > SMALL]
    return [*norms_of(large), torch.linalg.vector_norm(torch.cat([tensor.reshape(-1) for tensor in small]))]


def _are_narrow(norms: Sequence[Tensor]) -> bool:
    """Whether one of `norms` is a float16."""
    return torch.float16 in map(DTYPE, norms)


def _scaled_norm(tensors: Sequence[Tensor], peak: float) -> float:
    """The global 2-norm of `tensors`, whose largest magnitude is `peak`, of which they are scaled to 1.

    By powers of two, which round nothing, and by two of them: of a number beyond 2^126 the reciprocal has fewer bits, and of the smallest
    ones it is inf.
    """
    exponent = math.frexp(peak)[1] - 1
    half, rest = 2.0 ** -(exponent // 2), 2.0 ** (exponent // 2 - exponent)
    (scaled,) = _fetch([norm for tensor in tensors for norm in norms_of([tensor * half * rest])]) if peak else (0.0,)
    return scaled * 2.0**exponent


def same_norms(norms: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether norms that were measured of the same tensors are equal; waits for the device."""
    return all(a.equal(b) for a, b in zip(norms, others, strict=True))


def _fetch(norms: Sequence[Tensor], notes: Sequence[Tensor] = ()) -> list[float]:
    """The norm of all tensors from the norm of each, in float64, and then the notes, with one wait for the device."""
    scalars = [*norms, *notes]
    read: list[float] = [scalars[0].item()] if len(scalars) == 1 else side_by_side(scalars).tolist() if scalars else []
    return [math.hypot(*read[: len(norms)]), *read[len(norms) :]]


def _whole(norms: list[Tensor], order: float) -> Tensor:
    """The norm of tensors that are split over processes, from the norm of each, with one reduction."""
    total: Any = torch.linalg.vector_norm(torch.stack(norms), order)
    whole: Tensor = total.full_tensor()
    return whole


def _whole_peak(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude in tensors that are split over processes, inf for NaN, with one reduction; a process may have an empty part."""
    from torch.distributed.tensor import DTensor, Partial

    parts = [part for part in map(local, tensors) if part.numel()]
    peaks = torch.stack(list(foreach_norm(parts, math.inf))) if parts else local(tensors[0]).abs().new_zeros(1)
    mesh = mesh_of(tensors[0])
    # A maximum over processes may lose a NaN.
    peak = DTensor.from_local(peaks.max().nan_to_num(nan=math.inf, posinf=math.inf), mesh, [Partial("max")] * mesh.ndim, run_check=False)
    return peak.full_tensor()
