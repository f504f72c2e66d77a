"""How a step is compiled: only once outside `jax.jit`, and with branches that the
device chooses.
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
    """Call a function that `jax.jit` returned; or call the function inside it if a leaf
    of the arguments is a function, a flag or another static value.

    If a step were called from Python op by op, its conditionals would be compiled again
    in every micro-batch. Under `jax.jit` the jitted function is inlined.
    """
    is_traceable = all(
        isinstance(leaf, TRACEABLE) for leaf in jax.tree.leaves(arguments)
    )
    # Sums are wider than gradients by design. With the user's setting "strict", JAX
    # would refuse to mix the two dtypes.
    with jax.numpy_dtype_promotion("standard"):
        if is_traceable:
            return jitted_function(*arguments)
        return jitted_function.__wrapped__(*arguments)


def run_if(predicate: Scalar, function: Callable[[T], T], operand: T) -> T:
    """Return ``function(operand)`` if `predicate` is true, else `operand`; both have
    the same types.

    Under `jax.vmap` this is a select: both results are computed.
    """
    arrays = jax.tree.map(jnp.asarray, operand)
    if manual_axes():
        function, arrays = with_axes_of_results(predicate, function, arrays)
    return cast(T, lax.cond(predicate, function, lambda arrays: arrays, arrays))
