"""The errors that a user can meet: each names the argument, the expected value, the
given value and the fix.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from contextlib import suppress
from typing import SupportsFloat, SupportsIndex, TypeVar, cast


class GradAccumError(Exception):
    """Any error raised by gradaccum. The sum of the open window survives it."""


class ArgumentValueError(GradAccumError, ValueError):
    """An argument of the right type with a value that makes no sense."""


class ArgumentTypeError(GradAccumError, TypeError):
    """An argument of the wrong type."""


class GradientError(GradAccumError, ValueError):
    """A gradient tree of another structure, shape or dtype than the parameters."""


class CheckpointError(GradAccumError, ValueError):
    """A saved state of other parameters or of another window shape."""


class UsageError(GradAccumError, RuntimeError):
    """A call that would make the result silently wrong at this point."""


class GradAccumWarning(UserWarning):
    """A loop that is right as it stands, and most likely not what its author means.
    Each cause is said once per wrapped optimizer.
    """


class BackendNotFoundError(GradAccumError, ImportError):
    """No backend for this name, or its framework is not installed."""


E = TypeVar("E", bound=GradAccumError)


def explain(
    kind: type[E],
    argument: str,
    *,
    expected: str,
    fix: str,
    got: object = None,
    found: str | None = None,
) -> E:
    """Return an error in the common shape: ``argument: expected ...; got .... fix``.

    Args:
        kind: the class of the error.
        argument: what is wrong, as the user writes it.
        expected: a noun phrase.
        fix: what to write instead, as a sentence.
        got: the given value; the error shows its `repr` and its type.
        found: in place of `got`, words.
    """
    if found is None:
        found = f"{got!r} ({type(got).__name__})"
    return kind(f"{argument}: expected {expected}; got {found}. {fix}")


# Checks of plain arguments. A bool is no number here, and NaN is no value.


def require_int(
    argument: str, value: object, *, at_least: int, fix: str | None = None
) -> int:
    """Raise unless `value` is an int >= `at_least`. Integer scalars of a framework
    count; bools and traced values do not.
    """
    number: int | None = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(cast(SupportsIndex, value))
    if number is not None and number >= at_least:
        return int(number)
    kind = ArgumentTypeError if number is None else ArgumentValueError
    fix = fix or f"Write for example {argument}={max(at_least, 4)}."
    raise kind(
        f"{argument}: expected an int >= {at_least}; got {value!r}"
        f" ({type(value).__name__}). {fix}"
    )


def require_number(
    argument: str,
    value: object,
    *,
    above: float,
    or_equal: bool = False,
    fix: str | None = None,
) -> float:
    """Raise unless `value` is finite and > `above`, or equal to it with `or_equal`;
    return it as a float.
    """
    number: float | None = None
    if not isinstance(value, (bool, str)):
        # An array of several numbers and a value that is being traced raise one of
        # these.
        with suppress(TypeError, ValueError, RuntimeError):
            number = float(cast(SupportsFloat, value))
    if number is not None and (
        above < number < math.inf or (or_equal and number == above)
    ):
        return number
    kind = ArgumentTypeError if number is None else ArgumentValueError
    sign = ">=" if or_equal else ">"
    fix = fix or f"Write for example {argument}={above + 1:g}."
    raise kind(
        f"{argument}: expected a finite number {sign} {above:g}; got {value!r}"
        f" ({type(value).__name__}). {fix}"
    )


def require_bool(argument: str, value: object) -> bool:
    """Raise unless `value` is True or False (`ArgumentTypeError`); return it."""
    if isinstance(value, bool):
        return value
    raise ArgumentTypeError(
        f"{argument}: expected True or False; got {value!r} ({type(value).__name__})."
        f" Write {argument}=True."
    )


def require_choice(argument: str, value: object, choices: Collection[str]) -> str:
    """Raise unless `value` is one of `choices`."""
    if isinstance(value, str) and value in choices:
        return value
    kind = ArgumentValueError if isinstance(value, str) else ArgumentTypeError
    raise kind(
        f"{argument}: expected one of {', '.join(map(repr, choices))}; got {value!r}"
        f" ({type(value).__name__}). Write {argument}={next(iter(choices))!r}."
    )


def require_weight(weight: object) -> float:
    """Raise unless a micro-batch's weight is a finite number >= 0; return it as a
    float.
    """
    return require_number("weight", weight, above=0, or_equal=True)
