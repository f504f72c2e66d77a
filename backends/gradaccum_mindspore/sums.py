"""Primitives over gradient trees: what every event does to tensors, apart from when.

The ``compiled_`` ones run where the state is a tensor (`mindspore.jit`, graph mode) and choose by select; `pynative_sums` has those that
run where it is a Python number. All write with `write` and `add_into` alone: in PyNative ``Tensor.add_`` and its like leave a Parameter
as it was, and a compiled function does not see ``set_data``. A sum is exactly zero while no window is open: its end writes zeros, one pass
a window, so that a micro-batch is one addition and asks nothing about its place. The zeros are made as they are needed: those of
``zeros_like`` are a constant of the compiled graph, which would keep a second buffer of the model's size.

A half-precision sum is worked on in float32 and rounded as it is written: MindSpore has few bfloat16 operators on a CPU, and a factor or a
divisor such as 2^16 is no float16 number.
"""

from __future__ import annotations

from math import prod
from typing import Any

import mindspore as ms
from mindspore import ops
from mindspore.ops import constexpr
from mindspore.ops.auto_generate import inplace_copy

from gradaccum_mindspore.checks import reaches_beyond

ROW = 4096
"""Elements summed up in one go at most, for accuracy and speed: MindSpore's sum over the last axis runs at the speed of memory, one
over all axes takes seven times as long."""
each = ops.HyperMap()
"""``each(function, trees...)``: over the leaves side by side, a tuple of what it returns. Not a loop: the compiler makes of each ``if`` in
one the start of another graph, within that of the ``if`` before, and 200 parameters took it minutes."""


def write(parameter: Any, value: Any) -> None:
    """Assign a tensor of the parameter's dtype, in PyNative and in compiled code."""
    # Assign has no bfloat16 kernel on a CPU. Not Tensor.copy_, whose effect the compiler can overlook.
    if parameter.dtype == ms.bfloat16:
        inplace_copy(parameter, value)
    else:
        ops.assign(parameter, value)


def working_dtype(dtype: Any) -> Any:
    """The dtype to compute in for a sum of `dtype`."""
    return ms.float32 if dtype == ms.float16 or dtype == ms.bfloat16 else dtype


def add_into(total: Any, part: Any) -> None:
    """Add a tensor to a sum, in PyNative and in compiled code."""
    if total.dtype == working_dtype(total.dtype):
        ops.assign_add(total, part)
    else:
        write(total, (total.astype(ms.float32) + part.astype(ms.float32)).astype(total.dtype))


def compiled_add(sums: Any, gradients: Any, factor: Any, usable: Any) -> Any:
    """Add ``factor * gradient`` to each sum; a None adds nothing.

    `factor` and `usable` (bool: whether it adds anything at all) are scalar Tensors, or None for 1 and True.
    """
    return each(ops.partial(_add, factor, usable), sums, gradients)


def _add(factor: Any, usable: Any, total: Any, gradient: Any) -> Any:
    if gradient is None:
        return True
    part = gradient.astype(total.dtype).astype(working_dtype(total.dtype))
    if factor is not None:
        part = compiled_scaled(gradient, factor, total.dtype)
    if usable is not None:
        part = ops.where(usable, part, ops.zeros_like(part))
    add_into(total, part.astype(total.dtype))
    return True


def compiled_scaled(gradient: Any, factor: Any, dtype: Any) -> Any:
    """``factor * gradient`` rounded to `dtype`, in its working dtype; `factor` is a scalar Tensor."""
    work = working_dtype(dtype)
    return (gradient.astype(work) * factor.astype(work)).astype(dtype).astype(work)


def compiled_finite(sums: Any, gradients: Any, factor: Any) -> Any:
    """Whether all of what `compiled_add` would add is free of inf and NaN, a bool Tensor of shape ()."""
    return ops.stack(each(ops.partial(_finite, factor), sums, gradients)).min() > 0


def _finite(factor: Any, total: Any, gradient: Any) -> Any:
    if gradient is None:
        return ops.ones_like(factor)
    return ops.isfinite(compiled_scaled(gradient, factor, total.dtype)).all().astype(factor.dtype)


def compiled_clear(sums: Any, zero: Any) -> Any:
    """Exact zeros by assignment; `zero` is a scalar Tensor."""
    return each(ops.partial(_clear, zero), sums)


def _clear(zero: Any, total: Any) -> Any:
    write(total, ops.broadcast_to(zero.astype(working_dtype(total.dtype)), total.shape).astype(total.dtype))
    return True


def robust_measure(tensors: Any, dtype: Any) -> tuple[Any, Any]:
    """Global 2-norm of `tensors`, and whether every element is finite; in `dtype`, shape ().

    The tensors are divided by their largest magnitude first, as squares may overflow.
    """
    largest = ops.stack(each(ops.partial(_largest, dtype), tensors)).max()
    divisor = ops.where(largest > 0, largest, ops.ones_like(largest))
    # An inf becomes inf / inf = NaN, and max may overlook a NaN: the sum shows both.
    squares = ops.addn(each(ops.partial(_square_over, divisor), tensors))
    return largest * ops.sqrt(squares), ops.isfinite(squares)


def _largest(dtype: Any, tensor: Any) -> Any:
    return ops.abs(tensor.astype(dtype)).max()


def _square_over(divisor: Any, tensor: Any) -> Any:
    return ops.square(tensor.astype(divisor.dtype) / divisor).sum()


def sum_of_squares(tensors: Any, dtype: Any) -> Any:
    """Sum of the squares of all elements, in `dtype`, shape (): first over rows, then over what these gave."""
    return ops.addn(each(ops.partial(_square, dtype), tensors))


def _square(dtype: Any, tensor: Any) -> Any:
    squares = ops.square(tensor.astype(dtype))
    if needs_rows(tensor.shape):
        squares = squares.reshape(-1, row_length(tensor.size))
    if tensor.size > ROW:
        squares = squares.sum(-1)
    return squares.sum()


@constexpr  # type: ignore[untyped-decorator]
def needs_rows(shape: tuple[int, ...]) -> bool:
    """Whether a large tensor has no last axis to sum over as it is; a reshape is a copy."""
    return prod(shape) > ROW and (len(shape) < 2 or not ROW // 128 <= shape[-1] <= ROW)


@constexpr  # type: ignore[untyped-decorator]
def row_length(size: int) -> int:
    """The largest divisor of `size` up to `ROW`."""
    return max(length for length in range(1, ROW + 1) if size % length == 0)


def divide(sums: Any, divisor: Any, dtypes: Any) -> Any:
    """``sum / divisor``, each in the dtype of `dtypes` for the inner optimizer; `divisor` is a scalar Tensor."""
    return each(ops.partial(_divide, divisor), sums, dtypes)


def _divide(divisor: Any, total: Any, dtype: Any) -> Any:
    work = working_dtype(total.dtype)
    return (total.astype(work) / divisor.astype(work)).astype(dtype)


def compiled_fits(sums: Any, divisor: Any, dtypes: Any) -> Any:
    """Whether all of ``sum / divisor`` is finite in its dtype of `dtypes`, a bool Tensor of shape ()."""
    return ops.stack(each(ops.partial(_fits, divisor), sums, dtypes)).min() > 0


def _fits(divisor: Any, total: Any, dtype: Any) -> Any:
    if reaches_beyond(total.dtype, dtype):
        return fits(total, divisor, dtype).astype(divisor.dtype)
    return ops.ones_like(divisor)


def fits(total: Any, divisor: Any, dtype: Any) -> Any:
    """Whether all of ``sum / divisor`` is finite in `dtype`, a bool Tensor of shape (); rounding is monotone, so its largest tells."""
    work = working_dtype(total.dtype)
    largest = ops.abs(total.astype(work)).max() / divisor.astype(work)
    return ops.isfinite(largest.astype(dtype).astype(ms.float32))
