"""How long a window is, where a callable in ``steps`` says it: its value is checked as far as it is known.

A concrete value is checked as in every backend. Of a traced one only the dtype is known. If it turns out below 1, each micro-batch counts
as not finite, so that no update is made and the result says so.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError
from gradaccum.kit import Scalar, Schedule, UntilWeight, explain, is_known, require_steps, steps_at


def size_at(schedule: Schedule, optimizer_step: Scalar) -> Scalar:
    """The size of the window that follows update number `optimizer_step`, an int32 scalar, traced or not; or an `UntilWeight` of it.

    Raises:
        ArgumentTypeError, ArgumentValueError: a callable gave no int >= 1, or, traced, no integer scalar.
    """
    size = steps_at(schedule, optimizer_step, jnp.where)
    if is_known(schedule):
        return size
    number = number_of(size) if isinstance(schedule, UntilWeight) else size
    if not isinstance(number, jax.core.Tracer):
        return require_steps(size, _number(optimizer_step), schedule)
    if number.shape != () or not jnp.issubdtype(number.dtype, jnp.integer):
        found, fix = f"one of dtype {number.dtype} and shape {number.shape}", "Cast what it returns: .astype(jnp.int32)."
        raise explain(ArgumentTypeError, "steps(optimizer_step)", expected="an integer scalar", found=found, fix=fix)
    return size


def number_of(size: Scalar) -> Scalar:
    """The number in what `size_at` gives."""
    return size.weight if isinstance(size, UntilWeight) else size


def probe(schedule: Schedule) -> None:
    """Check the first window's size, before anything is traced. It asks with NumPy's 0, because `wrap` alone starts no device.

    Raises:
        ArgumentTypeError, ArgumentValueError: see `size_at`.
    """
    if not is_known(schedule):
        with jax.ensure_compile_time_eval():
            size_at(schedule, np.zeros((), np.int32))


def check_known(schedule: Schedule, optimizer_step: Scalar) -> None:
    """Check the open window's size where a loop outside `jax.jit` knows it. Only for a callable it waits for the last update.

    Raises:
        ArgumentTypeError, ArgumentValueError: see `size_at`.
    """
    if not is_known(schedule) and not isinstance(optimizer_step, jax.core.Tracer):
        size_at(schedule, jnp.asarray(optimizer_step))


def _number(optimizer_step: Scalar) -> int:
    """The step for an error's text; a name in its place if it is traced."""
    return cast(int, "optimizer_step") if isinstance(optimizer_step, jax.core.Tracer) else int(np.asarray(optimizer_step))
