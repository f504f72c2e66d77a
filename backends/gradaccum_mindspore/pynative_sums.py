"""Primitives over gradient trees in PyNative: what lies in the host's memory is worked on by NumPy.

On a CPU a tensor's memory is an array that NumPy reads without a copy. Some of MindSpore's operators run where they are called, such as
``assign``, ``assign_add`` and ``zeros_like``; most are handed to another thread, and whatever comes next waits for that: tenths of a
millisecond, where NumPy takes microseconds. So the first kind and NumPy do all the work here. What lies on another device, or is
bfloat16, which NumPy does not have, MindSpore's operators work on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from gradaccum_mindspore.sums import ROW, divide, robust_measure, sum_of_squares, working_dtype, write

ARRAYS: dict[Any, Any] = {ms.float16: np.dtype("float16"), ms.float32: np.dtype("float32"), ms.float64: np.dtype("float64")}

Array = NDArray[Any]


def array_of(tensor: Any) -> Array | None:
    """The memory of `tensor` if NumPy can work on it; waits for what computes it."""
    if tensor.dtype in ARRAYS and tensor.device == "CPU":
        array: Array = tensor.asnumpy()
        return array
    return None


def scaled(gradient: Any, factor: float, dtype: Any) -> Any:
    """``factor * gradient`` rounded to `dtype`."""
    if factor == 1 and gradient.dtype == dtype:
        return gradient
    work, array = working_dtype(dtype), array_of(gradient)
    if array is not None and dtype in ARRAYS:
        return _tensor(array.astype(ARRAYS[work]) * ARRAYS[work].type(factor), dtype)
    # A Tensor, because MindSpore rounds a Python number to float32.
    return _cast(ops.mul(_cast(gradient, work), Tensor(factor, work)), dtype)


def parts(sums: Sequence[Any], gradients: Sequence[Any], factor: float) -> Iterator[tuple[Any, Any]]:
    """Each sum and the ``factor * gradient`` to be added to it, made as it is asked for; none for a None."""
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            yield total, scaled(gradient, factor, total.dtype)


def all_finite(tensor: Any) -> bool:
    """Whether every element is finite."""
    array = array_of(tensor)
    return bool(ops.isfinite(tensor).all().asnumpy() if array is None else np.isfinite(array).all())


def measure(tensors: Sequence[Any], dtype: Any) -> tuple[float, bool]:
    """Global 2-norm of `tensors`, and whether every element is finite."""
    squares = math.fsum(squared(tensor, dtype) for tensor in tensors)
    if math.isfinite(squares):
        return math.sqrt(squares), True
    norm, finite = robust_measure(tensors, dtype)
    return norm.asnumpy().item(), finite.asnumpy().item()


def squared(tensor: Any, dtype: Any) -> float:
    """Sum of the squares of all elements, worked out in `dtype`."""
    array = array_of(tensor)
    if array is None:
        return float(sum_of_squares((tensor,), dtype).asnumpy())
    flat = array.reshape(-1).astype(ARRAYS[dtype], copy=False)
    rows, rest = flat[: flat.size // ROW * ROW].reshape(-1, ROW), flat[flat.size // ROW * ROW :]
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.matmul(rows[:, None, :], rows[:, :, None]).sum(dtype=np.float64) + np.dot(rest, rest))


def divided(sums: Sequence[Any], divisor: float, dtypes: Sequence[Any], float_dtype: Any) -> tuple[Any, ...]:
    """``sum / divisor``, each in the dtype of `dtypes` for the inner optimizer; `float_dtype` is what the divisor is rounded to."""
    rounded = ARRAYS[float_dtype].type(divisor)
    return tuple(_quotient(total, rounded, dtype) for total, dtype in zip(sums, dtypes, strict=True))


def spoil(sums: Sequence[Any]) -> None:
    """Make one sum NaN, the smallest."""
    total = min(sums, key=lambda each: each.size)
    write(total, Tensor(np.full(total.shape, math.nan), total.dtype))


def clear(sums: Sequence[Any]) -> None:
    """Exact zeros by assignment."""
    for total in sums:
        write(total, ops.zeros_like(total))


def _cast(tensor: Any, dtype: Any) -> Any:
    """`tensor` itself if it has that dtype, else a copy that has."""
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _quotient(total: Any, divisor: Any, dtype: Any) -> Any:
    array = array_of(total)
    if array is None or dtype not in ARRAYS:
        return divide((total,), Tensor(divisor), (dtype,))[0]
    work = ARRAYS[working_dtype(total.dtype)]
    return _tensor(array.astype(work, copy=False) / work.type(divisor), dtype)


def _tensor(values: Any, dtype: Any) -> Any:
    # NumPy makes a number of a product of arrays without axes.
    return Tensor.from_numpy(np.asarray(values, ARRAYS[dtype]))
