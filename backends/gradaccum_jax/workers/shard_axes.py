"""Parameters sharded by hand, inside `jax.shard_map`: the devices along ``shard_axes`` hold parts of one model.

There one device does not see all of a window: it has the norm of its own shards, and no sign of an inf in the others. So the norm adds up
the squares of all shards, each element once, as JAX's types tell which arrays are sharded and which are copies. And all devices decide
alike at the end of a window.

A type alone does not tell a shard from a model that each device has for itself, as in an ensemble. Where the difference matters, and nobody
said, this raises.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jax
import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Options, explain
from gradaccum_jax.types import Array, Axes, InnerState, Params, Tree
from gradaccum_jax.varying import ShardAxes, axes_of, vary
from gradaccum_jax.workers.checks import require_checked

T = TypeVar("T")
_FIX = "Write gradaccum.wrap(..., shard_axes={axes!r}) if the devices hold shards of one model, shard_axes=() if each has its own."


def require_shard_axes(value: object) -> ShardAxes:
    """`value` as a tuple of names, None as it is.

    Raises:
        ArgumentTypeError: it is neither a name nor a tuple of names.
    """
    names = (value,) if isinstance(value, str) else value
    if names is None or (isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)):
        return cast(ShardAxes, names)
    expected, fix = "the name of a mesh axis, or a tuple of names", "Write shard_axes='model', as in jax.make_mesh."
    raise explain(ArgumentTypeError, "shard_axes", expected=expected, got=value, fix=fix)


def require_in_scope(shard_axes: ShardAxes) -> None:
    """Refuse `shard_axes` outside of a `jax.shard_map` that knows what is sharded.

    Raises:
        UsageError: there is none around this call.
    """
    for axis in shard_axes or ():
        require_checked(axis, "Call tx.update in a function under jax.shard_map. Under jax.jit alone, leave shard_axes out.")


def require_told(tree: Tree, known: Axes, shard_axes: ShardAxes, options: Options | None = None) -> None:
    """Refuse parameters, or sums, that may be shards, if nobody said whether they are.

    Args:
        tree: of arrays.
        known: axes of which is known why arrays differ along them.
        shard_axes: as given to `wrap`.
        options: where a norm is asked for, a tree that differs from device to device throughout is refused too.

    Raises:
        UsageError: some arrays differ along an axis.
    """
    if shard_axes is not None:
        return
    axes = [axes_of(leaf) - known for leaf in jax.tree.leaves(tree)]
    differing = frozenset[str]().union(*axes)
    norms = () if options is None else (options.clip_norm, options.skip_norm, options.noise_decay)
    asked = any(norm is not None for norm in norms)
    if differing and (asked or any(own != differing for own in axes)):
        found, fix = f"parameters that differ from device to device along {sorted(differing)}", _FIX.format(axes=tuple(sorted(differing)))
        raise explain(UsageError, "shard_axes", expected="the axes that shard parameters", found=found, fix=fix)


def like_params(inner: optax.GradientTransformation, held: InnerState, params: Params) -> Any:
    """The inner optimizer's state, each array that belongs to a parameter sharded as the parameter is, by its type."""
    return optax.tree_utils.tree_map_params(inner, _vary_like, held, params, is_leaf=lambda leaf: leaf is None)


def _vary_like(leaf: Array, parameter: Array) -> Array:
    return None if leaf is None else vary(leaf, axes_of(parameter))
