"""Errors shared by all backends: one mistake has one class and one wording."""

from __future__ import annotations

from gradaccum.errors import ArgumentTypeError, ArgumentValueError, GradAccumError, explain


def optimizer_error(expected: str, got: object, fix: str) -> GradAccumError:
    """The error for an object that is no optimizer of the framework; `expected` and `fix` name the framework's own."""
    return explain(ArgumentTypeError, "optimizer", expected=expected, found=f"an object of type {type(got).__name__}", fix=fix)


def wrapped_twice_error(got: object) -> GradAccumError:
    """The error for an optimizer that is wrapped already."""
    fix = "Wrap it once: steps multiply, so that one wrap with their product does the same."
    return explain(
        ArgumentTypeError, "optimizer", expected="one that is not wrapped", found=f"a wrapped one: {type(got).__name__}", fix=fix
    )


def accumulate_dtype_error(got: object) -> GradAccumError:
    """The error for an ``accumulate_dtype`` that is neither a floating dtype nor the name of one."""
    kind = ArgumentValueError if isinstance(got, str) else ArgumentTypeError
    expected, fix = "a floating dtype of the framework or its name", "Write accumulate_dtype='float32'."
    return explain(kind, "accumulate_dtype", expected=expected, got=got, fix=fix)
