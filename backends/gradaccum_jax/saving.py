"""Saving and loading: a restored state is checked against the optimizer that resumes
with it.

Libraries that restore without a target return plain dicts and lists, with the paths of
the state, by which they are checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn, cast

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
    explain,
    resumed,
    terms_of,
)
from gradaccum_jax.arrays import Array, Params, Tree, plain, unique
from gradaccum_jax.combinators import new_part, not_wrapped_error, part_of
from gradaccum_jax.optimizer import accumulation_of
from gradaccum_jax.state import (
    AccumulationState,
    fields_of,
    find_states,
    the_state,
)
from gradaccum_jax.workers.group import mapped

_RESTORE = (
    "Continue with the optimizer and the parameters that the checkpoint was made with."
)
_SHARED = (
    "Restore what a step under gradaccum_jax.data_parallel returned, or wrap without"
    " axis_name."
)


def check_state(tx: optax.GradientTransformation, state: Tree, params: Params) -> Tree:
    """Return a restored `state` to resume with, as JAX arrays in the structure of `tx`.

    This checks the paths, every shape and every dtype. An open window resumes only
    under the options that it was made under: `reduction`, `on_overflow`, `steps` and
    the kind of loss scale, or the scale itself if it is constant. Between two windows
    all of these may change: the saved loss scale is kept only if it is dynamic in both
    runs. Not for use under `jit`: it looks at values.

    With ``axis_name`` the state is that of as many devices as it was saved on;
    `gradaccum_jax.redistributed` brings it to others.

    Args:
        tx: what `gradaccum.wrap` returned; or an `optax.chain`, `optax.partition` or
            `optax.masked` with one such part.
        state: as the checkpoint returned it, arrays of NumPy or JAX: an
            `AccumulationState`, or the nested dicts of `flax.serialization` and orbax
            restored without a target; or flax nnx's ``optimizer.opt_state``, as in the
            recipes.
        params: the parameters, or their `jax.ShapeDtypeStruct`.

    Raises:
        CheckpointError: something differs; names it. Nothing was changed.
        ArgumentTypeError: `tx` is not wrapped.
    """
    wrapped, restored, params = accumulation_of(tx), plain(state), plain(params)
    if wrapped is None:
        return _check_whole(tx, restored, params)
    like = jax.eval_shape(replace(wrapped, axes=()).init, params)
    return _resume(
        rebuild(restored, _on_devices(like, restored) if wrapped.axes else like),
        wrapped.options,
    )


def _check_whole(
    tx: optax.GradientTransformation, restored: Tree, params: Params
) -> Tree:
    """Return the state of a transformation that has a wrapped part."""
    if not isinstance(tx, optax.GradientTransformation):
        raise not_wrapped_error(tx)
    like = jax.eval_shape(tx.init, params)
    if not find_states(like):
        raise not_wrapped_error(tx)
    wrapped = part_of(tx, like, params)
    whole = rebuild(restored, like)
    return new_part(whole, _resume(the_state(whole), wrapped.options))


def _on_devices(like: AccumulationState, restored: Tree) -> AccumulationState:
    weight = np.shape(by_path(restored).get("weight", 0.0))
    if not weight:
        _refuse(
            "weight",
            "an array with one entry for each device, as tx has axis_name",
            "one of shape ()",
            _SHARED,
        )

    def own(leaf: Array) -> Array:
        kind: Any = jax.ShapeDtypeStruct
        return kind((weight[0], *leaf.shape), leaf.dtype)

    shared: AccumulationState = mapped(
        like, own=own, shared=lambda leaf: leaf, other=lambda leaf: leaf
    )
    return shared


def _resume(state: AccumulationState, options: Options) -> AccumulationState:
    concrete = options._replace(steps=_on_the_host(options.steps))
    # Not what each device has for itself: another process may hold it, and nothing here
    # depends on it.
    shared = state._replace(weight=np.zeros(()), overflow=np.zeros((), bool))
    saved = State(*(np.asarray(field).item() for field in fields_of(shared)))
    fields = resumed(saved, decode_terms(np.asarray(state.terms).tolist()), concrete)
    own = jnp.asarray(
        encode_terms(terms_of(concrete, fields.optimizer_step)), jnp.int32
    )
    scale, tracker = (
        jnp.asarray(fields.loss_scale, jnp.float32),
        jnp.asarray(fields.growth_tracker, jnp.int32),
    )
    return (
        state._replace(terms=own)
        if fields == saved
        else state._replace(terms=own, loss_scale=scale, growth_tracker=tracker)
    )


def _on_the_host(steps: Schedule) -> Schedule:
    if isinstance(steps, UntilWeight):
        return UntilWeight(cast(Any, _on_the_host(steps.weight)))
    return (
        (lambda step: steps(jnp.asarray(step, jnp.int32))) if callable(steps) else steps
    )


def rebuild(tree: Tree, like: Tree) -> Any:
    found, expected = by_path(tree), by_path(like)
    _require_values(found)
    _check_leaves(found, expected)
    return jax.tree.unflatten(
        jax.tree.structure(like), [_copied(found[path]) for path in expected]
    )


def _require_values(found: dict[str, Array]) -> None:
    for path, leaf in found.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            fix = "Restore the checkpoint first, and pass what that returns."
            _refuse(path, "an array", "its shape alone", fix)


def _copied(leaf: Array) -> Array:
    """Copy to a JAX array: JAX would share the memory of NumPy's, which the user may
    write into.
    """
    return jnp.array(leaf) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)


def by_path(tree: Tree) -> dict[str, Array]:
    """Return leaves by names joined with dots, the same for a tuple and for the dict
    that a library made of it.
    """
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = unique(".".join(_name(key) for key in path) for path, _ in flat)
    return dict(zip(names, (leaf for _, leaf in flat), strict=True))


def _name(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _check_leaves(found: dict[str, Array], expected: dict[str, Array]) -> None:
    for path, leaf in expected.items():
        if path not in found:
            _refuse(path, _kind(leaf), "nothing at all")
        if (wanted := _kind(leaf)) != (given := _kind(found[path])):
            _refuse(path, wanted, given)
    for path in found.keys() - expected.keys():
        _refuse(
            path,
            "nothing, as this optimizer and these parameters have no such leaf",
            f"an array of shape {np.shape(found[path])}",
        )


def _kind(leaf: Array) -> str:
    return (
        f"an array of shape {np.shape(leaf)} and dtype"
        f" {getattr(leaf, 'dtype', type(leaf).__name__)}"
    )


def _refuse(path: str, expected: str, found: str, fix: str = _RESTORE) -> NoReturn:
    raise explain(
        CheckpointError, f"state.{path}", expected=expected, found=found, fix=fix
    )
