"""`verify_loss_scaling`: a check that a loss carries its incoming gradient through all of its parts, so that it can be scaled.

The gradients of the whole loss at several scales show whether something is wrong, the traced program shows where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gradaccum import ArgumentValueError, LinearityReport
from gradaccum.kit import SCALES, comparable, explain, linearity_report
from gradaccum_jax.arrays import Array, DType, Leaves, Params, Tree, unique


def verify_loss_scaling(loss_fn: Callable[..., Any], params: Params, *args: Tree) -> LinearityReport:
    """Check that grad(s x loss) = s x grad(loss) for s in 2^0 ... 2^16.

    Powers of two multiply a float exactly, so the two sides differ only in numbers that leave a dtype's range. To keep such numbers out,
    float16 and bfloat16 leaves of `params` and `args` are taken as float32 where `loss_fn` can be traced so. If `loss_fn` itself computes
    in float16, only the four largest scales with finite gradients are compared: at smaller scales gradients may have vanished. The
    tolerance is sixteen units in the last place of the coarsest floating dtype in the program.

    Not for use under `jax.jit`: it looks at values. Nothing is changed, and no random state is used.

    Args:
        loss_fn: ``loss_fn(params, *args)`` returns a floating scalar, not scaled.
        params: the tree to differentiate by; leaves of integers are left alone.
        args: the rest, trees of arrays.

    Returns:
        A `gradaccum.LinearityReport`: errors by the path of the parameter, culprits by the name of the function under `jax.custom_vjp`.

    Raises:
        ArgumentValueError: `loss_fn` does not return a floating scalar.
    """
    params, args = _in_float32(loss_fn, params, args)
    program = jax.make_jaxpr(loss_fn)(params, *args)
    _require_scalar(program.out_avals)
    kinds = [variable.aval for eqn in equations(program.jaxpr) for variable in eqn.outvars]
    dtypes = {kind.dtype for kind in (*program.in_avals, *kinds) if hasattr(kind, "dtype") and is_float(kind)}
    value, pull_back = jax.vjp(lambda tree: loss_fn(tree, *args), params)
    gradients = unscaled_gradients(pull_back, jnp.ones_like(value))
    return report(gradients, non_linear_rules(program.jaxpr), dtypes)


def _in_float32(loss_fn: Callable[..., Any], params: Params, args: tuple[Tree, ...]) -> tuple[Params, tuple[Tree, ...]]:
    """Cast half-precision leaves to float32, unless the function then mixes dtypes that do not go together."""

    def widen(leaf: Array) -> Array:
        return jnp.asarray(leaf, jnp.float32) if is_float(leaf) and jnp.result_type(leaf).itemsize < 4 else leaf

    wide = jax.tree.map(widen, (params, args))
    try:
        jax.eval_shape(loss_fn, wide[0], *wide[1])
    except TypeError:
        return params, args
    return wide[0], wide[1]


def _require_scalar(results: Leaves) -> None:
    if len(results) != 1 or results[0].shape != () or not is_float(results[0]):
        fix = "Return the loss alone, reduced to one number."
        raise explain(ArgumentValueError, "loss_fn", expected="one floating scalar as its result", found=f"results of {results}", fix=fix)


# The distance of gradients from proportionality to the loss's scale: both looks ask this.


Gradients = dict[str, Array]
"""Float64 arrays by path."""


def unscaled_gradients(pull_back: Callable[..., Tree], cotangent: Tree) -> Iterator[Gradients]:
    for scale in SCALES:
        scaled = jax.tree.map(lambda leaf, s=scale: (leaf * jnp.float32(s)).astype(leaf.dtype) if is_float(leaf) else leaf, cotangent)
        flat = jax.tree_util.tree_flatten_with_path(pull_back(scaled))[0]
        names = unique(jax.tree_util.keystr(path[1:]) or "params" for path, _ in flat)
        yield {name: _wide(leaf) / scale for name, (_, leaf) in zip(names, flat, strict=True) if is_float(leaf)}


def report(gradients: Iterable[Gradients], culprits: Iterable[str], dtypes: Iterable[DType]) -> LinearityReport:
    met = set(map(jnp.dtype, dtypes))
    compared = comparable(gradients, _is_finite, float16=jnp.dtype(jnp.float16) in met)
    return linearity_report(compared, culprits, max((float(jnp.finfo(dtype).eps) for dtype in met), default=0.0), _norm)


def is_float(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf), jnp.inexact))


def _is_finite(gradients: Gradients) -> bool:
    return all(np.isfinite(gradient).all() for gradient in gradients.values())


def _norm(gradient: Array) -> float:
    return float(np.linalg.norm(gradient))


def _wide(leaf: Array) -> Array:
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)


# The `jax.custom_vjp` functions in a traced program, and whether the pull-back of each is linear in its cotangent.
#
# A pull-back that JAX derives is linear by construction, so only these can go wrong. Each is checked by itself, with made-up inputs of its
# shapes, however deep it is nested: linearity in the cotangent must not depend on the inputs. Inside of `jax.shard_map`, where its types
# and its collectives mean something, none is run alone: there the gradients of the whole loss tell.


Program = Any
"""A `jax.extend.core.Jaxpr` or ``ClosedJaxpr``."""
Equation = Any
"""One equation of a program: a `jax.extend.core.JaxprEqn`."""

KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def equations(jaxpr: Program, *, on_meshes: bool = True) -> Iterator[Equation]:
    """Yield the equations of a program and of all programs in it, but for functions with rules of their own."""
    for eqn in jaxpr.eqns:
        yield eqn
        if "custom" not in eqn.primitive.name and (on_meshes or eqn.primitive.name != "shard_map"):
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(value):
                    yield from equations(getattr(value, "jaxpr", value), on_meshes=on_meshes)


def non_linear_rules(jaxpr: Program) -> list[str]:
    """Return the functions under `jax.custom_vjp` or `jax.custom_gradient` whose pull-back does not scale."""
    custom = [eqn for eqn in equations(jaxpr, on_meshes=False) if "custom_vjp" in eqn.primitive.name]
    return [_name(eqn) for eqn in custom if not _is_linear(eqn)]


def _name(eqn: Equation) -> str:
    """Return the function's name without the place, which the trace adds: ``name at file:line``."""
    return str(_debug_info(eqn).func_src_info).split(" at ")[0]


def _is_linear(eqn: Equation) -> bool:
    rng = np.random.default_rng(0)
    inputs = list(dict.fromkeys(variable for variable in eqn.invars if not isinstance(variable, core.Literal)))
    outputs, pull_back = jax.vjp(_alone(eqn, inputs), *(_made_up(variable.aval, rng) for variable in inputs))
    dtypes = [variable.aval.dtype for variable in (*inputs, *eqn.outvars) if is_float(variable.aval)]
    gradients = unscaled_gradients(lambda scaled: (pull_back(scaled),), [_cotangent(output, rng) for output in outputs])
    return report(gradients, (), dtypes).linear


def _alone(eqn: Equation, inputs: list[Any]) -> Callable[..., Any]:
    debug_info = _debug_info(eqn)._replace(arg_names=("",) * len(inputs), result_paths=("",) * len(eqn.outvars))
    jaxpr = core.Jaxpr([], inputs, eqn.outvars, [eqn], debug_info=debug_info)
    function: Callable[..., Any] = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    return function


def _debug_info(eqn: Equation) -> Any:
    jaxpr = next(value for value in eqn.params.values() if _is_jaxpr(value))
    return getattr(jaxpr, "jaxpr", jaxpr).debug_info


def _made_up(kind: Array, rng: np.random.Generator) -> Array:
    """Return numbers in (1/4, 3/4), where most functions are defined; zeros of other dtypes, since index 0 always exists."""
    shape = kind.shape
    if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=KEY_IMPLEMENTATIONS.get(str(kind.dtype))), shape)
    return jnp.asarray(rng.uniform(0.25, 0.75, shape) if is_float(kind) else np.zeros(shape), kind.dtype)


def _cotangent(output: Array, rng: np.random.Generator) -> Array:
    return _made_up(output, rng) if is_float(output) else np.zeros(np.shape(output), jax.dtypes.float0)


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
