"""Whether a program is partitioned over several devices, which JAX knows only when it lowers.

`jax.jit` hands arrays that are sharded over a mesh to functions that were traced without a word of it, and XLA partitions the program
afterwards. Inside `jax.shard_map` and `jax.pmap` each device has a program of its own, and nothing is partitioned.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

_partitioned: Any = core.Primitive("partitioned")


def partitioned() -> Any:
    """A bool scalar that is a constant of the lowered program: what hangs on it costs nothing when it runs."""
    return _partitioned.bind()


def explicitly_sharded(leaf: Any) -> bool:
    """Whether its type says how it is sharded (``AxisType.Explicit``): JAX then refuses reshapes that would gather it."""
    typeof: Any = jax.typeof
    return any(axis is not None for axis in typeof(leaf).sharding.spec)


def _lowered(context: mlir.LoweringRuleContext) -> Any:
    value = _is_partitioned(context.module_context.axis_context)
    lower: Any = mlir.lower_fun
    return lower(lambda: jnp.asarray(value), multiple_results=False)(context)


def _is_partitioned(axes: Any) -> bool:
    if isinstance(axes, mlir.ShardingContext):
        return bool(axes.num_devices > 1)
    if isinstance(axes, mlir.SPMDAxisContext):
        return bool(math.prod(size for name, size in axes.mesh.shape.items() if name not in axes.manual_axes) > 1)
    return False


_partitioned.def_impl(lambda: jnp.asarray(jax.device_count() > 1))
_partitioned.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
mlir.register_lowering(_partitioned, _lowered)
