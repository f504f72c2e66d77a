"""Check whether a state that was restored from a checkpoint matches the optimizer.

A checkpoint library that restores without a target tree returns plain dicts and lists.
The paths of the leaves are preserved, so each restored leaf is matched by its path to a
leaf of the optimizer's own state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum import CheckpointError
from gradaccum.kit import (
    Options,
    Schedule,
    State,
    UntilWeight,
    decode_terms,
    encode_terms,
    resumed,
    terms_of,
)
from gradaccum_jax.arrays import Array, Params, Tree, plain
from gradaccum_jax.combinators import new_part, part_of
from gradaccum_jax.optimizer import accumulation_of
from gradaccum_jax.state import AccumulationState, fields_of, the_state
from gradaccum_jax.workers.group import by_kind


def check_state(tx: optax.GradientTransformation, state: Tree, params: Params) -> Tree:
    """Check a restored `state`. Return it with JAX arrays as leaves, in the tree
    structure of the state of `tx`.

    All paths, shapes and dtypes are checked. An open window can be resumed only with
    the same `reduction`, `on_overflow` and `steps`, and with the same kind of loss
    scale. A constant loss scale must also have the same value. If no window is open,
    all of these options may change. The saved loss scale is kept only if the scale is
    dynamic both in the saved run and in this run. Do not call this function under
    `jax.jit`, because it reads the values of arrays.

    With ``axis_name``, the returned state fits only the number of devices on which it
    was saved. `gradaccum_jax.redistributed` converts it to a different number of
    devices.

    Args:
        tx: an optimizer from `gradaccum.wrap`; or an `optax.chain`, `optax.partition`
            or `optax.masked` that contains one such optimizer.
        state: the state from the checkpoint, with NumPy or JAX arrays as leaves. It may
            be an `AccumulationState`, the nested dicts that `flax.serialization` and
            orbax return if they restore without a target, or flax nnx's
            ``optimizer.opt_state``, as shown in the recipes.
        params: the parameters, or a `jax.ShapeDtypeStruct` for each parameter.

    Raises:
        CheckpointError: the state does not fit the optimizer or the parameters; the
            message says where. `state` and `tx` are unchanged.
        ArgumentTypeError: `tx` is not wrapped.
    """
    accumulation = accumulation_of(tx)
    restored_state = plain(state)
    params = plain(params)
    if accumulation is None:
        like = jax.eval_shape(tx.init, params)
        accumulation = part_of(tx, like, params)
    else:
        like = jax.eval_shape(replace(accumulation, axes=()).init, params)
        if accumulation.axes:
            like = _on_devices(like, restored_state)
    state = rebuild(restored_state, like)
    return new_part(state, _resume(the_state(state), accumulation.options))


def _on_devices(like: AccumulationState, restored_state: Tree) -> AccumulationState:
    devices = np.shape(by_path(restored_state).get("weight", 0.0))

    def with_device_axis(leaf: Array) -> Array:
        return jax.ShapeDtypeStruct((*devices, *leaf.shape), leaf.dtype)  # type: ignore[no-untyped-call]

    return by_kind(like, own=with_device_axis)


def _resume(state: AccumulationState, options: Options) -> AccumulationState:
    options = options._replace(steps=_on_the_host(options.steps))
    # The weight and the overflow flag have one value per device, and some of these
    # values may be stored in other processes. The values are not needed here, so they
    # are replaced with zeros.
    shared_state = state._replace(weight=np.zeros(()), overflow=np.zeros((), bool))
    saved_fields = State(
        *(np.asarray(field).item() for field in fields_of(shared_state))
    )
    saved_terms = decode_terms(np.asarray(state.terms).tolist())
    fields = resumed(saved_fields, saved_terms, options)
    terms = encode_terms(terms_of(options, fields.optimizer_step))
    state = state._replace(terms=jnp.asarray(terms, jnp.int32))
    if fields == saved_fields:
        return state
    return state._replace(
        loss_scale=jnp.asarray(fields.loss_scale, jnp.float32),
        growth_tracker=jnp.asarray(fields.growth_tracker, jnp.int32),
    )


def _on_the_host(steps: Schedule) -> Schedule:
    if isinstance(steps, UntilWeight):
        return UntilWeight(cast(Any, _on_the_host(steps.weight)))
    if callable(steps):
        return lambda step: steps(jnp.asarray(step, jnp.int32))
    return steps


def rebuild(tree: Tree, like: Tree) -> Any:
    """Return the leaves of `tree` in the tree structure of `like`. Raise if a path, a
    shape or a dtype differs.
    """
    given_leaves = by_path(tree)
    expected_leaves = by_path(like)
    for path in [*expected_leaves, *given_leaves]:
        kind = _kind_at(path, expected_leaves)
        given_kind = _kind_at(path, given_leaves)
        if given_kind != kind:
            raise CheckpointError(
                f"state.{path}: expected {kind}; got {given_kind}. Resume with the same"
                " optimizer and parameters that the checkpoint was saved with."
            )
    leaves = [_copy(given_leaves[path]) for path in expected_leaves]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _copy(leaf: Array) -> Array:
    """Return `leaf` as a JAX array. A NumPy array is copied, because JAX may use the
    array's own memory, which the user may overwrite.
    """
    return jnp.array(leaf) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)


def by_path(tree: Tree) -> dict[str, Array]:
    """Return a dict from paths to the leaves of `tree`. A path consists of keys,
    indices and field names, joined by dots. For example, ``tree[0].mu`` has the path
    "0.mu".

    A leaf keeps its path if a checkpoint library converts tuples to dicts:
    ``tree["0"]["mu"]`` has the path "0.mu" too.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    name_of = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name_of(path): leaf for path, leaf in flat}


def _kind_at(path: str, leaves: dict[str, Array]) -> str:
    if path not in leaves:
        return "no array"
    leaf = leaves[path]
    dtype = getattr(leaf, "dtype", type(leaf).__name__)
    return f"an array of shape {np.shape(leaf)} and dtype {dtype}"
