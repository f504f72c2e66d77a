"""A restored state is checked against the optimizer it is to continue, before it is used.

Checkpoint libraries that restore without a target give back plain dicts and lists. Their paths say the same as those of the
state, so both are checked, and rebuilt, by path.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import CheckpointError, explain, steps_at
from gradaccum_jax.backend import require_accumulation
from gradaccum_jax.paths import unique
from gradaccum_jax.state import AccumulationState

_RESTORE = "Continue with the optimizer, the parameters and the steps that the checkpoint was made with."


def check_state(tx: Any, state: Any, params: Any) -> AccumulationState:
    """`state` as JAX arrays in the structure that `tx` uses, if it is one that `tx` could have saved for `params`.

    Checked are the paths, every shape and dtype, and that the open window is shorter than a window of `tx`. Not for use under
    `jit`: it looks at values.

    Args:
        tx: what `gradaccum.wrap` returned.
        state: what a checkpoint gave back, arrays of NumPy or JAX: an `AccumulationState`, or the nested dicts of `flax.serialization`
            and orbax restored without a target.
        params: the parameters, or their `jax.ShapeDtypeStruct`.

    Raises:
        CheckpointError: naming what differs; nothing was changed.
        ArgumentTypeError: `tx` is not wrapped.
    """
    wrapped = require_accumulation(tx)
    like = jax.eval_shape(wrapped.init, params)
    checked: AccumulationState = rebuild(state, like)
    _check_window(wrapped.options.steps, checked)
    return checked


def rebuild(tree: Any, like: Any) -> Any:
    """The leaves of `tree` as JAX arrays in the structure of `like`.

    Raises:
        CheckpointError: a path, shape or dtype differs.
    """
    found, expected = _by_path(tree), _by_path(like)
    _check_leaves(found, expected)
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(found[path]) for path in expected])


def _by_path(tree: Any) -> dict[str, Any]:
    """Leaves by names joined with dots: the same for a tuple or named tuple and for the dict that was made of it."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = unique(".".join(_name(key) for key in path) for path, _ in flat)
    return dict(zip(names, (leaf for _, leaf in flat), strict=True))


def _name(key: Any) -> str:
    """The one attribute that a key of a path has: a dict's or a custom node's, a sequence's or a named tuple's."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _check_leaves(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for path, leaf in expected.items():
        if path not in found:
            _refuse(path, _kind(leaf), "nothing at all")
        if (wanted := _kind(leaf)) != (given := _kind(found[path])):
            _refuse(path, wanted, given)
    for path in found.keys() - expected.keys():
        _refuse(path, "nothing, as this optimizer and these parameters have no such leaf", f"an array of shape {np.shape(found[path])}")


def _kind(leaf: Any) -> str:
    return f"an array of shape {np.shape(leaf)} and dtype {getattr(leaf, 'dtype', type(leaf).__name__)}"


def _check_window(schedule: Any, state: AccumulationState) -> None:
    held = int(state.micro_step)
    steps = steps_at(schedule, state.optimizer_step, jnp.where)
    if held < 0 or (steps is not None and held >= int(steps)):
        _refuse("micro_step", f"a window of fewer than {steps} micro-batches", f"one of {held} micro-batches")


def _refuse(path: str, expected: str, got: str) -> NoReturn:
    raise explain(CheckpointError, f"state.{path}", expected=expected, got=got, fix=_RESTORE)
