"""How many micro-batches a window holds, where a callable ``steps`` says it: its value is checked as far as it is known.

A concrete value is checked as in every backend. Of a traced one only the dtype is known. If it turns out below 1, each micro-batch counts
as not finite, so that no update is made and the result says so.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError
from gradaccum.kit import Scalar, Schedule, explain, require_steps, steps_at


def size_at(schedule: Schedule, optimizer_step: Scalar) -> Scalar:
    """The size of the window that follows update number `optimizer_step`, an int32 scalar, traced or not.

    Raises:
        ArgumentTypeError, ArgumentValueError: a callable gave no int >= 1, or, traced, no integer scalar.
    """
    steps = steps_at(schedule, optimizer_step, jnp.where)
    if not callable(schedule):
        return steps
    if not isinstance(steps, jax.core.Tracer):
        return require_steps(steps, _number(optimizer_step))
    if steps.shape != () or not jnp.issubdtype(steps.dtype, jnp.integer):
        found, fix = f"one of dtype {steps.dtype} and shape {steps.shape}", "Cast what it returns: .astype(jnp.int32)."
        raise explain(ArgumentTypeError, "steps(optimizer_step)", expected="an integer scalar", found=found, fix=fix)
    return steps


def probe(schedule: Schedule) -> None:
    """Check the first window's size, before anything is traced. It asks with NumPy's 0, because `wrap` alone starts no device.

    Raises:
        ArgumentTypeError, ArgumentValueError: see `size_at`.
    """
    if callable(schedule):
        with jax.ensure_compile_time_eval():
            size_at(schedule, np.zeros((), np.int32))


def check_known(schedule: Schedule, optimizer_step: Scalar) -> None:
    """Check the open window's size where a loop outside `jax.jit` knows it. Only for a callable it waits for the last update.

    Raises:
        ArgumentTypeError, ArgumentValueError: see `size_at`.
    """
    if callable(schedule) and not isinstance(optimizer_step, jax.core.Tracer):
        size_at(schedule, jnp.asarray(optimizer_step))


def _number(optimizer_step: Scalar) -> int:
    """The step for an error's text; a name in its place if it is traced."""
    return cast(int, "optimizer_step") if isinstance(optimizer_step, jax.core.Tracer) else int(np.asarray(optimizer_step))
