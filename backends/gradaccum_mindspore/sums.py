"""The sums of a window and their arithmetic on MindSpore's operators: add, check, divide, clear.

Functions with ``compiled_`` in their name run where the state is a Tensor (`mindspore.jit`, graph mode) and choose by select;
`pynative_sums` has their counterparts, which run where the state is a Python number.

Only `write` and `add_into` write. In PyNative ``Tensor.add_`` and its like leave a Parameter as it was, and a compiled function does not
see ``set_data``. A sum is exactly zero while no window is open: the window's end writes zeros, in one pass, so a micro-batch is one
addition and need not ask whether it is the first. `compiled_clear` makes the zeros when it needs them: ``zeros_like`` would be a constant
of the graph, a second buffer of the model's size.

Arithmetic on a half-precision sum runs in float32, and the result is rounded as it is written: MindSpore has few bfloat16 operators on a
CPU, and float16 does not hold a factor or a divisor such as 2^16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops.auto_generate import inplace_copy

from gradaccum.kit import accumulate_dtype_error
from gradaccum_mindspore.types import DType, Gradients, Number, Sums

HALF = (ms.float16, ms.bfloat16)
FLOATS = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32, "float64": ms.float64}

each: Callable[..., tuple[Any, ...]] = ops.HyperMap()
"""``each(function, trees...)``: a tuple of `function`'s results for the leaves side by side. No loop: the compiler starts another graph
at each ``if`` in a loop, inside the graph of the ``if`` before, and took minutes for 200 parameters."""
cast: Callable[[Tensor, DType], Tensor] = ops.Cast()
"""``cast(tensor, dtype)``: the tensor itself if it has the dtype. One operator; ``Tensor.astype`` is four graphs for each tensor, which the
compiler takes apart again."""


def hidden_parameter(value: Tensor, name: str) -> Parameter:
    """A Parameter that MindSpore saves and never trains."""
    return Parameter(value, name=name, requires_grad=False)


def where(condition: Tensor, a: Number, b: Number) -> Tensor:
    """`mindspore.ops.where`, as a function the compiler can follow."""
    return ops.where(condition, a, b)


def sum_dtype(own: DType, asked: object) -> DType:
    """The dtype of a sum of gradients of dtype `own`.

    Args:
        own: the gradients' dtype.
        asked: the option ``accumulate_dtype``: a MindSpore, NumPy or named dtype, or None.

    Raises:
        ArgumentTypeError, ArgumentValueError: `asked` is no floating dtype.
    """
    if asked is None:
        return ms.float32 if own in HALF else own
    name = asked if isinstance(asked, str) else getattr(asked, "__name__", None) or str(asked)
    for key, dtype in FLOATS.items():
        if asked is dtype or asked == dtype or name == key:
            return dtype
    raise accumulate_dtype_error(asked)


def working_dtype(dtype: DType) -> DType:
    """The dtype to compute in for a sum of `dtype`."""
    return ms.float32 if dtype == ms.float16 or dtype == ms.bfloat16 else dtype


def write(parameter: Parameter, value: Tensor) -> None:
    """Assign a tensor of the parameter's dtype, in PyNative and in compiled code."""
    # Assign has no bfloat16 kernel on a CPU. Not Tensor.copy_, whose effect the compiler can overlook.
    if parameter.dtype == ms.bfloat16:
        inplace_copy(parameter, value)
    else:
        ops.assign(parameter, value)


def add_into(total: Parameter, part: Tensor) -> None:
    """Add a tensor to a sum, in PyNative and in compiled code."""
    if total.dtype == working_dtype(total.dtype):
        ops.assign_add(total, part)
    else:
        write(total, cast(cast(total, ms.float32) + cast(part, ms.float32), total.dtype))


def compiled_add(sums: Sums, gradients: Gradients, factor: Tensor | None, adds: Tensor | None) -> tuple[bool, ...]:
    """Add ``factor * gradient`` to each sum; a None adds nothing.

    Args:
        sums: the sums.
        gradients: one per sum.
        factor: scalar; None for 1.
        adds: bool, whether the micro-batch adds anything at all; None for True.
    """
    return each(ops.partial(_add, factor, adds), sums, gradients)


def _add(factor: Tensor | None, adds: Tensor | None, total: Parameter, gradient: Tensor | None) -> bool:
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
    """``factor * gradient`` rounded to `dtype`, in its working dtype; `factor` is a scalar."""
    work = working_dtype(dtype)
    return cast(cast(cast(gradient, work) * cast(factor, work), dtype), work)


def compiled_finite(sums: Sums, gradients: Gradients, factor: Tensor) -> Tensor:
    """Whether everything that `compiled_add` would add is finite, a bool Tensor of shape ()."""
    return ops.stack(each(ops.partial(_finite, factor), sums, gradients)).min() > 0


def _finite(factor: Tensor, total: Parameter, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return ops.ones_like(factor)
    return cast(ops.isfinite(compiled_scaled(gradient, factor, total.dtype)).all(), factor.dtype)


def compiled_clear(sums: Sums, zero: Tensor) -> tuple[bool, ...]:
    """Exact zeros by assignment; `zero` is a scalar."""
    return each(ops.partial(_clear, zero), sums)


def _clear(zero: Tensor, total: Parameter) -> bool:
    write(total, cast(ops.broadcast_to(cast(zero, working_dtype(total.dtype)), total.shape), total.dtype))
    return True


def divide(sums: Sums, divisor: Tensor, dtypes: Sequence[DType]) -> tuple[Tensor, ...]:
    """``sum / divisor``, each in the dtype of `dtypes` for the inner optimizer; `divisor` is a scalar."""
    return each(ops.partial(_divide, divisor), sums, dtypes)


def _divide(divisor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    work = working_dtype(total.dtype)
    return cast(cast(total, work) / cast(divisor, work), dtype)


def multiply(sums: Sums, factor: Tensor, dtypes: Sequence[DType]) -> tuple[Tensor, ...]:
    """``sum * factor``, as `divide` hands out its quotients. MindSpore's division takes four times as long on a CPU."""
    return each(ops.partial(_multiply, factor), sums, dtypes)


def _multiply(factor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    work = working_dtype(total.dtype)
    return cast(cast(total, work) * cast(factor, work), dtype)


def narrows(own: DType, handed: DType) -> bool:
    """Whether a finite sum of dtype `own` can be an inf in the dtype `handed`; for the compiler to follow too."""
    loses_range: bool = handed == ms.float16 or (own == ms.float64 and handed != ms.float64)
    return loses_range


def fits(total: Parameter, divisor: Tensor, dtype: DType) -> Tensor:
    """Whether all of ``sum / divisor`` is finite in `dtype`, a bool Tensor of shape ().

    Rounding is monotone, so the largest element tells.
    """
    work = working_dtype(total.dtype)
    largest = ops.abs(cast(total, work)).max() / cast(divisor, work)
    return ops.isfinite(cast(cast(largest, dtype), ms.float32))


def compiled_fits(sums: Sums, divisor: Tensor, dtypes: Sequence[DType]) -> Tensor:
    """`fits` for all sums together, each in its dtype of `dtypes`."""
    return ops.stack(each(ops.partial(_fits, divisor), sums, dtypes)).min() > 0


def _fits(divisor: Tensor, total: Parameter, dtype: DType) -> Tensor:
    if narrows(total.dtype, dtype):
        return cast(fits(total, divisor, dtype), divisor.dtype)
    return ops.ones_like(divisor)
