"""Call the jitted form of a function where its arguments can be traced, else the function itself.

Called op by op from Python, the loop and the conditional of a step would compile anew in every micro-batch. The jitted form compiles them
once. Under `jax.jit` it is inlined and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gradaccum_jax.types import Tree

_TRACEABLE = (jax.Array, np.ndarray, np.generic, float)


def call_jitted(jitted: Callable[..., Any], plain: Callable[..., Any], *arguments: Tree) -> Any:
    """``jitted(*arguments)``, or ``plain(*arguments)`` if one of their leaves is a function, a flag or another static value."""
    traceable = all(isinstance(leaf, _TRACEABLE) for leaf in jax.tree.leaves(arguments))
    with jax.numpy_dtype_promotion("standard"):  # Sums are wider than gradients by design; a user's "strict" would refuse to mix them.
        return jitted(*arguments) if traceable else plain(*arguments)


def traced_once(function: Callable[..., Any], like: Tree) -> Callable[..., Any]:
    """`function` as one equation of the program that is traced, however often it is called with arguments of the same types.

    JAX evaluates the program of a loop's body several times on its way to the compiler, one equation after the other. It traces the jitted
    form once, and the compiler inlines it.

    Args:
        function: of arrays. What it closes over is an input of the equation if it is traced.
        like: if none of its leaves is traced, `function` is returned as it is: the arrays that it closes over would become constants of the
            equation, compiled anew in each call.
    """
    return jax.jit(function) if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(like)) else function
