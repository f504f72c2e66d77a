"""Numbers that nobody told, as the state keeps them: the loss of a window that was given none, the norm of one that nobody measured.

They are NaN wherever anything is computed. But ``jax_debug_nans`` stops at each NaN that leaves a jitted function, and a state leaves one
in every micro-batch. So the state keeps the lowest float32 in a NaN's place, which is no sum of losses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gradaccum.kit import Scalar

UNTOLD = float(jnp.finfo(jnp.float32).min)
"""Exact in float64 too."""


def kept(number: Scalar) -> Scalar:
    """`number` as the state keeps it."""
    return jnp.where(jnp.isnan(number), UNTOLD, number)


def meant(number: Scalar) -> Scalar:
    """What the `number` that a state keeps means: itself, or NaN."""
    with jax.debug_nans(False):  # this NaN is no accident
        return jnp.where(number == UNTOLD, jnp.nan, number)
