"""The `jax.custom_vjp` functions in a traced program, and whether the pull-back of each is linear in its cotangent.

A pull-back that JAX derives is linear by construction, so only these can go wrong. Each is checked by itself, with made-up inputs of its
shapes, however deep it is nested: linearity in the cotangent must not depend on the inputs. Inside of `jax.shard_map` it is run on the same
mesh, because its types and its collectives mean something only there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gradaccum_jax.linearity.errors import is_float, report, unscaled_gradients
from gradaccum_jax.types import Array
from gradaccum_jax.varying import axes_of, shard_map

Program = Any
"""A `jax.extend.core.Jaxpr` or ``ClosedJaxpr``."""
Equation = Any
"""One equation of a program: a `jax.extend.core.JaxprEqn`."""

MESHES = (jax.sharding.Mesh, jax.sharding.AbstractMesh)
KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


class Found(NamedTuple):
    """An equation of a program."""

    eqn: Equation
    mesh: Any
    """That of the `jax.shard_map` around it, None outside of one."""


def equations(jaxpr: Program, mesh: Any = None) -> Iterator[Found]:
    """Every equation of a jaxpr on a mesh, and of those inside it, but not of functions with derivatives of their own."""
    for eqn in jaxpr.eqns:
        yield Found(eqn, mesh)
        if "custom" not in eqn.primitive.name:
            within = (
                next(value for value in eqn.params.values() if isinstance(value, MESHES)) if eqn.primitive.name == "shard_map" else mesh
            )
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(value):
                    yield from equations(getattr(value, "jaxpr", value), within)


def non_linear_rules(jaxpr: Program) -> list[str]:
    """The names of the functions under `jax.custom_vjp` or `jax.custom_gradient` whose pull-back does not scale."""
    custom = [found for found in equations(jaxpr) if "custom_vjp" in found.eqn.primitive.name]
    return [_name(found.eqn) for found in custom if not _is_linear(found)]


def _name(eqn: Equation) -> str:
    """The name of the function as the user wrote it: the trace says ``name at file:line``."""
    return str(_debug_info(eqn).func_src_info).split(" at ")[0]


def _is_linear(found: Found) -> bool:
    rng, eqn = np.random.default_rng(0), found.eqn
    inputs = list(dict.fromkeys(variable for variable in eqn.invars if not isinstance(variable, core.Literal)))
    function = _alone(eqn, inputs) if found.mesh is None else _on_mesh(_alone(eqn, inputs), inputs, eqn.outvars, found.mesh)
    outputs, pull_back = jax.vjp(function, *(_made_up(variable.aval, rng, _copies(variable, found.mesh)) for variable in inputs))
    dtypes = [variable.aval.dtype for variable in (*inputs, *eqn.outvars) if is_float(variable.aval)]
    gradients = unscaled_gradients(lambda scaled: (pull_back(scaled),), [_cotangent(output, rng) for output in outputs])
    return report(gradients, (), dtypes).linear


def _on_mesh(function: Callable[..., Any], inputs: list[Any], outputs: list[Any], mesh: Any) -> Callable[..., Any]:
    """`function` of each device's own values, as one of arrays with an axis before all others where devices differ."""
    spec: Any = jax.sharding.PartitionSpec
    specs = [[spec(axes) if (axes := _axes(variable)) else spec() for variable in variables] for variables in (inputs, outputs)]

    def body(*given: Array) -> list[Array]:
        made = function(*(leaf[0] if _axes(variable) else leaf for leaf, variable in zip(given, inputs, strict=True)))
        return [leaf[None] if _axes(variable) else leaf for leaf, variable in zip(made, outputs, strict=True)]

    lifted: Callable[..., Any] = jax.jit(shard_map(body, mesh=mesh, in_specs=tuple(specs[0]), out_specs=specs[1]))
    return lifted


def _axes(variable: Any) -> tuple[str, ...]:
    return tuple(sorted(axes_of(variable.aval)))


def _copies(variable: Any, mesh: Any) -> tuple[int, ...]:
    """The length of the axis before all others."""
    axes = _axes(variable)
    return (math.prod(mesh.shape[axis] for axis in axes),) if mesh is not None and axes else ()


def _alone(eqn: Equation, inputs: list[Any]) -> Callable[..., Any]:
    """The equation as a function of its inputs."""
    debug_info = _debug_info(eqn)._replace(arg_names=("",) * len(inputs), result_paths=("",) * len(eqn.outvars))
    jaxpr = core.Jaxpr([], inputs, eqn.outvars, [eqn], debug_info=debug_info)
    function: Callable[..., Any] = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    return function


def _debug_info(eqn: Equation) -> Any:
    jaxpr = next(value for value in eqn.params.values() if _is_jaxpr(value))
    return getattr(jaxpr, "jaxpr", jaxpr).debug_info


def _made_up(kind: Array, rng: np.random.Generator, copies: tuple[int, ...] = ()) -> Array:
    """Numbers in (1/4, 3/4), where most functions are defined; zeros of other dtypes, since index 0 always exists."""
    shape = (*copies, *kind.shape)
    if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=KEY_IMPLEMENTATIONS.get(str(kind.dtype))), shape)
    return jnp.asarray(rng.uniform(0.25, 0.75, shape) if is_float(kind) else np.zeros(shape), kind.dtype)


def _cotangent(output: Array, rng: np.random.Generator) -> Array:
    return _made_up(output, rng) if is_float(output) else np.zeros(np.shape(output), jax.dtypes.float0)


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
