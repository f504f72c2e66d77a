"""float32 master copies ("masters") of half-precision parameters (Micikevicius et al.,
"Mixed Precision Training", 2018, section 3.1).

The inner optimizer updates the masters. The update of a half-precision parameter is the
float32 difference between the rounded master and the parameter's current value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradaccum_jax.arrays import (
    Array,
    DType,
    InnerState,
    Leaves,
    Params,
    Tree,
    Updates,
    is_half,
    is_masked,
    is_none,
    plain,
    spread_over,
)
from gradaccum_jax.state import the_state

SMALLEST_NORMAL_FLOAT16 = 2.0**-14
FLOAT16_SUBNORMALS = 2.0**24
"""The reciprocal of the distance between adjacent float16 subnormals."""


def masters_of(params: Params) -> Tree:
    """Return a tree like `params`, with a float32 copy of each half-precision leaf, and
    None for every other leaf.
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf).astype(jnp.float32) if is_half(leaf) else None,
        params,
    )


def in_place_of(params: Params, masters: Tree) -> Params:
    """Return `params` with each half-precision leaf replaced by its float32 master."""
    if masters is None:
        return params
    remaining = iter(jax.tree.leaves(masters))
    return jax.tree.map(lambda leaf: next(remaining) if is_half(leaf) else leaf, params)


def on_masters(
    inner: optax.GradientTransformationExtraArgs, has_masters: bool
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that runs `inner`, and whose state is the pair (state of
    `inner`, master weights). If `has_masters` is true, `inner` updates the master
    weights instead of the half-precision parameters; otherwise, the second element of
    the pair is None.
    """

    def init(params: Params) -> InnerState:
        masters = masters_of(params) if has_masters else None
        return inner.init(in_place_of(params, masters)), masters

    def update(
        gradients: Tree, state: InnerState, params: Params = None, **extra: Any
    ) -> tuple[Updates, InnerState]:
        inner_state, masters = state
        master_params = in_place_of(params, masters)
        updates, inner_state = inner.update(
            gradients, inner_state, master_params, **extra
        )
        if masters is None:
            return updates, (inner_state, None)
        new_masters: Leaves = []

        def update_of_model(parameter: Array, master: Array, update: Array) -> Array:
            if parameter is None or not is_half(parameter):
                return update
            new_master = jnp.asarray(master + update).astype(jnp.float32)
            new_masters.append(new_master)
            return distance(parameter, new_master)

        updates = jax.tree.map(
            update_of_model, params, master_params, updates, is_leaf=is_none
        )
        structure = jax.tree.structure(masters)
        return updates, (inner_state, jax.tree.unflatten(structure, new_masters))

    return optax.GradientTransformationExtraArgs(init, update)


def distance(p: Array, master: Array) -> Array:
    """Return the float32 update u that changes a half-precision parameter p to q, the
    `master` rounded to half precision. The caller adds u to p as in
    `optax.apply_updates`, that is, as ``(p + u).astype(p.dtype)``.

    u is q - p. Both u and p + u are rounded to float32, so the result of the addition
    could differ from q. Let t be the number of bits in the half-precision significand
    (11 in float16, 8 in bfloat16). The result is q, bit for bit, in each of these
    cases:

    - p/2 <= q <= 2p, because u is then exact (Sterbenz, "Floating-Point Computation",
      1974).
    - |p| <= (2^(23 - t) - 4) |q|, which is 4092 |q| in float16 and 32764 |q| in
      bfloat16. The two roundings then change p + u by at most 2^-24 (|q - p| + |q|), up
      to a factor of 1 + 2^-24. The result is still q, because numbers within 2^-(t+1)
      |q| of q round to q.
    - q is 0. In this case u is computed from the unrounded master.
    - |q - p| <= 1 in float16, because q - p is then a multiple of 2^-24, and float32
      represents such a small multiple exactly.

    All this holds unless q - p overflows float32 or, in bfloat16, is so small (below
    2^-126) that XLA flushes it to 0. If none of the cases applies, the parameter
    shrinks by a larger factor in one update, but not to 0. It is then off by at most
    2^-23 |p|, and is correct again after the next update. `gradaccum_jax.apply_updates`
    does not have these limits.
    """
    parameter = jnp.asarray(p).astype(jnp.float32)
    target = round_master(master, jnp.result_type(p))
    # If the master rounds to 0, the unrounded master is used, so that p + u becomes a
    # zero with the master's sign.
    u = jnp.where(target == 0, master, target) - parameter
    return jnp.where(u == 0, 0 * target, u)  # -0.0 - -0.0 is 0.0, and -0.0 + 0.0 too


def round_master(master: Array, dtype: DType) -> Array:
    """Round the float32 `master` to the nearest number of the half-precision `dtype`;
    return it as float32.

    Casting to `dtype` and back would not be reliable, because XLA may remove such a
    pair of casts (see its option ``xla_allow_excess_precision``).
    """
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7)
    # Subnormals are rounded separately, because `lax.reduce_precision` flushes them to
    # 0.
    normal = lax.reduce_precision(master, exponent_bits=5, mantissa_bits=10)
    subnormal = (
        lax.round(master * FLOAT16_SUBNORMALS, lax.RoundingMethod.TO_NEAREST_EVEN)
        / FLOAT16_SUBNORMALS
    )
    return jnp.where(jnp.abs(master) < SMALLEST_NORMAL_FLOAT16, subnormal, normal)


def apply_updates(params: Params, updates: Updates, state: Tree) -> Params:
    """Apply updates like `optax.apply_updates`, but set each half-precision parameter
    to its rounded master, regardless of its previous value.

    The result differs from `optax.apply_updates` only for a parameter that shrinks by
    more than three orders of magnitude in one update, or that is inf or NaN. Unlike
    there, a parameter whose update is None, such as a random key, stays as it is.

    Args:
        params: the parameters, which may be flax nnx variables.
        updates: the updates from `update` or `flush`.
        state: the state from the same call, or a tree that contains exactly one state
            of a wrapped optimizer for these parameters.

    Returns:
        The new parameters, in the dtypes of `params`.

    Raises:
        ArgumentTypeError: `state` does not contain exactly one such state.
    """
    params = plain(params)
    masters = jax.tree.map(
        lambda node: None if is_masked(node) else node,
        plain(the_state(state).masters),
        is_leaf=is_masked,
    )
    remaining = iter(spread_over(masters, params, "params"))

    def new_parameter(parameter: Array, update: Array) -> Array:
        master = None if parameter is None else next(remaining)
        if master is None:
            if update is None:
                return parameter
            return optax.apply_updates(parameter, update)
        return jnp.asarray(master).astype(jnp.result_type(parameter))

    return jax.tree.map(new_parameter, params, updates, is_leaf=is_none)
