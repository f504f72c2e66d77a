"""The `jax.custom_vjp` functions in a traced program, and whether the pull-back of each is linear in its cotangent.

A pull-back that JAX derives is linear by construction, so only these can go wrong. Each is checked by itself, with made-up inputs of its
shapes, however deep it is nested: linearity in the cotangent must not depend on the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gradaccum_jax.linearity.errors import is_float, report, unscaled_gradients
from gradaccum_jax.types import Array

Program = Any
"""A `jax.extend.core.Jaxpr` or ``ClosedJaxpr``."""
Equation = Any
"""One equation of a program: a `jax.extend.core.JaxprEqn`."""

KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def equations(jaxpr: Program) -> Iterator[Any]:
    """Every equation of a jaxpr and of those inside it, but not of functions with derivatives of their own."""
    for eqn in jaxpr.eqns:
        yield eqn
        if "custom" not in eqn.primitive.name:
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(value):
                    yield from equations(getattr(value, "jaxpr", value))


def non_linear_rules(jaxpr: Program) -> list[str]:
    """The names of the functions under `jax.custom_vjp` or `jax.custom_gradient` whose pull-back does not scale."""
    custom = [eqn for eqn in equations(jaxpr) if "custom_vjp" in eqn.primitive.name]
    return [_name(eqn) for eqn in custom if not _is_linear(eqn)]


def _name(eqn: Equation) -> str:
    """The name of the function as the user wrote it: the trace says ``name at file:line``."""
    return str(_debug_info(eqn).func_src_info).split(" at ")[0]


def _is_linear(eqn: Equation) -> bool:
    rng = np.random.default_rng(0)
    inputs = list(dict.fromkeys(variable for variable in eqn.invars if not isinstance(variable, core.Literal)))
    outputs, pull_back = jax.vjp(_alone(eqn, inputs), *(_made_up(variable.aval, rng) for variable in inputs))
    dtypes = [variable.aval.dtype for variable in (*inputs, *eqn.outvars) if is_float(variable.aval)]
    gradients = unscaled_gradients(lambda scaled: (pull_back(scaled),), [_cotangent(output, rng) for output in outputs])
    return report(gradients, (), dtypes).linear


def _alone(eqn: Equation, inputs: list[Any]) -> Callable[..., Any]:
    """The equation as a function of its inputs."""
    debug_info = _debug_info(eqn)._replace(arg_names=("",) * len(inputs), result_paths=("",) * len(eqn.outvars))
    jaxpr = core.Jaxpr([], inputs, eqn.outvars, [eqn], debug_info=debug_info)
    function: Callable[..., Any] = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    return function


def _debug_info(eqn: Equation) -> Any:
    jaxpr = next(value for value in eqn.params.values() if _is_jaxpr(value))
    return getattr(jaxpr, "jaxpr", jaxpr).debug_info


def _made_up(kind: Array, rng: np.random.Generator) -> Array:
    """Numbers in (1/4, 3/4), where most functions are defined; zeros of other dtypes, since index 0 always exists."""
    if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=KEY_IMPLEMENTATIONS.get(str(kind.dtype))), kind.shape)
    return jnp.asarray(rng.uniform(0.25, 0.75, kind.shape) if is_float(kind) else np.zeros(kind.shape), kind.dtype)


def _cotangent(output: Array, rng: np.random.Generator) -> Array:
    return _made_up(output, rng) if is_float(output) else np.zeros(np.shape(output), jax.dtypes.float0)


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
