"""The sums' arithmetic in PyNative: NumPy works on what lies in the host's memory.

On a CPU NumPy reads a tensor's memory without a copy. Some of MindSpore's operators run where they are called, such as ``assign``,
``assign_add`` and ``zeros_like``. MindSpore hands most others to another thread and waits for it: tenths of a millisecond, where NumPy
takes microseconds. So the first kind and NumPy do all the work here. MindSpore's operators work on tensors of another device, and on
bfloat16, which NumPy does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from gradaccum_mindspore.sums import divide, working_dtype, write
from gradaccum_mindspore.types import Array, DType, Gradients, Sums

ARRAYS: dict[DType, np.dtype[np.floating[Any]]] = {
    ms.float16: np.dtype("float16"),
    ms.float32: np.dtype("float32"),
    ms.float64: np.dtype("float64"),
}


def array_of(tensor: Tensor) -> Array | None:
    """The memory of `tensor` if NumPy can work on it; waits until it is computed."""
    if tensor.dtype in ARRAYS and tensor.device == "CPU":
        array: Array = tensor.asnumpy()
        return array
    return None


def scaled(gradient: Tensor, factor: float, dtype: DType) -> Tensor:
    """``factor * gradient`` rounded to `dtype`."""
    if factor == 1 and gradient.dtype == dtype:
        return gradient
    work, array = working_dtype(dtype), array_of(gradient)
    if array is not None and dtype in ARRAYS:
        return _tensor(array.astype(ARRAYS[work]) * ARRAYS[work].type(factor), dtype)
    # A Tensor, because MindSpore rounds a Python number to float32.
    return _cast(ops.mul(_cast(gradient, work), Tensor(factor, work)), dtype)


def parts(sums: Sums, gradients: Gradients, factor: float) -> Iterator[tuple[Parameter, Tensor]]:
    """Each sum and the ``factor * gradient`` to add to it, computed one at a time; None adds nothing."""
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            yield total, scaled(gradient, factor, total.dtype)


def all_finite(tensor: Tensor) -> bool:
    """Whether every element is finite."""
    array = array_of(tensor)
    return bool(ops.isfinite(tensor).all().asnumpy() if array is None else np.isfinite(array).all())


def divided(sums: Sums, divisor: float, dtypes: Sequence[DType], float_dtype: DType) -> tuple[Tensor, ...]:
    """``sum / divisor``, each in the dtype of `dtypes` for the inner optimizer; `divisor` is rounded to `float_dtype`."""
    rounded = ARRAYS[float_dtype].type(divisor)
    return tuple(_quotient(total, rounded, dtype) for total, dtype in zip(sums, dtypes, strict=True))


def spoil(sums: Sums) -> None:
    """Make the smallest sum NaN."""
    total = min(sums, key=lambda each: each.size)
    write(total, Tensor(np.full(total.shape, math.nan), total.dtype))


def clear(sums: Sums) -> None:
    """Exact zeros by assignment."""
    for total in sums:
        write(total, ops.zeros_like(total))


def _cast(tensor: Tensor, dtype: DType) -> Tensor:
    """`tensor` itself if it has that dtype, else a copy that has."""
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
