"""Whether a program is partitioned over several devices. JAX knows this only when it lowers the program.

`jax.jit` traces a function without knowing how its arguments are sharded, and XLA partitions the program afterwards. Inside `jax.shard_map`
and `jax.pmap` each device has a program of its own, and nothing is partitioned.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from gradaccum.kit import Scalar
from gradaccum_jax.types import Array, typeof

_partitioned: Any = core.Primitive("partitioned")


def partitioned() -> Scalar:
    """A bool scalar that is a constant of the lowered program: a conditional on it costs nothing when the program runs."""
    return _partitioned.bind()


def explicitly_sharded(leaf: Array) -> bool:
    """Whether the type of `leaf` says how it is sharded (``AxisType.Explicit``): JAX then refuses reshapes that would gather it."""
    return any(axis is not None for axis in typeof(leaf).sharding.spec)


def _lowered(context: mlir.LoweringRuleContext) -> Any:
    value = _is_partitioned(context.module_context.axis_context)
    lower: Any = mlir.lower_fun
    return lower(lambda: jnp.asarray(value), multiple_results=False)(context)


def _is_partitioned(axes: object) -> bool:
    if isinstance(axes, mlir.ShardingContext):
        return bool(axes.num_devices > 1)
    if isinstance(axes, mlir.SPMDAxisContext):
        return bool(math.prod(size for name, size in axes.mesh.shape.items() if name not in axes.manual_axes) > 1)
    return False


_partitioned.def_impl(lambda: jnp.asarray(jax.device_count() > 1))
_partitioned.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
mlir.register_lowering(_partitioned, _lowered)
