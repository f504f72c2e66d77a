"""How many micro-batches a window holds, or which weight, if a function of the user's says so.

Python code calls it with an int, compiled code with an int32 Tensor. A wrong value raises if it is known: outside compiled code, and inside
if it is a constant. A Tensor in compiled code must have an integer dtype, and a size below 1 makes the window an overflow.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError
from gradaccum.kit import Options, Schedule, UntilWeight, explain, is_known, require_steps, select, steps_at
from gradaccum_mindspore.types import DType, Sizes

INTEGERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")


def window_size(steps: Schedule, optimizer_step: int) -> Schedule:
    """The size of the window that follows update number `optimizer_step`: an int, an `UntilWeight` of one, None if the caller closes it.

    Raises:
        ArgumentTypeError, ArgumentValueError: a callable `steps` gave no int >= 1.
    """
    if is_known(steps):
        size: Schedule = steps_at(steps, optimizer_step, select)
        return size
    function: Any = sizes_of(steps)
    try:
        given = function(optimizer_step)
    except Exception:  # It may consist of operators that take Tensors only, for compiled code.
        given = function(Tensor(optimizer_step, ms.int32))
    number = given.item() if isinstance(given, Tensor) else given
    return require_steps(UntilWeight(number) if isinstance(steps, UntilWeight) else number, optimizer_step, steps)


def sizes_of(steps: Schedule) -> Sizes | None:
    """The numbers in a schedule, of micro-batches or of weights."""
    return steps.weight if isinstance(steps, UntilWeight) else steps


def size_of_code(code: int) -> Schedule:
    """The size that has this `gradaccum.kit.code_of`."""
    return UntilWeight(-code) if code < 0 else code or None


def with_known_size(options: Options, optimizer_step: int) -> Options:
    """`options` with the size of one window in place of a schedule."""
    return options._replace(steps=window_size(options.steps, optimizer_step))


@constexpr  # type: ignore[untyped-decorator]
def check_constant_size(size: int | None, until_weight: bool) -> None:
    """Check the constant that a function returned while MindSpore compiled it. A number that the running program computes comes as None."""
    if size is not None:
        asked, schedule = (UntilWeight(size), UntilWeight(1)) if until_weight else (size, 1)
        require_steps(asked, 0, schedule)


@constexpr  # type: ignore[untyped-decorator]
def check_size_dtype(dtype: DType, until_weight: bool) -> None:
    """Raise `ArgumentTypeError` unless a size that is no constant is an integer."""
    if str(dtype) not in INTEGERS:
        argument, what = ("until_weight(...)", "weight") if until_weight else ("steps", "number of micro-batches")
        found, fix = f"a Tensor of {dtype}", f"Return the {what} of that window, rounded: optimizer_step // 2 + 1."
        raise explain(ArgumentTypeError, f"{argument}(optimizer_step)", expected="an int >= 1", found=found, fix=fix)
