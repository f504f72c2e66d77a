"""A batch that is spread over a mesh: every device cuts its own part, and the devices reduce once per call.

Under `jax.jit` alone XLA would gather a batch that is sharded along the axis that is cut, or reduce in every micro-batch. So the call runs
inside `jax.shard_map`, where each device sees its own items only: micro-batch number i of the call is the i-th of each device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import explain
from gradaccum_jax.large_batch.batch import Batch, is_cut
from gradaccum_jax.large_batch.merging import ROWS
from gradaccum_jax.large_batch.splitting import Splitting
from gradaccum_jax.types import Tree
from gradaccum_jax.varying import shard_map
from gradaccum_jax.workers.crossing import placed

_FIX = "Write mesh = jax.make_mesh((4,), ('data',)) and axis_name='data'."


def require_mesh(mesh: object, axis_names: tuple[str, ...], splitting: Splitting) -> Mesh | None:
    """`mesh` if it has these axes, and if every device can cut its own part alike.

    Raises:
        ArgumentTypeError: it is no mesh, or the micro-batches depend on values.
        ArgumentValueError: it has no such axes, or none is named.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise explain(ArgumentTypeError, "mesh", expected="a jax.sharding.Mesh", got=mesh, fix=_FIX)
    if not axis_names or not set(axis_names) <= set(mesh.axis_names):
        expected = f"axes of the mesh, which are {mesh.axis_names}"
        raise explain(ArgumentValueError, "axis_name", expected=expected, got=axis_names or None, fix=_FIX)
    if splitting.split is not None or splitting.division.micro_batch_weight is not None:
        fix = "Write steps or micro_batch_size; or call it inside jax.shard_map with axis_name alone, and split there."
        expected = "micro-batches of equal size on every device"
        raise explain(ArgumentTypeError, "mesh", expected=expected, found="a mesh beside split or micro_batch_weight", fix=fix)
    return mesh


def devices_of(mesh: Mesh | None, axis_names: tuple[str, ...]) -> int:
    """How many devices cut the batch; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in axis_names)


def over_mesh(local: Callable[..., Any], mesh: Mesh, axis_names: tuple[str, ...], aux: Tree) -> Callable[..., Any]:
    """`local`, a function of (by, batch) that reduces over `axis_names`, as one of the whole batch.

    Args:
        local: returns ``((loss, aux), gradients)``, all but concatenated rows alike on all devices.
        mesh: along its other axes the compiler partitions.
        axis_names: the axes over which the items are spread.
        aux: how aux merges, a prefix of it.
    """
    spec: Any = PartitionSpec
    over, whole = spec(axis_names), spec()
    rows = jax.tree.map(lambda kind: over if kind == ROWS else whole, aux)

    def run(by: tuple[Tree, ...], batch: Batch) -> Any:
        leaves = [spec(*[None] * int(axis or 0), axis_names) if is_cut(axis) else whole for axis in batch.axes]
        weights = None if batch.item_weights is None else over
        specs = (whole, dataclasses.replace(batch, leaves=leaves, item_weights=weights))
        given, structure = jax.tree.flatten((by, batch))
        per_leaf = [whole] * len(jax.tree.leaves(by)) + leaves + ([] if weights is None else [weights])
        given = jax.tree.unflatten(structure, placed(given, mesh, per_leaf, axis_names))
        return shard_map(local, mesh=mesh, in_specs=specs, out_specs=((whole, rows), whole), axis_names=set(axis_names))(*given)

    return run
