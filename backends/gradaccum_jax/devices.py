"""Whether a program is partitioned over several devices. JAX knows this only when it lowers the program.

`jax.jit` traces a function without knowing how its arguments are sharded, and XLA partitions the program afterwards. Inside `jax.shard_map`
and `jax.pmap` each device has a program of its own, and nothing is partitioned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import AxisType

from gradaccum.kit import Scalar
from gradaccum_jax.types import Array, Leaves

Function = Callable[..., Leaves]

_partitioned: Any = core.Primitive("partitioned")
_chosen: Any = core.Primitive("chosen")
_chosen.multiple_results = True


def partitioned() -> Scalar:
    """A bool scalar that is a constant of the lowered program: a conditional on it costs nothing when the program runs."""
    return _partitioned.bind()


def explicitly_sharded(leaf: Array) -> bool:
    """Whether the type of `leaf` says how it is sharded (``AxisType.Explicit``): JAX then refuses reshapes that would gather it."""
    typeof: Any = jax.typeof
    return any(axis is not None for axis in typeof(leaf).sharding.spec)


def on_explicit_mesh(leaf: Array) -> bool:
    """Whether the type of `leaf` may say how it is sharded."""
    typeof: Any = jax.typeof
    return AxisType.Explicit in (getattr(typeof(leaf).sharding.mesh, "axis_types", None) or ())


def chosen(on_one_cpu: Function, elsewhere: Function, arguments: Leaves) -> Leaves:
    """``on_one_cpu(*arguments)`` where the program is for a CPU and not partitioned, else ``elsewhere(*arguments)``.

    This is decided where JAX lowers the program, so that the compiler never sees the other one. It has no derivative.

    Args:
        on_one_cpu: returns the same shapes and dtypes as `elsewhere`. Neither closes over traced arrays.
        elsewhere: outside of `jax.shard_map` both are possible.
        arguments: arrays.
    """
    here = jax.jit(on_one_cpu)
    return list(_chosen.bind(*arguments, on_one_cpu=here, elsewhere=elsewhere, types=_types(here, arguments)))


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


def _types(function: Function, arguments: Leaves) -> tuple[Any, ...]:
    """What `function` returns, with the mesh axes along which it varies."""
    return tuple(jax.make_jaxpr(function)(*arguments).out_avals)


def _choice(on_one_cpu: Function, elsewhere: Function, partitioned: bool, platforms: Sequence[str]) -> Function:
    return on_one_cpu if not partitioned and tuple(platforms) == ("cpu",) else elsewhere


def _run_chosen(*arguments: Array, on_one_cpu: Function, elsewhere: Function, types: Any) -> Leaves:
    return _choice(on_one_cpu, elsewhere, jax.device_count() > 1, (jax.default_backend(),))(*arguments)


def _lower_chosen(context: mlir.LoweringRuleContext, *arguments: Any, on_one_cpu: Function, elsewhere: Function, types: Any) -> Any:
    module = context.module_context
    run = _choice(on_one_cpu, elsewhere, _is_partitioned(module.axis_context), module.platforms)
    lower: Any = mlir.lower_fun
    with jax.numpy_dtype_promotion("standard"):  # as in `jitted.call_jitted`, which is left when JAX lowers
        return lower(run, multiple_results=True)(context, *arguments)


def _batch_chosen(arguments: Any, axes: Any, on_one_cpu: Function, elsewhere: Function, types: Any) -> Any:
    made = chosen(jax.vmap(on_one_cpu, tuple(axes)), jax.vmap(elsewhere, tuple(axes)), arguments)
    return made, [0] * len(made)


_chosen.def_impl(_run_chosen)
_chosen.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(_chosen, _lower_chosen)
batching.primitive_batchers[_chosen] = _batch_chosen
