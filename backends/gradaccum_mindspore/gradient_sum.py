"""The sums of a window and their arithmetic: add, check, divide, clear, and the global
2-norm.

Functions with ``compiled_`` in their name run where the state is a Tensor
(`mindspore.jit`, graph mode). `scaled`, `all_finite`, `divided`, `clear` and `measure`
run in PyNative. There an operator takes tenths of a millisecond, because MindSpore
hands it to another thread; NumPy, which reads a CPU tensor's memory without a copy,
takes microseconds. Another device, and bfloat16, have MindSpore's operators.

Only `write` and `add_into` write. In PyNative ``Tensor.add_`` and its like leave a
Parameter as it was, and a compiled function does not see ``set_data``. A sum is zero
while no window is open: the window's end writes zeros, so a micro-batch is one
addition. `compiled_clear` computes them: ``zeros_like`` would be a constant of the
graph, of the model's size.

Arithmetic on a half-precision sum runs in float32, and the result is rounded as it is
written: MindSpore has few bfloat16 operators on a CPU, and float16 does not hold a
factor such as 2^16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import constexpr
from mindspore.ops.auto_generate import inplace_copy
from numpy.typing import NDArray

from gradaccum.kit import accumulate_dtype_error, largest_number

Array = NDArray[Any]
"""The memory of a Tensor, as NumPy reads it."""
DType: TypeAlias = ms.Type
"""A dtype of MindSpore's, such as ``mindspore.float32``."""
Shape = tuple[int, ...]
Number: TypeAlias = float | Tensor
"""A Python number, or a Tensor of one element."""
Sums = Sequence[Parameter]
"""One sum per parameter of the model, in their order."""
Gradients = Sequence[Tensor | None]
"""One gradient per parameter, in their order; None for a parameter that took no part.
"""


HALF = (ms.float16, ms.bfloat16)
FLOATS = {
    "float16": ms.float16,
    "bfloat16": ms.bfloat16,
    "float32": ms.float32,
    "float64": ms.float64,
}

map_over: Callable[..., tuple[Any, ...]] = ops.HyperMap()
"""``map_over(function, trees...)``: a tuple of `function`'s results for the leaves side
by side. A loop with an ``if`` took minutes to compile for 200 parameters.
"""
cast: Callable[[Tensor, DType], Tensor] = ops.Cast()
"""``cast(tensor, dtype)``: the tensor itself if it has the dtype. One operator, where
``Tensor.astype`` is four graphs.
"""


def hidden_parameter(value: Tensor, name: str) -> Parameter:
    """Return a Parameter that MindSpore saves and never trains."""
    return Parameter(value, name=name, requires_grad=False)


def where(condition: Tensor, a: Number, b: Number) -> Tensor:
    """Return `mindspore.ops.where`, for the compiler to follow."""
    return ops.where(condition, a, b)


def sum_dtype(dtype: DType, accumulate_dtype: object) -> DType:
    """Return the dtype of the sum for a parameter of `dtype`."""
    if accumulate_dtype is None:
        return ms.float32 if dtype in HALF else dtype
    name = str(getattr(accumulate_dtype, "__name__", accumulate_dtype))
    for known_name, known_dtype in FLOATS.items():
        if accumulate_dtype == known_dtype or name == known_name:
            return known_dtype
    raise accumulate_dtype_error(accumulate_dtype)


def working_dtype(dtype: DType) -> DType:
    return ms.float32 if dtype == ms.float16 or dtype == ms.bfloat16 else dtype


def write(parameter: Parameter, value: Tensor) -> None:
    """Assign a tensor of the parameter's dtype, in PyNative and in compiled code."""
    # Assign has no bfloat16 kernel on a CPU. Not Tensor.copy_, whose effect the
    # compiler can overlook.
    if parameter.dtype == ms.bfloat16:
        inplace_copy(parameter, value)
    else:
        ops.assign(parameter, value)


def add_into(total: Parameter, part: Tensor) -> None:
    if total.dtype == working_dtype(total.dtype):
        ops.assign_add(total, part)
    else:
        # `addn` does not broadcast what a compiled bprop returned in another shape, as
        # + would.
        wide = ops.addn((cast(total, ms.float32), cast(part, ms.float32)))
        write(total, cast(wide, total.dtype))


def narrows(sum_dtype: DType, gradient_dtype: DType) -> bool:
    """True if a finite sum can be an inf in the dtype of the gradient; for the compiler
    to follow too.
    """
    loses_range: bool = gradient_dtype == ms.float16 or (
        sum_dtype == ms.float64 and gradient_dtype != ms.float64
    )
    return loses_range


def fits(total: Parameter, divisor: Tensor, dtype: DType) -> Tensor:
    """True if all of ``sum / divisor`` is finite in `dtype`, a bool Tensor of shape ().

    Rounding is monotone, so the largest element decides.
    """
    work = working_dtype(total.dtype)
    largest = ops.abs(cast(total, work)).max() / cast(divisor, work)
    return ops.isfinite(cast(cast(largest, dtype), ms.float32))


# In compiled code. A scalar is a Tensor of shape ().


def compiled_add(
    sums: Sums, gradients: Gradients, factor: Tensor | None, is_added: Tensor | None
) -> tuple[bool, ...]:
    """Add ``factor * gradient`` to each sum, if `is_added`; None stands for 1 and
    True.
    """
    return map_over(ops.partial(_add, factor, is_added), sums, gradients)


def _add(
    factor: Tensor | None,
    is_added: Tensor | None,
    total: Parameter,
    gradient: Tensor | None,
) -> bool:
    if gradient is None:
        return True
    part = cast(cast(gradient, total.dtype), working_dtype(total.dtype))
    if factor is not None:
        part = compiled_scaled(gradient, factor, total.dtype)
    if is_added is not None:
        part = ops.where(is_added, part, ops.zeros_like(part))
    add_into(total, cast(part, total.dtype))
    return True


def compiled_scaled(gradient: Tensor, factor: Tensor, dtype: DType) -> Tensor:
    """Return ``factor * gradient`` rounded to `dtype`, in its working dtype."""
    work = working_dtype(dtype)
    return cast(cast(cast(gradient, work) * cast(factor, work), dtype), work)


def compiled_finite(sums: Sums, gradients: Gradients, factor: Tensor) -> Tensor:
    """True if everything that `compiled_add` would add is finite."""
    return ops.stack(map_over(ops.partial(_finite, factor), sums, gradients)).min() > 0


def _finite(factor: Tensor, total: Parameter, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return ops.ones_like(factor)
    part = compiled_scaled(gradient, factor, total.dtype)
    return cast(ops.isfinite(part).all(), factor.dtype)


def compiled_clear(sums: Sums, zero: Tensor) -> tuple[bool, ...]:
    """Assign exact zeros."""
    return map_over(ops.partial(_clear, zero), sums)


def _clear(zero: Tensor, total: Parameter) -> bool:
    zeros = ops.broadcast_to(cast(zero, working_dtype(total.dtype)), total.shape)
    write(total, cast(zeros, total.dtype))
    return True


def compiled_divided(
    sums: Sums, divisor: Tensor, dtypes: Sequence[DType]
) -> tuple[Tensor, ...]:
    """Return ``sum / divisor``, each in the dtype of `dtypes`."""
    return map_over(ops.partial(_divided, divisor), sums, dtypes)


def _divided(divisor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    work = working_dtype(total.dtype)
    return cast(cast(total, work) / cast(divisor, work), dtype)


def compiled_fits(sums: Sums, divisor: Tensor, dtypes: Sequence[DType]) -> Tensor:
    """True if everything that `compiled_divided` would return is finite."""
    return ops.stack(map_over(ops.partial(_fits, divisor), sums, dtypes)).min() > 0


def _fits(divisor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    if narrows(total.dtype, dtype):
        return cast(fits(total, divisor, dtype), divisor.dtype)
    return ops.ones_like(divisor)


# In PyNative.


ARRAYS: dict[DType, np.dtype[np.floating[Any]]] = {
    ms.float16: np.dtype("float16"),
    ms.float32: np.dtype("float32"),
    ms.float64: np.dtype("float64"),
}


def array_of(tensor: Tensor) -> Array | None:
    """Return the memory of `tensor` if NumPy can work on it; waits until it is
    computed.
    """
    if tensor.dtype in ARRAYS and tensor.device == "CPU":
        array: Array = tensor.asnumpy()
        return array
    return None


def tensor_of(array: Array, dtype: DType) -> Tensor:
    # NumPy makes a number of a product of arrays without axes.
    return Tensor.from_numpy(np.asarray(array, ARRAYS[dtype]))


def cast_to(tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def scaled(gradient: Tensor, factor: float, dtype: DType) -> Tensor:
    """Return ``factor * gradient`` rounded to `dtype`."""
    if factor == 1 and gradient.dtype == dtype:
        return gradient
    work = working_dtype(dtype)
    array = array_of(gradient)
    if array is not None and dtype in ARRAYS:
        product = array.astype(ARRAYS[work]) * ARRAYS[work].type(factor)
        return tensor_of(product, dtype)
    # A Tensor, because MindSpore rounds a Python number to float32.
    return cast_to(ops.mul(cast_to(gradient, work), Tensor(factor, work)), dtype)


def all_finite(tensor: Tensor) -> bool:
    array = array_of(tensor)
    if array is None:
        return bool(ops.isfinite(tensor).all().asnumpy())
    return bool(np.isfinite(array).all())


def divided(
    sums: Sums, divisor: float, dtypes: Sequence[DType], float_dtype: DType
) -> tuple[Tensor, ...]:
    """Return the quotients as `compiled_divided` does; `divisor` is rounded to
    `float_dtype`.
    """
    rounded = ARRAYS[float_dtype].type(divisor)
    pairs = zip(sums, dtypes, strict=True)
    return tuple(_quotient(total, rounded, dtype) for total, dtype in pairs)


def _quotient(total: Parameter, divisor: np.floating[Any], dtype: DType) -> Tensor:
    array = array_of(total)
    if array is None or dtype not in ARRAYS:
        return _divided(Tensor(divisor), total, dtype)
    work = ARRAYS[working_dtype(total.dtype)]
    return tensor_of(array.astype(work, copy=False) / work.type(divisor), dtype)


def clear(sums: Sums) -> None:
    for total in sums:
        write(total, ops.zeros_like(total))


def mark_invalid(sums: Sums) -> None:
    """Write NaN into the smallest sum, so that the window is skipped."""
    total = min(sums, key=lambda each_sum: each_sum.size)
    write(total, Tensor(np.full(total.shape, math.nan), total.dtype))


# The global 2-norm. One pass over the sums squares and adds. If squares overflow or
# vanish, a second pass divides by the largest magnitude first.


ROW = 4096
"""Elements to sum in one go at most: MindSpore's sum over all axes takes seven times as
long as over the last one.
"""
SMALLEST = {ms.float32: 2.0**-80, ms.float64: 2.0**-918}
"""Below this sum of squares, the squares that vanished may count: the smallest normal
number over the square of the rounding.
"""


def measure(sums: Sums, dtype: DType) -> tuple[float, bool]:
    """Return the norm, and whether every element is finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = sum(_squares(total, dtype) for total in sums)
    if SMALLEST[dtype] < squares < math.inf:
        return math.sqrt(squares), True
    norm, is_finite = robust_measure(sums, dtype)
    return norm.asnumpy().item(), is_finite.asnumpy().item()


def _squares(tensor: Tensor, dtype: DType) -> float:
    array = array_of(tensor)
    if array is None:
        return float(sum_of_squares((tensor,), dtype).asnumpy())
    flat = array.reshape(-1).astype(ARRAYS[dtype], copy=False)
    in_rows = flat.size // ROW * ROW
    rest = flat[in_rows:]
    squares = np.dot(rest, rest)
    if in_rows:
        rows = flat[:in_rows].reshape(-1, ROW)
        products = np.matmul(rows[:, None, :], rows[:, :, None])
        squares = products.sum(dtype=np.float64) + squares
    return float(squares)


def compiled_measure(sums: Sums, dtype: DType) -> tuple[Tensor, Tensor]:
    """Return the norm, in `dtype`, and whether it is certainly right. If it is not, ask
    `robust_measure`.
    """
    squares = sum_of_squares(sums, dtype)
    return ops.sqrt(squares), (squares > smallest_of(dtype)) & ops.isfinite(squares)


@constexpr  # type: ignore[untyped-decorator]
def smallest_of(dtype: DType) -> Tensor:
    """Return a Tensor, because MindSpore rounds a Python number to float32."""
    return Tensor(SMALLEST[dtype], dtype)


@constexpr  # type: ignore[untyped-decorator]
def largest_of(dtype: DType) -> Tensor:
    return Tensor(largest_number(float64_weight=dtype == ms.float64), dtype)


def sum_of_squares(sums: Sums, dtype: DType) -> Tensor:
    """Return the sum of the squares of all elements: over rows first, then over the
    rows' sums.
    """
    return ops.addn(map_over(ops.partial(_square, dtype), sums))


def _square(dtype: DType, tensor: Tensor) -> Tensor:
    return _sum(ops.square(cast(tensor, dtype)))


def _sum(squares: Tensor) -> Tensor:
    is_large = squares.size > ROW
    if needs_rows(squares.shape):
        squares = squares.reshape(-1, row_length(squares.size))
    if is_large:
        squares = squares.sum(-1)
    return squares.sum()


@constexpr  # type: ignore[untyped-decorator]
def needs_rows(shape: Shape) -> bool:
    """True if a large tensor must be reshaped, which is a copy, because its last axis
    is no row.
    """
    return prod(shape) > ROW and (len(shape) < 2 or not ROW // 128 <= shape[-1] <= ROW)


@constexpr  # type: ignore[untyped-decorator]
def row_length(size: int) -> int:
    return max(length for length in range(1, ROW + 1) if size % length == 0)


def robust_measure(sums: Sums, dtype: DType) -> tuple[Tensor, Tensor]:
    """Return the norm, in `dtype`, and whether every element is finite, where squares
    overflow or vanish. A norm beyond the range of `dtype` is its largest number.
    """
    largest = ops.stack(map_over(ops.partial(_largest, dtype), sums)).max()
    divisor = ops.where(largest > 0, largest, ops.ones_like(largest))
    # An inf becomes inf / inf = NaN, and max may overlook a NaN: the sum shows both.
    squares = ops.addn(map_over(ops.partial(_square_over, divisor), sums))
    norm = largest * ops.sqrt(squares)
    limit = largest_of(dtype)
    # Not ops.minimum, which compiled is inf of an inf and a number.
    return ops.where(norm < limit, norm, limit), ops.isfinite(squares)


def _largest(dtype: DType, tensor: Tensor) -> Tensor:
    return ops.abs(cast(tensor, dtype)).max()


def _square_over(divisor: Tensor, tensor: Tensor) -> Tensor:
    return _sum(ops.square(cast(tensor, divisor.dtype) / divisor))


# For hundreds of sums the norm was half of the time to compile a step. So the small
# sums are measured as one.


SMALL = 4 * ROW
"""Elements up to which a sum is small: 64 KiB in float32."""
PACKED = 2**22
"""Elements that are packed at most, 16 MiB in float32."""
reshape: Callable[[Tensor, tuple[int, ...]], Tensor] = ops.Reshape()
concat: Callable[[tuple[Tensor, ...]], Tensor] = ops.Concat()
"""Primitives: the functions of these names are graphs of their own, for each tensor."""


class PackedSums(nn.Cell):  # type: ignore[misc]
    """The sums of one accumulation as fewer tensors, of which the norm is the same."""

    small_sums: Sums
    other_sums: Sums

    def __init__(self, sums: Sums, dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        small: list[Parameter] = []
        elements = 0
        for total in sorted(sums, key=lambda each_sum: each_sum.size):
            is_small = total.dtype == dtype and total.size <= SMALL
            if is_small and elements + total.size <= PACKED:
                small.append(total)
                elements += total.size
        self.packs = len(small) > 1
        packed_ids = set(map(id, small)) if self.packs else set()
        other_sums = tuple(total for total in sums if id(total) not in packed_ids)
        # A Cell would list them as its own.
        object.__setattr__(self, "small_sums", tuple(small))
        object.__setattr__(self, "other_sums", other_sums)
        self.in_rows = elements > ROW
        gap = -elements % ROW if self.in_rows else 0
        self.gap = (Tensor(np.zeros(gap), dtype),) if gap else ()
        """Zeros that fill the last row; the number of elements may be a prime."""

    def construct(self) -> Sums:
        if not self.packs:
            return self.other_sums
        packed = concat((*map_over(_flat, self.small_sums), *self.gap))
        if self.in_rows:
            packed = reshape(packed, (-1, ROW))
        return (packed, *self.other_sums)


def _flat(total: Parameter) -> Tensor:
    return reshape(total, (-1,))
