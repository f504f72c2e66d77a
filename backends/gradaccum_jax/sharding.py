"""Helpers for the sharding information in JAX's types. They hide JAX's private names
and the differences between JAX versions.

Inside `jax.shard_map`, the type of a value contains the mesh axes along which the value
may differ between devices. JAX requires each result of a loop or a conditional to have
the same type as the corresponding input. But a result may vary along more axes than its
input, for example because the predicate varies along them. In this case, these helpers
first add the missing axes to the type of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, NamedSharding

from gradaccum.kit import Scalar
from gradaccum_jax.arrays import Array, Axes, Tree, typeof

T = TypeVar("T")
ShardAxes = tuple[str, ...] | None
"""The mesh axes along which parameters are sharded; None if the user did not pass
`shard_axes`.
"""


def axes_of(value: Array) -> Axes:
    """Return the mesh axes along which an array, or an abstract value, may differ
    between devices. Outside `jax.shard_map` there are no such axes.
    """
    if not isinstance(value, (jax.Array, jax.core.AbstractValue)):
        return frozenset()
    kind: Any = value
    if isinstance(value, jax.Array):
        kind = typeof(value)
    if hasattr(kind, "vma"):
        return frozenset(kind.vma)
    return frozenset(getattr(getattr(kind, "mat", None), "varying", ()))


def manual_axes() -> Axes:
    """Return the mesh axes of the surrounding `jax.shard_map`, or an empty set if there
    is no surrounding `jax.shard_map`.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Manual)


def varying_axes(*trees: Tree) -> Axes:
    """Return the mesh axes along which arrays in `trees` may differ between devices."""
    return frozenset[str]().union(*map(axes_of, jax.tree.leaves(trees)))


def vary(tree: T, axes: Axes) -> T:
    """Mark the arrays in `tree` as values that may differ between devices along the
    mesh axes `axes`.
    """
    library: Any = lax

    def vary_leaf(leaf: Array) -> Array:
        missing = tuple(sorted(axes - axes_of(leaf)))
        if not missing:
            return leaf
        if hasattr(library, "pcast"):  # JAX 0.10; in 0.7 it is `pvary`
            return library.pcast(leaf, missing, to="varying")
        return library.pvary(leaf, missing)

    return cast(T, jax.tree.map(vary_leaf, tree))


def with_axes_of_results(
    predicate: Scalar, function: Callable[[T], T], operand: T
) -> tuple[Callable[[T], T], T]:
    """Make the types of a conditional's inputs and results agree, and return the
    changed `function` and `operand`. An input and its result are marked as varying
    along a mesh axis if either of them, or `predicate`, varies along this axis.
    """
    leaves, structure = jax.tree.flatten(operand)
    while True:
        program = jax.make_jaxpr(function)(jax.tree.unflatten(structure, leaves))
        axes = [
            axes_of(predicate) | axes_of(leaf) | axes_of(result)
            for leaf, result in zip(leaves, program.out_avals, strict=True)
        ]
        if axes == [axes_of(leaf) for leaf in leaves]:
            break
        leaves = list(map(vary, leaves, axes))

    def varying_function(operand: T) -> T:
        results = map(vary, jax.tree.leaves(function(operand)), axes)
        return cast(T, jax.tree.unflatten(structure, results))

    return varying_function, cast(T, jax.tree.unflatten(structure, leaves))


def shards_of(leaf: Array, shard_axes: ShardAxes) -> tuple[str, ...]:
    return tuple(sorted(axes_of(leaf) & frozenset(shard_axes or ())))


def everywhere(flag: Scalar, shard_axes: ShardAxes) -> Scalar:
    """Return a bool scalar: True if `flag` is true on every device that stores a shard
    of the model.
    """
    axes = shards_of(flag, shard_axes)
    if not axes:
        return flag
    return lax.pmin(flag.astype(jnp.int32), axes) > 0  # type: ignore[no-untyped-call]


def explicitly_sharded(leaf: Array) -> bool:
    """True if the type of `leaf` contains its sharding (``AxisType.Explicit``)."""
    return any(axis is not None for axis in typeof(leaf).sharding.spec)


# The number of shards of an array is known from its sharding, or from the type of a
# traced array on an explicit mesh. On an ordinary mesh (``AxisType.Auto``), the type of
# a traced array contains only the mesh, and XLA decides later which device stores which
# part of the array. Under ``jax.jit(..., in_shardings=...)``, the type of a NumPy array
# does not even contain the mesh.


class AxisShards(NamedTuple):
    """The number of equal shards into which one axis of an array is divided. The number
    cannot be read from a traced array on an ordinary mesh (``AxisType.Auto``), so an
    upper bound is stored too.
    """

    known: int
    """The number of shards along the axis, according to the array's sharding or type; 1
    if neither says that the axis is sharded.
    """
    possible: int
    """An upper bound on the number of shards: the number of devices of the mesh, or 1
    if the axis is certainly not sharded. The bound is a multiple of `known`.
    """


ONE_SHARD = AxisShards(1, 1)


def axis_shards(leaf: Array, axis: int, others: Tree) -> AxisShards:
    """Return the number of shards of one axis of `leaf`. If the type of `leaf` contains
    no mesh, assume that `leaf` may be sharded over the largest mesh: the surrounding
    mesh, or the mesh of an array in `others`.
    """
    if manual_axes() or not isinstance(leaf, jax.Array):
        return ONE_SHARD
    if isinstance(leaf, jax.core.Tracer):
        return _shards_by_type(typeof(leaf).sharding, axis, others)
    shard_length = leaf.sharding.shard_shape(leaf.shape)[axis]
    if shard_length == leaf.shape[axis]:
        return ONE_SHARD
    return AxisShards(leaf.shape[axis] // shard_length, len(leaf.sharding.device_set))


def _shards_by_type(sharding: Any, axis: int, others: Tree) -> AxisShards:
    mesh = sharding.mesh
    if mesh.empty:
        return AxisShards(1, _most_devices(others))
    names = sharding.spec[axis] or ()
    if isinstance(names, str):
        names = (names,)
    known = math.prod(mesh.shape[name] for name in names)
    if known == 1 and not _is_automatic(mesh):
        return ONE_SHARD
    return AxisShards(known, mesh.size)


def _most_devices(tree: Tree) -> int:
    """Return the number of devices of the largest mesh that has automatic axes: either
    the surrounding mesh or the mesh of an array in `tree`. Return 1 if no mesh has
    automatic axes.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    meshes: list[Any] = [typeof(leaf).sharding.mesh for leaf in arrays]
    meshes.append(jax.sharding.get_abstract_mesh())
    return max([1, *(int(mesh.size) for mesh in meshes if _is_automatic(mesh))])


def _is_automatic(mesh: Any) -> bool:
    """True if `mesh` has an axis of ``AxisType.Auto``, along which XLA decides how
    arrays are sharded.
    """
    return not mesh.empty and AxisType.Auto in mesh.axis_types


def divide_axis(array: Array, axis: int, blocks: int) -> Array:
    """Split `axis` of `array` into two axes. The first new axis runs over blocks of
    items and keeps the sharding of `axis`. The second new axis runs over the items of a
    block.
    """
    length = array.shape[axis] // blocks
    shape = (*array.shape[:axis], blocks, length, *array.shape[axis + 1 :])
    return _reshaped(
        array, shape, lambda spec: (*spec[: axis + 1], None, *spec[axis + 1 :])
    )


def merge_axis(array: Array, axis: int) -> Array:
    """Undo `divide_axis`: merge `axis` of `array` and the next axis into one axis."""
    shape = (
        *array.shape[:axis],
        array.shape[axis] * array.shape[axis + 1],
        *array.shape[axis + 2 :],
    )
    return _reshaped(array, shape, lambda spec: (*spec[: axis + 1], *spec[axis + 2 :]))


def _reshaped(
    array: Array, shape: tuple[int, ...], respec: Callable[[Any], tuple[Any, ...]]
) -> Array:
    if not explicitly_sharded(array):
        return lax.reshape(array, shape)
    sharding = typeof(array).sharding
    spec = type(sharding.spec)(*respec(tuple(sharding.spec)))
    return lax.reshape(array, shape, out_sharding=NamedSharding(sharding.mesh, spec))


# Some values are the same on all devices although their types say that they may differ.
#
# At the end of a window the reduced sum overwrites each device's own sum. This happens
# in a conditional, which gives both sums the same type: the type of values that may
# differ between devices. Values computed from the reduced sum are the same on all
# devices, but JAX's types do not show this. If the types were left as they are, the
# updates would need a second buffer of the size of the model, or another all-reduce.
#
# JAX has no operation that corrects such a type, so this primitive changes the type of
# a value and nothing else.


replicated_p: Any = core.Primitive("replicated")


def replicated(tree: T, axes: tuple[str, ...]) -> T:
    """Mark the arrays in `tree` as the same on all devices along the mesh axes `axes`.
    The caller must ensure that the arrays are in fact the same.
    """

    def retype(leaf: Array) -> Array:
        varying_axes = tuple(sorted(axes_of(leaf) & frozenset(axes)))
        if varying_axes:
            return replicated_p.bind(leaf, axes=varying_axes)
        return leaf

    return cast(T, jax.tree.map(retype, tree))


def _type_after(operand: Any, *, axes: tuple[str, ...]) -> Any:
    # In JAX 0.7, the attribute `vma` of a type contains the mesh axes along which a
    # value may differ between devices. In JAX 0.10, the attribute `mat` also
    # distinguishes several ways in which the value may differ.
    if hasattr(operand, "vma"):
        return operand.update(vma=operand.vma - frozenset(axes))
    varying = operand.mat.varying - frozenset(axes)
    return operand.update(manual_axis_type=operand.mat.update(varying=varying))


def _batch(operands: Any, dimensions: Any, **params: Any) -> Any:
    return replicated_p.bind(*operands, **params), dimensions[0]


replicated_p.def_abstract_eval(_type_after)
replicated_p.def_impl(lambda operand, **_: operand)
mlir.register_lowering(replicated_p, lambda _, operand, **params: [operand])
batching.primitive_batchers[replicated_p] = _batch
