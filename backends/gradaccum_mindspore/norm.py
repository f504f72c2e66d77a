"""The global 2-norm of a window's sums, and whether every element is finite.

One pass over the sums squares and adds. If the squares overflow, or are so small that some of them vanish, a second pass divides by the
largest magnitude first: large finite gradients are no overflow, and tiny ones have a norm. `measure` runs in PyNative: NumPy works on
what lies in the host's memory. `compiled_measure` and `robust_measure` are operators; a compiled window takes the second one in a branch
of its own.
"""

from __future__ import annotations

import math
from math import prod

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from gradaccum.kit import largest_number
from gradaccum_mindspore import pynative_sums
from gradaccum_mindspore.sums import cast, each
from gradaccum_mindspore.types import DType, Shape, Sums

ROW = 4096
"""Elements to sum in one go at most, for accuracy and speed: MindSpore's sum over the last axis runs at the speed of memory, its sum over
all axes takes seven times as long."""
SMALLEST = {ms.float32: 2.0**-80, ms.float64: 2.0**-918}
"""Below this sum of squares, the squares that vanished may count: the smallest normal number over the square of the rounding."""


def measure(sums: Sums, dtype: DType) -> tuple[float, bool]:
    """Global 2-norm of `sums`, worked out in `dtype`, and whether every element is finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = sum(_squares(total, dtype) for total in sums)
    if SMALLEST[dtype] < squares < math.inf:
        return math.sqrt(squares), True
    norm, finite = robust_measure(sums, dtype)
    return norm.asnumpy().item(), finite.asnumpy().item()


def _squares(tensor: Tensor, dtype: DType) -> float:
    """Sum of the squares of all elements."""
    array = pynative_sums.array_of(tensor)
    if array is None:
        return float(sum_of_squares((tensor,), dtype).asnumpy())
    flat = array.reshape(-1).astype(pynative_sums.ARRAYS[dtype], copy=False)
    rows, rest = flat[: flat.size // ROW * ROW].reshape(-1, ROW), flat[flat.size // ROW * ROW :]
    return float((np.matmul(rows[:, None, :], rows[:, :, None]).sum(dtype=np.float64) if len(rows) else 0.0) + np.dot(rest, rest))


def compiled_measure(sums: Sums, dtype: DType) -> tuple[Tensor, Tensor]:
    """Global 2-norm, in `dtype`, and whether it is known to be right, bool, shape (). If it is not, ask `robust_measure`."""
    squares = sum_of_squares(sums, dtype)
    return ops.sqrt(squares), (squares > smallest_of(dtype)) & ops.isfinite(squares)


@constexpr  # type: ignore[untyped-decorator]
def smallest_of(dtype: DType) -> Tensor:
    """`SMALLEST` of `dtype`. A Tensor, because MindSpore rounds a Python number to float32."""
    return Tensor(SMALLEST[dtype], dtype)


@constexpr  # type: ignore[untyped-decorator]
def largest_of(dtype: DType) -> Tensor:
    """The largest finite number of `dtype`."""
    return Tensor(largest_number(float64_weight=dtype == ms.float64), dtype)


def sum_of_squares(sums: Sums, dtype: DType) -> Tensor:
    """Sum of the squares of all elements, in `dtype`, shape (): over rows first, then over the rows' sums."""
    return ops.addn(each(ops.partial(_square, dtype), sums))


def _square(dtype: DType, tensor: Tensor) -> Tensor:
    return _summed(ops.square(cast(tensor, dtype)))


def _summed(squares: Tensor) -> Tensor:
    large = squares.size > ROW
    if needs_rows(squares.shape):
        squares = squares.reshape(-1, row_length(squares.size))
    if large:
        squares = squares.sum(-1)
    return squares.sum()


@constexpr  # type: ignore[untyped-decorator]
def needs_rows(shape: Shape) -> bool:
    """Whether a large tensor's last axis is no row to sum over as it is; a reshape is a copy."""
    return prod(shape) > ROW and (len(shape) < 2 or not ROW // 128 <= shape[-1] <= ROW)


@constexpr  # type: ignore[untyped-decorator]
def row_length(size: int) -> int:
    """The largest divisor of `size` up to `ROW`."""
    return max(length for length in range(1, ROW + 1) if size % length == 0)


def robust_measure(sums: Sums, dtype: DType) -> tuple[Tensor, Tensor]:
    """Global 2-norm and whether every element is finite, in `dtype` and bool, shape (), for elements whose squares overflow or vanish.

    A norm of finite elements beyond the range of `dtype` is reported as its largest number.
    """
    largest = ops.stack(each(ops.partial(_largest, dtype), sums)).max()
    divisor = ops.where(largest > 0, largest, ops.ones_like(largest))
    # An inf becomes inf / inf = NaN, and max may overlook a NaN: the sum shows both.
    squares = ops.addn(each(ops.partial(_square_over, divisor), sums))
    norm, limit = largest * ops.sqrt(squares), largest_of(dtype)
    # Not ops.minimum, which compiled is inf of an inf and a number.
    return ops.where(norm < limit, norm, limit), ops.isfinite(squares)


def _largest(dtype: DType, tensor: Tensor) -> Tensor:
    return ops.abs(cast(tensor, dtype)).max()


def _square_over(divisor: Tensor, tensor: Tensor) -> Tensor:
    return _summed(ops.square(cast(tensor, divisor.dtype) / divisor))


def norm_over(sums: Sums, divisor: Tensor) -> Tensor:
    """Global 2-norm of `sums`, measured on the quotients by `divisor`: right where that brings the elements into range."""
    return divisor * ops.sqrt(ops.addn(each(ops.partial(_square_over, divisor), sums)))
