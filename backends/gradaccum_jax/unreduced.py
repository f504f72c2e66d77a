"""Gradients whose type says that the devices' parts are not added up yet: ``unreduced`` axes of an explicit mesh.

On such a mesh the gradient of a parameter typed ``reduced={"data"}`` is typed ``unreduced={"data"}``. Each device along "data" then holds a
part, and the value is the sum of the parts (JAX's documentation, "Autodiff and sharding"). Sums of parts are parts of the sum, so a window
adds up parts without any communication. The norm and the inner optimizer need the value. So the end of a window adds the parts up, in a
branch that no other micro-batch enters.

A sum has the type that the gradient of its parameter has. Where the two differ nevertheless, the one that is whole becomes a part as well:
it stays on one device and is zero on the others, which needs no communication either.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gradaccum import UsageError
from gradaccum.kit import Options, Scalar, explain
from gradaccum_jax.types import Array, Axes, Gradients, Params, Tree, reshard, typeof

ADDS_PARTS_RIGHT = jax.__version_info__ >= (0, 10)
"""JAX 0.7 takes such types inside one `jax.jit` only, not across its boundary, and a loop that adds up parts gives a wrong sum there."""
FIX = "Reduce them before tx.update: jax.reshard(grads, PartitionSpec())."


def axes_waiting(leaf: Array) -> Axes:
    """The axes of an explicit mesh along which `leaf` is in parts that are not added up."""
    return frozenset(getattr(_spec(leaf), "unreduced", None) or ())


def axes_reduced(leaf: Array) -> Axes:
    """Return the axes of an explicit mesh over which the gradient of `leaf` is in parts."""
    return frozenset(getattr(_spec(leaf), "reduced", None) or ())


def whole(tree: Tree) -> Tree:
    """`tree` with parts added up, which takes an all-reduce, and with ``reduced`` types made plain, which takes nothing."""
    return jax.tree.map(lambda leaf: _typed(leaf) if axes_waiting(leaf) | axes_reduced(leaf) else leaf, tree)


def zeros_for(parameter: Array, dtype: Any) -> Array:
    """Zeros of the type that the gradient of `parameter` has, in `dtype`."""
    axes = axes_reduced(parameter)
    if not axes:
        return jnp.zeros_like(parameter, dtype=dtype)
    _require_newer_jax("params")
    return _typed(jnp.zeros_like(_typed(parameter), dtype=dtype), unreduced=axes)


def zeros_like(leaf: Array) -> Array:
    """Zeros of the type of `leaf`, a sum."""
    return _empty_parts(leaf) if axes_waiting(leaf) else jnp.zeros_like(leaf)


def alike(a: Array, b: Array) -> tuple[Array, Array]:
    """Both in parts along the axes along which one of them is."""
    axes = axes_waiting(a) | axes_waiting(b)
    return _in_parts(a, axes), _in_parts(b, axes)


def factor_of(factor: Scalar, leaf: Array) -> Scalar:
    """`factor` in the type in which JAX multiplies `leaf` by it."""
    axes = axes_waiting(leaf)
    return _typed(factor, mesh=_mesh(leaf), reduced=axes) if axes else factor


def total(accumulator: Tree, at_end: Scalar) -> Tree:
    """The sums with their parts added up where `at_end` holds, else zeros; sums that are not in parts as they are.

    A `lax.cond`, also where the inner optimizer runs in a loop: XLA would add up the parts before the loop, in every micro-batch.
    """
    leaves, structure = jax.tree.flatten(accumulator)
    parts = [leaf for leaf in leaves if axes_waiting(leaf)]
    if not parts:
        return accumulator
    made = iter(lax.cond(at_end, lambda: [_typed(leaf) for leaf in parts], lambda: [empty_total(leaf) for leaf in parts]))
    return jax.tree.unflatten(structure, [next(made) if axes_waiting(leaf) else leaf for leaf in leaves])


def empty_total(leaf: Array) -> Array:
    """Zeros of the type that `total` gives a sum in parts; other sums as they are."""
    return _typed(jnp.zeros(leaf.shape, leaf.dtype), mesh=_mesh(leaf), like=leaf) if axes_waiting(leaf) else leaf


def cleared(accumulator: Tree, closed: Tree, at_end: Scalar) -> Tree:
    """`closed`, the sums after the window, with sums in parts as `accumulator` has them: zeros where `at_end` holds."""

    def clear(leaf: Array, after: Array) -> Array:
        return jnp.where(at_end, zeros_like(leaf), leaf) if axes_waiting(leaf) else after

    return jax.tree.map(clear, accumulator, closed)


def as_given(updates: Tree, params: Params) -> Tree:
    """`updates` typed ``reduced`` where the parameters are, so that JAX adds the two."""
    if not any(axes_reduced(leaf) for leaf in jax.tree.leaves(params)):
        return updates
    return jax.tree.map(lambda update, p: _typed(update, reduced=axes_reduced(p)), updates, params)


def require_whole(gradients: Gradients, options: Options) -> None:
    """Refuse gradients in parts where each micro-batch's value is needed, and where JAX adds up parts wrongly.

    Raises:
        UsageError: they are in parts, and micro-batches may be dropped or the noise scale is measured; or this JAX is too old.
    """
    if not _any_in_parts(gradients):
        return
    _require_newer_jax("grads")
    if options.on_overflow == "drop_micro_batch":
        expected = "gradients that are reduced, as each micro-batch is looked at by itself"
        raise explain(UsageError, "on_overflow", expected=expected, found="'drop_micro_batch' with unreduced ones", fix=FIX)
    if options.noise_decay is not None:
        expected = "gradients that are reduced, as the first micro-batch's norm is measured"
        raise explain(UsageError, "noise_scale", expected=expected, found="unreduced ones", fix=FIX)


def refuse_parts(gradients: Gradients) -> None:
    """Refuse gradients in parts, for `gradaccum_jax.MultiSteps`, whose mean and whose skip function are of whole ones.

    Raises:
        UsageError: they are in parts.
    """
    if _any_in_parts(gradients):
        fix = "Write gradaccum.wrap(optimizer, steps=4), which takes them; or reduce them: jax.reshard(grads, PartitionSpec())."
        raise explain(UsageError, "updates", expected="gradients that are reduced", found="unreduced ones", fix=fix)


@partial(jax.jit, keep_unused=True)
def _empty_parts(leaf: Array) -> Array:
    """Jitted, because `gradaccum_jax.discard` may be called where no mesh is set: `leaf` then says which devices there are."""
    return _typed(empty_total(leaf), unreduced=axes_waiting(leaf))


def _any_in_parts(gradients: Gradients) -> bool:
    return any(axes_waiting(gradient) for gradient in gradients if gradient is not None)


def _require_newer_jax(argument: str) -> None:
    if not ADDS_PARTS_RIGHT:
        expected = "no reduced or unreduced types, which JAX adds up rightly from 0.10 on"
        fix = "Write gradaccum_jax.data_parallel(step, mesh, axis_name), or reduce the gradients before tx.update."
        raise explain(UsageError, argument, expected=expected, found=f"such types in JAX {jax.__version__}", fix=fix)


def _in_parts(leaf: Array, axes: Axes) -> Array:
    return leaf if axes == axes_waiting(leaf) else _typed(leaf, unreduced=axes)


def _spec(leaf: Array) -> Any:
    """That of its type; None for what is no array, such as a function in an equinox model."""
    return getattr(typeof(leaf).sharding, "spec", None) if hasattr(leaf, "dtype") else None


def _mesh(leaf: Array) -> Any:
    return typeof(leaf).sharding.mesh


def _typed(leaf: Array, *, mesh: Any = None, like: Array = None, **axes: Axes) -> Array:
    """`leaf` sharded as it is, or as `like` is, with these reduced and unreduced axes and no others."""
    partitions = _spec(leaf if like is None else like).partitions
    spec: Any = PartitionSpec
    return reshard(leaf, NamedSharding(mesh or _mesh(leaf), spec(*partitions, **axes)))
