"""The sums of a window and their arithmetic: add, check, divide, clear, and the global
2-norm.

Functions with ``compiled_`` in their name run where the state is a Tensor
(`mindspore.jit`, graph mode). `scaled`, `parts`, `all_finite`, `divided`, `clear` and
`measure` run in PyNative. There an operator takes tenths of a millisecond, since
MindSpore hands it to another thread; NumPy, which reads a CPU tensor's memory without a
copy, takes microseconds. Another device, and bfloat16, have MindSpore's operators.

Only `write` and `add_into` write. In PyNative ``Tensor.add_`` and its like leave a
Parameter as it was, and a compiled function does not see ``set_data``. A sum is zero
while no window is open: the window's end writes zeros, so a micro-batch is one
addition. `compiled_clear` computes them: ``zeros_like`` would be a constant of the
graph, of the model's size.

Arithmetic on a half-precision sum runs in float32, and the result is rounded as it is
written: MindSpore has few bfloat16 operators on a CPU, and float16 does not hold a
factor such as 2^16.

One pass over the sums squares and adds. If squares overflow or vanish, a second pass
divides by the largest magnitude first. For hundreds of sums the norm was half of the
time to compile a step, so `Packed` joins the small sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
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

each: Callable[..., tuple[Any, ...]] = ops.HyperMap()
"""``each(function, trees...)``: a tuple of `function`'s results for the leaves side by
side. A loop with an ``if`` took minutes to compile for 200 parameters.
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


def sum_dtype(own: DType, asked: object) -> DType:
    if asked is None:
        return ms.float32 if own in HALF else own
    name = (
        asked
        if isinstance(asked, str)
        else getattr(asked, "__name__", None) or str(asked)
    )
    for key, dtype in FLOATS.items():
        if asked is dtype or asked == dtype or name == key:
            return dtype
    raise accumulate_dtype_error(asked)


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
        write(
            total,
            cast(
                ops.addn((cast(total, ms.float32), cast(part, ms.float32))), total.dtype
            ),
        )


def compiled_add(
    sums: Sums, gradients: Gradients, factor: Tensor | None, adds: Tensor | None
) -> tuple[bool, ...]:
    return each(ops.partial(_add, factor, adds), sums, gradients)


def _add(
    factor: Tensor | None,
    adds: Tensor | None,
    total: Parameter,
    gradient: Tensor | None,
) -> bool:
    if gradient is None:
        return True
    part = cast(cast(gradient, total.dtype), working_dtype(total.dtype))
    if factor is not None:
        part = compiled_scaled(gradient, factor, total.dtype)
    if adds is not None:
        part = ops.where(adds, part, ops.zeros_like(part))
    add_into(total, cast(part, total.dtype))
    return True


def compiled_scaled(gradient: Tensor, factor: Tensor, dtype: DType) -> Tensor:
    """Return ``factor * gradient`` rounded to `dtype`, in its working dtype; `factor`
    is a scalar.
    """
    work = working_dtype(dtype)
    return cast(cast(cast(gradient, work) * cast(factor, work), dtype), work)


def compiled_finite(sums: Sums, gradients: Gradients, factor: Tensor) -> Tensor:
    """True if everything that `compiled_add` would add is finite, a bool Tensor of
    shape ().
    """
    return ops.stack(each(ops.partial(_finite, factor), sums, gradients)).min() > 0


def _finite(factor: Tensor, total: Parameter, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return ops.ones_like(factor)
    return cast(
        ops.isfinite(compiled_scaled(gradient, factor, total.dtype)).all(), factor.dtype
    )


def compiled_clear(sums: Sums, zero: Tensor) -> tuple[bool, ...]:
    """Exact zeros by assignment; `zero` is a scalar."""
    return each(ops.partial(_clear, zero), sums)


def _clear(zero: Tensor, total: Parameter) -> bool:
    write(
        total,
        cast(
            ops.broadcast_to(cast(zero, working_dtype(total.dtype)), total.shape),
            total.dtype,
        ),
    )
    return True


def divide(sums: Sums, divisor: Tensor, dtypes: Sequence[DType]) -> tuple[Tensor, ...]:
    """Return ``sum / divisor``, each in the dtype of `dtypes` for the inner optimizer;
    `divisor` is a scalar.
    """
    return each(ops.partial(_divide, divisor), sums, dtypes)


def _divide(divisor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    work = working_dtype(total.dtype)
    return cast(cast(total, work) / cast(divisor, work), dtype)


def multiply(sums: Sums, factor: Tensor, dtypes: Sequence[DType]) -> tuple[Tensor, ...]:
    """Return ``sum * factor``, as `divide`, which takes four times as long on a CPU."""
    return each(ops.partial(_multiply, factor), sums, dtypes)


def _multiply(factor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    work = working_dtype(total.dtype)
    return cast(cast(total, work) * cast(factor, work), dtype)


def narrows(own: DType, handed: DType) -> bool:
    """True if a finite sum of dtype `own` can be an inf in the dtype `handed`; for the
    compiler to follow too.
    """
    loses_range: bool = handed == ms.float16 or (
        own == ms.float64 and handed != ms.float64
    )
    return loses_range


def fits(total: Parameter, divisor: Tensor, dtype: DType) -> Tensor:
    """True if all of ``sum / divisor`` is finite in `dtype`, a bool Tensor of shape ().

    Rounding is monotone, so the largest element tells.
    """
    work = working_dtype(total.dtype)
    largest = ops.abs(cast(total, work)).max() / cast(divisor, work)
    return ops.isfinite(cast(cast(largest, dtype), ms.float32))


def compiled_fits(sums: Sums, divisor: Tensor, dtypes: Sequence[DType]) -> Tensor:
    return ops.stack(each(ops.partial(_fits, divisor), sums, dtypes)).min() > 0


def _fits(divisor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    if narrows(total.dtype, dtype):
        return cast(fits(total, divisor, dtype), divisor.dtype)
    return ops.ones_like(divisor)


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


def scaled(gradient: Tensor, factor: float, dtype: DType) -> Tensor:
    if factor == 1 and gradient.dtype == dtype:
        return gradient
    work, array = working_dtype(dtype), array_of(gradient)
    if array is not None and dtype in ARRAYS:
        return _tensor(array.astype(ARRAYS[work]) * ARRAYS[work].type(factor), dtype)
    # A Tensor, because MindSpore rounds a Python number to float32.
    return _cast(ops.mul(_cast(gradient, work), Tensor(factor, work)), dtype)


def parts(
    sums: Sums, gradients: Gradients, factor: float
) -> Iterator[tuple[Parameter, Tensor]]:
    """Yield each sum and the ``factor * gradient`` to add to it, computed one at a
    time; None adds nothing.
    """
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            yield total, scaled(gradient, factor, total.dtype)


def all_finite(tensor: Tensor) -> bool:
    array = array_of(tensor)
    return bool(
        ops.isfinite(tensor).all().asnumpy()
        if array is None
        else np.isfinite(array).all()
    )


def divided(
    sums: Sums, divisor: float, dtypes: Sequence[DType], float_dtype: DType
) -> tuple[Tensor, ...]:
    """Return the quotients as `divide` does; `divisor` is rounded to `float_dtype`."""
    rounded = ARRAYS[float_dtype].type(divisor)
    return tuple(
        _quotient(total, rounded, dtype)
        for total, dtype in zip(sums, dtypes, strict=True)
    )


def spoil(sums: Sums) -> None:
    total = min(sums, key=lambda each: each.size)
    write(total, Tensor(np.full(total.shape, math.nan), total.dtype))


def clear(sums: Sums) -> None:
    for total in sums:
        write(total, ops.zeros_like(total))


def _cast(tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _quotient(total: Parameter, divisor: np.floating[Any], dtype: DType) -> Tensor:
    array = array_of(total)
    if array is None or dtype not in ARRAYS:
        return divide((total,), Tensor(divisor), (dtype,))[0]
    work = ARRAYS[working_dtype(total.dtype)]
    return _tensor(array.astype(work, copy=False) / work.type(divisor), dtype)


def _tensor(values: Array, dtype: DType) -> Tensor:
    # NumPy makes a number of a product of arrays without axes.
    return Tensor.from_numpy(np.asarray(values, ARRAYS[dtype]))


ROW = 4096
"""Elements to sum in one go at most: MindSpore's sum over all axes takes seven times as
long as over the last one.
"""
SMALLEST = {ms.float32: 2.0**-80, ms.float64: 2.0**-918}
"""Below this sum of squares, the squares that vanished may count: the smallest normal
number over the square of the rounding.
"""


def measure(sums: Sums, dtype: DType) -> tuple[float, bool]:
    with np.errstate(over="ignore", invalid="ignore"):
        squares = sum(_squares(total, dtype) for total in sums)
    if SMALLEST[dtype] < squares < math.inf:
        return math.sqrt(squares), True
    norm, finite = robust_measure(sums, dtype)
    return norm.asnumpy().item(), finite.asnumpy().item()


def _squares(tensor: Tensor, dtype: DType) -> float:
    array = array_of(tensor)
    if array is None:
        return float(sum_of_squares((tensor,), dtype).asnumpy())
    flat = array.reshape(-1).astype(ARRAYS[dtype], copy=False)
    rows, rest = (
        flat[: flat.size // ROW * ROW].reshape(-1, ROW),
        flat[flat.size // ROW * ROW :],
    )
    return float(
        (
            np.matmul(rows[:, None, :], rows[:, :, None]).sum(dtype=np.float64)
            if len(rows)
            else 0.0
        )
        + np.dot(rest, rest)
    )


def compiled_measure(sums: Sums, dtype: DType) -> tuple[Tensor, Tensor]:
    """Global 2-norm, in `dtype`, and whether it is known to be right, bool, shape ().
    If it is not, ask `robust_measure`.
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
    """Sum of the squares of all elements, in `dtype`, shape (): over rows first, then
    over the rows' sums.
    """
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
    """True if a large tensor must be reshaped, which is a copy, because its last axis
    is no row.
    """
    return prod(shape) > ROW and (len(shape) < 2 or not ROW // 128 <= shape[-1] <= ROW)


@constexpr  # type: ignore[untyped-decorator]
def row_length(size: int) -> int:
    return max(length for length in range(1, ROW + 1) if size % length == 0)


def robust_measure(sums: Sums, dtype: DType) -> tuple[Tensor, Tensor]:
    """Global 2-norm and whether every element is finite, in `dtype` and bool, shape (),
    for elements whose squares overflow or vanish.

    A norm beyond the range of `dtype` is its largest number.
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


SMALL = 4 * ROW
"""Elements up to which a sum is small: 64 KiB in float32."""
JOINED = 2**22
"""Elements that are joined at most, 16 MiB in float32."""
reshape: Callable[[Tensor, tuple[int, ...]], Tensor] = ops.Reshape()
concat: Callable[[tuple[Tensor, ...]], Tensor] = ops.Concat()
"""Primitives: the functions of these names are graphs of their own, for each tensor."""


def smallest(sums: Iterable[Parameter]) -> tuple[Parameter, ...]:
    small = sorted(
        (total for total in sums if total.size <= SMALL), key=lambda total: total.size
    )
    ends = accumulate(total.size for total in small)
    return tuple(total for total, end in zip(small, ends, strict=True) if end <= JOINED)


class Packed(nn.Cell):  # type: ignore[misc]
    """The sums of one accumulation, for the norms of `gradaccum_mindspore.gradient_sum`."""

    small: Sequence[Parameter]
    others: Sequence[Parameter]
    """Large ones, those of another dtype, and what would be more than `JOINED`."""

    def __init__(self, sums: Sequence[Parameter], dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        small = smallest(total for total in sums if total.dtype == dtype)
        self.joins = len(small) > 1
        joined = {id(total) for total in small} if self.joins else set()
        # A Cell would list them as its own.
        object.__setattr__(self, "small", small)
        object.__setattr__(
            self, "others", tuple(total for total in sums if id(total) not in joined)
        )
        elements = sum(total.size for total in small)
        self.in_rows = elements > ROW
        gap = -elements % ROW if self.in_rows else 0
        self.gap = (Tensor(np.zeros(gap), dtype),) if gap else ()
        """Zeros that fill the last row; the number of elements may be a prime."""

    def construct(self) -> Sums:
        if not self.joins:
            return self.others
        joined = concat((*each(_flat, self.small), *self.gap))
        if self.in_rows:
            joined = reshape(joined, (-1, ROW))
        return (joined, *self.others)


def _flat(total: Parameter) -> Tensor:
    return reshape(total, (-1,))
