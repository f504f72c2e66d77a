"""How many micro-batches a window holds, if a function of the user's says so.

Python code calls it with an int, compiled code with an int32 Tensor. A wrong value raises if it is known: outside compiled code, and inside
if it is a constant. A Tensor in compiled code must have an integer dtype, and a size below 1 makes the window an overflow.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError
from gradaccum.kit import Options, Schedule, explain, require_steps, select, steps_at
from gradaccum_mindspore.types import DType

INTEGERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")


def window_size(steps: Schedule, optimizer_step: int) -> int | None:
    """The size of the window that follows update number `optimizer_step`; None if the caller closes it.

    Raises:
        ArgumentTypeError, ArgumentValueError: a callable `steps` gave no int >= 1.
    """
    if not callable(steps):
        size: int | None = steps_at(steps, optimizer_step, select)
        return size
    try:
        given = steps(optimizer_step)
    except Exception:  # It may consist of operators that take Tensors only, for compiled code.
        given = steps(Tensor(optimizer_step, ms.int32))
    return require_steps(given.item() if isinstance(given, Tensor) else given, optimizer_step)


def with_known_size(options: Options, optimizer_step: int) -> Options:
    """`options` with the size of one window in place of a schedule."""
    return options._replace(steps=window_size(options.steps, optimizer_step))


@constexpr  # type: ignore[untyped-decorator]
def check_constant_size(size: object) -> int:
    """The constant that a function returned while MindSpore compiled it, checked."""
    return require_steps(size, 0)


@constexpr  # type: ignore[untyped-decorator]
def check_size_dtype(dtype: DType) -> None:
    """Raise `ArgumentTypeError` unless a size that is no constant is an integer."""
    if str(dtype) not in INTEGERS:
        found, fix = f"a Tensor of {dtype}", "Return the number of micro-batches of that window, rounded: optimizer_step // 2 + 1."
        raise explain(ArgumentTypeError, "steps(optimizer_step)", expected="an int >= 1", found=found, fix=fix)
