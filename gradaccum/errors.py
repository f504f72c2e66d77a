"""The errors that a user can meet: each names the argument, the expected value, the
given value and the fix.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from contextlib import suppress
from importlib import import_module
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast


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


class MissingPackageError(GradAccumError, ImportError):
    """A package that only this call needs is not installed."""


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


def imported(argument: str, *modules: str, install: str, otherwise: str) -> Any:
    """Import the first of `modules` that is installed.

    Args:
        argument: the call or the argument that needs it, for the message.
        modules: dotted names.
        install: what ``pip install`` brings it.
        otherwise: what works without it, as a clause.

    Raises:
        MissingPackageError: none is.
    """
    missing: list[ModuleNotFoundError] = []
    for module in modules:
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            missing.append(error)
    raise explain(
        MissingPackageError,
        argument,
        expected=" or ".join(map(repr, modules)),
        found="none installed",
        fix=f"Run: pip install {install}; or {otherwise}.",
    ) from missing[-1]


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
    raise explain(
        ArgumentTypeError if number is None else ArgumentValueError,
        argument,
        expected=f"an int >= {at_least}",
        got=value,
        fix=fix or f"Write for example {argument}={max(at_least, 4)}.",
    )


def require_number(
    argument: str,
    value: object,
    *,
    above: float,
    below: float = math.inf,
    or_equal: bool = False,
    allow_infinity: bool = False,
    fix: str | None = None,
) -> float:
    """Raise unless `value` lies in (above, below), or in [above, below) with
    `or_equal`; return it as a float.
    """
    number: float | None = None
    if not isinstance(value, (bool, str)):
        # An array of several numbers and a value that is being traced raise one of
        # these.
        with suppress(TypeError, ValueError, RuntimeError):
            number = float(cast(SupportsFloat, value))
    if number is not None:
        is_above = number > above or (or_equal and number == above)
        if is_above and (number < below or (allow_infinity and number == math.inf)):
            return number
    finite = "" if allow_infinity else "finite "
    bound = ">=" if or_equal else ">"
    limit = ""
    example = above + 1
    if below < math.inf:
        limit = f" and < {below:g}"
        example = (above + below) / 2
    raise explain(
        ArgumentTypeError if number is None else ArgumentValueError,
        argument,
        expected=f"a {finite}number {bound} {above:g}{limit}",
        got=value,
        fix=fix or f"Write for example {argument}={example:g}.",
    )


def require_bool(argument: str, value: object) -> bool:
    """Raise unless `value` is True or False (`ArgumentTypeError`); return it."""
    if isinstance(value, bool):
        return value
    raise explain(
        ArgumentTypeError,
        argument,
        expected="True or False",
        got=value,
        fix=f"Write {argument}=True.",
    )


def require_choice(argument: str, value: object, choices: Collection[str]) -> str:
    """Raise unless `value` is one of `choices`."""
    if isinstance(value, str) and value in choices:
        return value
    kind = ArgumentValueError if isinstance(value, str) else ArgumentTypeError
    names = ", ".join(repr(choice) for choice in choices)
    raise explain(
        kind,
        argument,
        expected=f"one of {names}",
        got=value,
        fix=f"Write {argument}={next(iter(choices))!r}.",
    )


def require_weight(weight: object) -> float:
    """Raise unless a micro-batch's weight is a finite number >= 0; return it as a
    float.
    """
    return require_number("weight", weight, above=0, or_equal=True)
