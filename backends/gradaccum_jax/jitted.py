"""Call the compiled form of a function where its arguments can be traced, else the function itself.

The loop and the conditional of a step are compiled with it. Called op by op from Python, they would compile anew in every
micro-batch; under `jax.jit` the compiled form is inlined and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_TRACEABLE = (jax.Array, np.ndarray, np.generic, float)


def call_jitted(jitted: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    """``jitted(*arguments)``, or ``plain(*arguments)`` if a leaf of them is a function, a flag or another static value."""
    traceable = all(isinstance(leaf, _TRACEABLE) for leaf in jax.tree.leaves(arguments))
    with jax.numpy_dtype_promotion("standard"):  # Sums are wider than gradients by design, where a user's ``"strict"`` refuses the mixture.
        return jitted(*arguments) if traceable else plain(*arguments)
