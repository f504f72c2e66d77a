"""A weighted gradient added to a sum, with a derivative by the weight where that is 0.

A weight of 0 must add exactly nothing, of a NaN too, so a select leaves the product out. JAX's derivative of that select is 0; but the
derivative of w g by w is g at every w, which is what learning to reweight starts from (Ren et al., "Learning to Reweight Examples for
Robust Deep Learning", 2018, section 3.2: weights begin at 0).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_jvp
def add_weighted(held: Any, gradient: Any, weight: Any, kept: Any, counted: Any) -> Any:
    """``held + weight * gradient`` in the dtype of `held` where `kept` holds, else `held`.

    Args:
        held: the sum, any shape.
        gradient: of the same shape.
        weight: a scalar.
        kept: bool scalar: the product is added.
        counted: bool scalar: it would be at any other weight; where it is not, the derivative by the weight is 0.
    """
    total = (held + weight * gradient).astype(held.dtype)
    return jnp.where(kept, total, held)


@add_weighted.defjvp
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    held, gradient, weight, kept, counted = primals
    moved, turned, heavier, *_ = tangents
    by_gradient = jnp.where(kept, weight * turned, 0)
    by_weight = heavier * jnp.where(counted, gradient, 0)
    return add_weighted(*primals), (moved + by_gradient + by_weight).astype(held.dtype)
