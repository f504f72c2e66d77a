"""The arithmetic on a window's gradient sums: adding, checking for non-finite values,
dividing, clearing, and the global 2-norm.

Functions whose names begin with ``compiled_`` run in compiled code (`mindspore.jit` or
graph mode). `scaled`, `all_finite`, `divided`, `clear` and `norm_of` run in PyNative
mode. In PyNative mode, a MindSpore operator takes a few tenths of a millisecond,
because MindSpore runs it in another thread. So on a CPU most of the PyNative functions
use NumPy, which reads a tensor's memory without a copy and takes only microseconds. On
other devices, and for bfloat16, the functions use MindSpore's operators.

Only `write` and `add_into` change a sum, because other ways are unreliable: in PyNative
mode ``Tensor.add_`` and similar methods leave a Parameter unchanged, and a compiled
function does not see the effect of ``set_data``. The sums are set to zero at the end of
a window, so adding a micro-batch is a single addition. `compiled_clear` computes the
zeros, because ``zeros_like`` would add a constant as large as the model to the graph.

Arithmetic on a half-precision sum runs in float32, and the result is rounded when it is
written. This is necessary because MindSpore has few bfloat16 operators on a CPU, and
because float16 cannot represent a factor such as 2^16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.ops import constexpr
from mindspore.ops.auto_generate import inplace_copy
from numpy.typing import NDArray

from gradaccum.kit import accumulate_dtype_error

Array = NDArray[Any]
"""A NumPy array with the values of a Tensor."""
DType: TypeAlias = ms.Type
"""A MindSpore dtype, such as ``mindspore.float32``."""
Shape = tuple[int, ...]
Number: TypeAlias = float | Tensor
"""A Python number or a one-element Tensor."""
Sums = Sequence[Parameter]
"""One gradient sum for each parameter of the model, in the order of the parameters."""
Gradients = Sequence[Tensor | None]
"""One gradient for each parameter of the model, in the order of the parameters. The
entry for a parameter without a gradient is None.
"""


HALF = (ms.float16, ms.bfloat16)
FLOATS = {
    "float16": ms.float16,
    "bfloat16": ms.bfloat16,
    "float32": ms.float32,
    "float64": ms.float64,
}

LIMITS = {
    ms.float16: (2.0**-10, 2.0**-24),
    ms.bfloat16: (2.0**-7, 2.0**-133),
    ms.float32: (2.0**-23, 2.0**-149),
    ms.float64: (2.0**-52, 5e-324),
}
"""For each dtype, its machine epsilon and its smallest positive (subnormal) number."""

map_over: Callable[..., tuple[Any, ...]] = ops.HyperMap()
"""``map_over(function, trees...)`` applies `function` to corresponding leaves, and
returns the results as a tuple. It is used instead of a loop, because a loop with an
``if`` took minutes to compile for 200 parameters.
"""
cast: Callable[[Tensor, DType], Tensor] = ops.Cast()
"""``cast(tensor, dtype)`` returns the tensor itself if it already has the dtype. A call
compiles to one operator, whereas ``Tensor.astype`` compiles to four graphs.
"""
reshape: Callable[[Tensor, Shape], Tensor] = ops.Reshape()
concat: Callable[[tuple[Tensor, ...]], Tensor] = ops.Concat()


def hidden_parameter(value: Tensor, name: str) -> Parameter:
    """Return a Parameter that MindSpore saves in checkpoints but never trains."""
    return Parameter(value, name=name, requires_grad=False)


def where(condition: Tensor, a: Number, b: Number) -> Tensor:
    """Call `mindspore.ops.where`. Compiled code can pass this plain function as an
    argument, but not `mindspore.ops.where` itself.
    """
    return ops.where(condition, a, b)


def sum_dtype(dtype: DType, accumulate_dtype: object) -> DType:
    """Return the dtype in which gradients of a parameter of `dtype` are added up."""
    if accumulate_dtype is None:
        return ms.float32 if dtype in HALF else dtype
    name = str(getattr(accumulate_dtype, "__name__", accumulate_dtype)).lower()
    if name in FLOATS:
        return FLOATS[name]
    raise accumulate_dtype_error(accumulate_dtype)


def working_dtype(dtype: DType) -> DType:
    return ms.float32 if dtype == ms.float16 or dtype == ms.bfloat16 else dtype


def write(parameter: Parameter, value: Tensor) -> None:
    """Assign `value` to `parameter`. Both must have the same dtype. This works in
    PyNative mode and in compiled code.
    """
    # `ops.assign` does not support bfloat16 on a CPU. `Tensor.copy_` is not used,
    # because the compiler can overlook its effect.
    if parameter.dtype == ms.bfloat16:
        inplace_copy(parameter, value)
    else:
        ops.assign(parameter, value)


def write_numbers(
    parameter: Parameter, numbers: SupportsFloat | Sequence[float]
) -> None:
    """Assign Python numbers to a Parameter, outside compiled code."""
    # NumPy is used, because Tensor(numbers, dtype) would take ten times as long.
    dtype = str(parameter.dtype).lower()
    with np.errstate(over="ignore"):
        array = np.array(numbers, dtype)
    ops.assign(parameter, Tensor.from_numpy(array))


def add_into(total: Parameter, part: Tensor) -> None:
    if total.dtype == working_dtype(total.dtype):
        ops.assign_add(total, part)
    else:
        # `addn` is used because, unlike +, it does not broadcast a gradient whose shape
        # differs from the parameter's. A compiled bprop may return such a gradient.
        wide = ops.addn((cast(total, ms.float32), cast(part, ms.float32)))
        write(total, cast(wide, total.dtype))


def narrows(sum_dtype: DType, gradient_dtype: DType) -> bool:
    """True if a finite sum can become infinite when it is converted to the gradient's
    dtype. Compiled code calls this function too.
    """
    loses_range: bool = gradient_dtype == ms.float16 or (
        sum_dtype == ms.float64 and gradient_dtype != ms.float64
    )
    return loses_range


def fits(total: Parameter, divisor: Tensor, dtype: DType) -> Tensor:
    """Return a bool Tensor of shape (): True if every element of ``total / divisor`` is
    finite in `dtype`.

    It is enough to check the element of largest magnitude, because rounding is
    monotonic.
    """
    work = working_dtype(total.dtype)
    largest = ops.abs(cast(total, work)).max() / cast(divisor, work)
    return ops.isfinite(cast(cast(largest, dtype), ms.float32))


# The following functions run in compiled code, where a scalar is a Tensor of shape ().


def compiled_add(
    sums: Sums, gradients: Gradients, factor: Tensor | None, is_added: Tensor | None
) -> tuple[bool, ...]:
    """Add ``factor * gradient`` to each sum if `is_added` is true. `factor=None` means
    1, and `is_added=None` means True.
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
    """Return ``factor * gradient`` rounded to `dtype`. If `dtype` is a half-precision
    dtype, the rounded values are returned as float32.
    """
    work = working_dtype(dtype)
    return cast(cast(cast(gradient, work) * cast(factor, work), dtype), work)


def compiled_finite(sums: Sums, gradients: Gradients, factor: Tensor) -> Tensor:
    """True if every gradient is finite after it is multiplied by `factor` and rounded
    to the dtype of its sum.
    """
    return ops.stack(map_over(ops.partial(_finite, factor), sums, gradients)).min() > 0


def _finite(factor: Tensor, total: Parameter, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return ops.ones_like(factor)
    part = compiled_scaled(gradient, factor, total.dtype)
    return cast(ops.isfinite(part).all(), factor.dtype)


def compiled_clear(sums: Sums, zero: Tensor) -> tuple[bool, ...]:
    """Set every element of each sum to exactly 0."""
    return map_over(ops.partial(_clear, zero), sums)


def _clear(zero: Tensor, total: Parameter) -> bool:
    zeros = ops.broadcast_to(cast(zero, working_dtype(total.dtype)), total.shape)
    write(total, cast(zeros, total.dtype))
    return True


def compiled_divided(
    sums: Sums, divisor: Tensor, dtypes: Sequence[DType]
) -> tuple[Tensor, ...]:
    """Return each sum divided by `divisor` and converted to the corresponding dtype in
    `dtypes`.
    """
    return map_over(ops.partial(_divided, divisor), sums, dtypes)


def _divided(divisor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    work = working_dtype(total.dtype)
    return cast(cast(total, work) / cast(divisor, work), dtype)


def compiled_fits(sums: Sums, divisor: Tensor, dtypes: Sequence[DType]) -> Tensor:
    """True if no sum becomes infinite when it is divided by `divisor` and converted to
    the corresponding dtype in `dtypes`.
    """
    return ops.stack(map_over(ops.partial(_fits, divisor), sums, dtypes)).min() > 0


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
    """Return a NumPy array that shares the memory of `tensor`, or None if the dtype or
    the device does not allow this. The call waits until `tensor` has been computed.
    """
    if tensor.dtype in ARRAYS and tensor.device == "CPU":
        array: Array = tensor.asnumpy()
        return array
    return None


def tensor_of(array: Array, dtype: DType) -> Tensor:
    # `asarray` is needed, because in NumPy the product of two arrays of shape () is a
    # number.
    return Tensor.from_numpy(np.asarray(array, ARRAYS[dtype]))


def scaled(gradient: Tensor, factor: float, dtype: DType) -> Tensor:
    """Return ``factor * gradient`` rounded to `dtype`."""
    if factor == 1 and gradient.dtype == dtype:
        return gradient
    work = working_dtype(dtype)
    array = array_of(gradient)
    if array is not None and dtype in ARRAYS:
        product = array.astype(ARRAYS[work]) * ARRAYS[work].type(factor)
        return tensor_of(product, dtype)
    # The factor is a Tensor, because MindSpore rounds a Python number to float32.
    return cast(cast(gradient, work) * Tensor(factor, work), dtype)


def all_finite(tensor: Tensor) -> bool:
    array = array_of(tensor)
    if array is None:
        return bool(ops.isfinite(tensor).all().asnumpy())
    return bool(np.isfinite(array).all())


def divided(
    sums: Sums, divisor: float, dtypes: Sequence[DType], float_dtype: DType
) -> tuple[Tensor, ...]:
    """Return each sum divided by `divisor` and converted to the corresponding dtype in
    `dtypes`. `divisor` is first rounded to `float_dtype`.
    """
    rounded_divisor = ARRAYS[float_dtype].type(divisor)
    pairs = zip(sums, dtypes, strict=True)
    return tuple(_quotient(total, rounded_divisor, dtype) for total, dtype in pairs)


def _quotient(total: Parameter, divisor: np.floating[Any], dtype: DType) -> Tensor:
    array = array_of(total)
    if array is None or dtype not in ARRAYS:
        return _divided(Tensor(divisor), total, dtype)
    work = ARRAYS[working_dtype(total.dtype)]
    return tensor_of(np.divide(array, work.type(divisor), dtype=work), dtype)


def clear(sums: Sums) -> None:
    for total in sums:
        write(total, ops.zeros_like(total))


def norm_of(sums: Sums, dtype: DType) -> float:
    """Return the 2-norm over all sums. It is inf or NaN if an element is inf or NaN."""
    # In float64 the square of a float32 number neither overflows nor underflows.
    squares = 0.0
    for total in sums:
        array = array_of(total)
        if array is None:
            return float(compiled_norm(sums, dtype).asnumpy())
        flat = array.reshape(-1)
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK].astype(np.float64)
            squares += float(np.dot(chunk, chunk))
    return math.sqrt(squares)


CHUNK = 2**20
"""The number of elements of a sum that are converted to float64 at a time."""


# Compiled code computes the norm in two passes, because the squares of float32 numbers
# may overflow or underflow. The first pass finds the largest magnitude. The second pass
# divides by it before squaring.


ROW = 4096
"""The maximum length of the rows into which a tensor is reshaped before it is summed.
In MindSpore, a sum over all axes takes seven times as long as a sum over the last axis.
"""


PACKED = 2**20
"""If all sums together have at most this many elements, their norm is computed from one
combined tensor, because launching an operator on a small tensor takes longer than the
computation itself.
"""


def compiled_norm(sums: Sums, dtype: DType) -> Tensor:
    """Return the 2-norm over all sums, in `dtype`. It is inf or NaN if any element is
    not finite.
    """
    if number_of_elements(map_over(shape_of, sums)) <= PACKED:
        sums = (packed_rows(sums, dtype),)
    largest = ops.stack(map_over(ops.partial(_largest, dtype), sums)).max()
    divisor = ops.where(largest > 0, largest, ops.ones_like(largest))
    # If an element is inf, the division turns it into NaN. If an element is NaN, `max`
    # may overlook it. In either case the sum of squares is NaN.
    squares = ops.addn(map_over(ops.partial(_squares, divisor), sums))
    return largest * ops.sqrt(squares)


@constexpr  # type: ignore[untyped-decorator]
def number_of_elements(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def shape_of(tensor: Tensor | None) -> Shape:
    return () if tensor is None else tensor.shape


def dtype_of(tensor: Tensor | None) -> DType | None:
    return None if tensor is None else tensor.dtype


def packed_rows(sums: Sums, dtype: DType) -> Tensor:
    """Concatenate the elements of all sums, and return them as a matrix with rows of
    length `ROW`. The last row is padded with zeros.
    """
    size = number_of_elements(map_over(shape_of, sums))
    flat = map_over(ops.partial(_flat, dtype), sums)
    return concat((*flat, zeros_to_full_rows(size, dtype))).reshape(-1, ROW)


def _flat(dtype: DType, total: Parameter) -> Tensor:
    return reshape(cast(total, dtype), (-1,))


@constexpr  # type: ignore[untyped-decorator]
def zeros_to_full_rows(size: int, dtype: DType) -> Tensor:
    return Tensor(np.zeros(ROW - size % ROW), dtype)


def _largest(dtype: DType, total: Parameter) -> Tensor:
    magnitudes = ops.abs(cast(total, dtype))
    if magnitudes.size > ROW:
        rows = magnitudes.reshape(-1, row_length(magnitudes.size))
        # In MindSpore 2.10 on a CPU, ReduceMax would take nine times as long.
        _, magnitudes = ops.ArgMaxWithValue(axis=1)(rows)
    return magnitudes.max()


def _squares(divisor: Tensor, total: Parameter) -> Tensor:
    squares = ops.square(cast(total, divisor.dtype) / divisor)
    if squares.size > ROW:
        squares = squares.reshape(-1, row_length(squares.size)).sum(1)
    return squares.sum()


@constexpr  # type: ignore[untyped-decorator]
def row_length(size: int) -> int:
    return max(length for length in range(1, ROW + 1) if size % length == 0)
