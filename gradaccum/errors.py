"""The errors that gradaccum raises. Every message names the argument, says what was
expected and what was given, and ends with one way to correct the call:
``argument: expected <condition>; got <value>. <correction>.`` The page that lists all
errors is generated from these messages.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from contextlib import suppress
from typing import SupportsFloat, SupportsIndex, cast


class GradAccumError(Exception):
    """The base class of gradaccum's errors. A call that raises one of them leaves the
    open window's gradient sum intact, unless the call was ending the window.
    """


class ArgumentValueError(GradAccumError, ValueError):
    """An argument has the right type, but an invalid value."""


class ArgumentTypeError(GradAccumError, TypeError):
    """An argument has the wrong type."""


class GradientError(GradAccumError, ValueError):
    """The gradients do not match the parameters in structure, shape or dtype."""


class CheckpointError(GradAccumError, ValueError):
    """The saved state does not match the parameters, or it contains an open window that
    was accumulated with different options.
    """


class UsageError(GradAccumError, RuntimeError):
    """The call is not allowed at this point in the program, because it would silently
    give a wrong result.
    """


class GradAccumWarning(UserWarning):
    """The training loop is valid, but most likely does not do what its author intended.
    Each cause is reported once per wrapped optimizer.
    """


class BackendNotFoundError(GradAccumError, ImportError):
    """The requested backend does not exist, or its framework is not installed."""


# Checks of arguments. No check accepts a bool or NaN where a number is expected.


def require_int(
    argument: str, value: object, *, at_least: int, fix: str | None = None
) -> int:
    """Return `value` as an int. Raise unless it is an integer >= `at_least`. A
    framework's integer scalars are accepted, but bools and traced values are rejected.
    """
    number: int | None = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(cast(SupportsIndex, value))
    if number is not None and number >= at_least:
        return int(number)
    kind = ArgumentTypeError if number is None else ArgumentValueError
    fix = fix or f"For example, write {argument}={max(at_least, 4)}."
    raise kind(
        f"{argument}: expected an int >= {at_least}; got {value!r}"
        f" ({type(value).__name__}). {fix}"
    )


def require_number(
    argument: str, value: object, *, or_equal: bool = False, fix: str | None = None
) -> float:
    """Return `value` as a float. Raise unless it is finite and > 0 (or >= 0 if
    `or_equal` is true).
    """
    # For an array with several elements, or a traced value, float() raises one of the
    # errors that are caught below. Do not use ``contextlib.suppress``: it takes longer
    # than the rest of this function, which runs once per micro-batch.
    try:
        is_text = isinstance(value, (bool, str))
        number = None if is_text else float(cast(SupportsFloat, value))
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is not None and (0 < number < math.inf or (or_equal and number == 0)):
        return number
    kind = ArgumentTypeError if number is None else ArgumentValueError
    sign = ">=" if or_equal else ">"
    fix = fix or f"For example, write {argument}=1."
    raise kind(
        f"{argument}: expected a finite number {sign} 0; got {value!r}"
        f" ({type(value).__name__}). {fix}"
    )


def require_bool(argument: str, value: object) -> bool:
    """Return `value`. Raise `ArgumentTypeError` unless it is True or False."""
    if isinstance(value, bool):
        return value
    raise ArgumentTypeError(
        f"{argument}: expected True or False; got {value!r} ({type(value).__name__})."
        f" Write {argument}=True."
    )


def require_choice(argument: str, value: object, choices: Collection[str]) -> str:
    """Return `value`. Raise unless it is one of `choices`."""
    if isinstance(value, str) and value in choices:
        return value
    kind = ArgumentValueError if isinstance(value, str) else ArgumentTypeError
    raise kind(
        f"{argument}: expected one of {', '.join(map(repr, choices))}; got {value!r}"
        f" ({type(value).__name__}). Write {argument}={next(iter(choices))!r}."
    )


def require_weight(weight: object) -> float:
    """Return `weight`, the weight of a micro-batch, as a float. Raise unless it is
    finite and >= 0.
    """
    return require_number("weight", weight, or_equal=True)
