"""Helpers for compilation: call a jitted function from Python, and run a function on
the device only if a condition is true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum.kit import Scalar
from gradaccum_jax.arrays import Tree
from gradaccum_jax.sharding import manual_axes, with_axes_of_results

T = TypeVar("T")
TRACEABLE = (jax.Array, np.ndarray, np.generic, float)


def call_jitted(jitted_function: Any, *arguments: Tree) -> Any:
    """Call a function that `jax.jit` returned. If a leaf of the arguments is a
    function, a flag or another static value, call the original Python function instead.

    Outside `jax.jit`, the jitted function avoids recompiling the step's conditionals
    for every micro-batch. Under `jax.jit`, the jitted function is inlined.
    """
    is_traceable = all(
        isinstance(leaf, TRACEABLE) for leaf in jax.tree.leaves(arguments)
    )
    # Sums have wider dtypes than gradients by design. JAX would refuse to add gradients
    # to such sums if the user has set its dtype promotion to "strict".
    with jax.numpy_dtype_promotion("standard"):
        if is_traceable:
            return jitted_function(*arguments)
        return jitted_function.__wrapped__(*arguments)


def run_if(predicate: Scalar, function: Callable[[T], T], operand: T) -> T:
    """Return ``function(operand)`` if `predicate` is true, else `operand`. The results
    of `function` must have the shapes and dtypes of `operand`.

    Under `jax.vmap` this becomes a select: both results are computed.
    """
    arrays = jax.tree.map(jnp.asarray, operand)
    if manual_axes():
        function, arrays = with_axes_of_results(predicate, function, arrays)
    return cast(T, lax.cond(predicate, function, lambda arrays: arrays, arrays))
