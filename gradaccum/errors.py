"""The errors that a user can meet. Each names the argument, the expected value, the given one and the fix."""

from __future__ import annotations

from typing import TypeVar


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


class BackendNotFoundError(GradAccumError, ImportError):
    """No backend for this name, or its framework is not installed."""


E = TypeVar("E", bound=GradAccumError)


def explain(kind: type[E], argument: str, *, expected: str, fix: str, got: object = None, found: str | None = None) -> E:
    """An error in the one shape that all of them have: ``argument: expected ...; got .... fix``.

    Args:
        kind: the class of the error.
        argument: the name of what is wrong, as the user writes it.
        expected: what would have been right, as a noun phrase.
        fix: what to write instead, as a sentence.
        got: the value that was given; its `repr` and its type are shown.
        found: in place of `got`, what was there in words, where the value would not say it.
    """
    given = f"{got!r} ({type(got).__name__})" if found is None else found
    return kind(f"{argument}: expected {expected}; got {given}. {fix}")
