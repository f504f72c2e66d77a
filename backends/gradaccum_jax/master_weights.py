"""float32 master copies ("masters") of half-precision parameters (Micikevicius et al.,
"Mixed Precision Training", 2018, section 3.1).

The inner optimizer updates the masters. The update of a half-precision parameter is the
float32 difference between the rounded master and the parameter's current value. If
other code changes the parameter by more than its rounding error, the new value is
copied to the master first.
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


def current_master(parameter: Array, master: Array) -> Array:
    """If other code has changed elements of `parameter`, copy them to `master` in
    float32, and return the new master. A leaf without a master is returned as it is.

    An element counts as unchanged if it equals the rounded master or an adjacent number
    of its dtype. The adjacent number may be due to a rounding error, for example if the
    parameter was averaged over devices. Copying it would lose the low bits of the
    master.
    """
    if parameter is None or not is_half(parameter):
        return master
    parameter = jnp.asarray(parameter)
    size = jnp.finfo(parameter.dtype).bits

    def places(numbers: Array) -> Array:
        """Return each number's position when all numbers of the dtype are sorted."""
        # XLA may remove the cast of `master` below (see `round_master`), but not if the
        # result is read as bits.
        bits = numbers.view(f"uint{size}").astype(jnp.int32)
        sign = 1 << (size - 1)
        return jnp.where(bits < sign, bits, sign - bits)

    steps = places(parameter) - places(master.astype(parameter.dtype))
    return jnp.where(jnp.abs(steps) > 1, parameter.astype(jnp.float32), master)


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
        if masters is not None:
            master_params = jax.tree.map(
                current_master, params, master_params, is_leaf=is_none
            )
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
    """Return the float32 update that changes the half-precision parameter `p` to the
    rounded `master`. The caller adds the update u to p as `optax.apply_updates` does,
    with ``(p + u).astype(p.dtype)``.

    Let q be the `master`, rounded to the dtype of p. The update u is q - p. The result
    of the caller's addition could differ from q, because u and p + u are both rounded
    to float32. If q is not 0, the result is q, bit for bit, in these two cases:

    - |p| <= 4092 |q| in float16, or |p| <= 32764 |q| in bfloat16. The two roundings
      then change p + u by less than 2^-12 |q| in float16, and by less than 2^-9 |q| in
      bfloat16. All numbers that are so close to q are rounded to q. (The two roundings
      change p + u by at most 2^-24 (|q - p| + |q|), up to a factor of 1 + 2^-24.)
    - |q - p| <= 1 in float16. No rounding occurs, because q - p is a multiple of 2^-24,
      and float32 represents such a small multiple exactly.

    If q is 0, the result is a zero. In this case, u is computed from the unrounded
    master, so that the zero gets the master's sign. The sign is lost if |p| is so much
    larger than the master that u is rounded to -p.

    In all other cases, the parameter shrinks by a factor of more than 4092 in one
    update, but not to 0. The result is then off by at most 2^-23 |p|. The next update
    may copy this result to the master. Float32 rounding errors of numbers as large as p
    may already have changed the master by the same amount.

    All this holds if p is finite, if q - p does not overflow float32, and, in bfloat16,
    if q - p is not so small (below 2^-126) that XLA flushes it to 0.
    `gradaccum_jax.apply_updates` does not have any of these limits.
    """
    parameter = jnp.asarray(p).astype(jnp.float32)
    target = round_master(master, jnp.result_type(p))
    # If the master rounds to 0, the unrounded master is used, so that p + u becomes a
    # zero with the master's sign, unless the master is tiny compared to p.
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
    """Apply `updates` to `params` like `optax.apply_updates`, but set each
    half-precision parameter that has a float32 master to the rounded master, regardless
    of the parameter's previous value.

    `optax.apply_updates` almost always sets such a parameter to the same value. The
    values may differ if the parameter was inf, if it shrinks by more than three orders
    of magnitude in one update, or if a bfloat16 parameter changes by an amount outside
    float32's normal range.

    A parameter whose update is None, such as a random key, does not change.
    `optax.apply_updates` does not accept such an update.

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
