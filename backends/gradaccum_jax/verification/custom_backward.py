"""Custom backwards that do not carry their incoming gradient through, so that their
loss cannot be scaled.

The gradients at several scales show whether something is wrong, the traced program
shows where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from gradaccum import LinearityReport
from gradaccum.kit import SCALES, comparable, linearity_report
from gradaccum_jax.arrays import Array, DType, Params, Tree, unique
from gradaccum_jax.programs import Equation, programs_in
from gradaccum_jax.verification.batch import is_float, require_scalar, wide


def verify_loss_scaling(
    loss_fn: Callable[..., Any], params: Params, *args: Tree
) -> LinearityReport:
    """Check that grad(s x loss) = s x grad(loss) for s in 2^0 ... 2^16.

    Powers of two multiply a float exactly, so the sides differ only where numbers leave
    a dtype's range. So float16 and bfloat16 leaves are taken as float32 where `loss_fn`
    can be traced so. If `loss_fn` itself computes in float16, only the four largest
    scales with finite gradients are compared. The tolerance is sixteen units in the
    last place of the coarsest floating dtype in the program.

    Not for use under `jax.jit`: it looks at values. Nothing is changed, and no random
    state is used.

    Args:
        loss_fn: ``loss_fn(params, *args)`` returns a floating scalar, not scaled.
        params: the tree to differentiate by; leaves of integers are left alone.
        args: the rest, trees of arrays.

    Returns:
        A `gradaccum.LinearityReport`: errors by the path of the parameter, culprits by
            the name of the function under `jax.custom_vjp`.

    Raises:
        ArgumentValueError: `loss_fn` does not return a floating scalar.
    """
    params, args = _in_float32(loss_fn, params, args)
    program = jax.make_jaxpr(loss_fn)(params, *args)
    require_scalar(
        program.out_avals[0]
        if len(program.out_avals) == 1
        else tuple(program.out_avals)
    )
    value, pull_back = jax.vjp(lambda tree: loss_fn(tree, *args), params)
    gradients = _unscaled_gradients(pull_back, jnp.ones_like(value))
    return _report(
        gradients, non_linear_rules(program.jaxpr), float_dtypes(program.jaxpr)
    )


def _in_float32(
    loss_fn: Callable[..., Any], params: Params, args: tuple[Tree, ...]
) -> tuple[Params, tuple[Tree, ...]]:
    """Cast half-precision leaves to float32, unless the function then mixes dtypes that
    do not go together.
    """

    def widen(leaf: Array) -> Array:
        if is_float(leaf) and jnp.result_type(leaf).itemsize < 4:
            return jnp.asarray(leaf, jnp.float32)
        return leaf

    wide = jax.tree.map(widen, (params, args))
    try:
        jax.eval_shape(loss_fn, wide[0], *wide[1])
    except TypeError:
        return params, args
    return wide[0], wide[1]


# The distance of gradients from proportionality to the loss's scale: both looks ask
# this.


Gradients = dict[str, Array]
"""Float64 arrays by path."""


def _unscaled_gradients(
    pull_back: Callable[..., Tree], cotangent: Tree
) -> Iterator[Gradients]:
    for scale in SCALES:
        scaled = jax.tree.map(
            lambda leaf, s=scale: (
                (leaf * jnp.float32(s)).astype(leaf.dtype) if is_float(leaf) else leaf
            ),
            cotangent,
        )
        flat = jax.tree_util.tree_flatten_with_path(pull_back(scaled))[0]
        names = unique(jax.tree_util.keystr(path[1:]) or "params" for path, _ in flat)
        yield {
            name: wide(leaf) / scale
            for name, (_, leaf) in zip(names, flat, strict=True)
            if is_float(leaf)
        }


def _report(
    gradients: Iterable[Gradients], culprits: Iterable[str], dtypes: set[DType]
) -> LinearityReport:
    compared = comparable(
        gradients, _is_finite, float16=jnp.dtype(jnp.float16) in dtypes
    )
    return linearity_report(
        compared,
        culprits,
        max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0),
        _norm,
    )


def _is_finite(gradients: Gradients) -> bool:
    return all(np.isfinite(gradient).all() for gradient in gradients.values())


def _norm(gradient: Array) -> float:
    return float(np.linalg.norm(gradient))


# The `jax.custom_vjp` functions in a traced program, and whether the pull-back of each
# is linear in its cotangent.
#
# A pull-back that JAX derives is linear by construction, so only these can go wrong.
# Each is checked by itself, with made-up inputs of its shapes, however deep it is
# nested: linearity in the cotangent must not depend on the inputs. Inside of
# `jax.shard_map`, where its types and its collectives mean something, none is run
# alone: there the gradients of the whole loss tell.


KEY_IMPLEMENTATIONS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}


def equations(jaxpr: Any, leave_out: tuple[str, ...] = ()) -> Iterator[Equation]:
    """Yield the equations of a program and of the programs in it, except in equations
    with such words in their names.
    """
    for eqn in jaxpr.eqns:
        yield eqn
        if not any(word in eqn.primitive.name for word in leave_out):
            for within in programs_in(eqn):
                yield from equations(within, leave_out)


def float_dtypes(jaxpr: Any) -> set[DType]:
    kinds = [
        variable.aval
        for variable in (
            *jaxpr.invars,
            *(out for eqn in equations(jaxpr) for out in eqn.outvars),
        )
    ]
    return {
        jnp.dtype(kind.dtype)
        for kind in kinds
        if hasattr(kind, "dtype") and is_float(kind)
    }


def non_linear_rules(jaxpr: Any) -> list[str]:
    """Return the functions under `jax.custom_vjp` or `jax.custom_gradient` whose
    pull-back does not scale.
    """
    custom = [
        eqn
        for eqn in equations(jaxpr, ("custom", "shard_map"))
        if "custom_vjp" in eqn.primitive.name
    ]
    return [_name(eqn) for eqn in custom if not _is_linear(eqn)]


def _name(eqn: Equation) -> str:
    """Return the function's name without the place, which the trace adds:
    ``name at file:line``.
    """
    return str(_debug_info(eqn).func_src_info).split(" at ")[0]


def _is_linear(eqn: Equation) -> bool:
    rng = np.random.default_rng(0)
    inputs = list(
        dict.fromkeys(
            variable
            for variable in eqn.invars
            if not isinstance(variable, core.Literal)
        )
    )
    outputs, pull_back = jax.vjp(
        _alone(eqn, inputs), *(_made_up(variable.aval, rng) for variable in inputs)
    )
    dtypes = {
        jnp.dtype(variable.aval.dtype)
        for variable in (*inputs, *eqn.outvars)
        if is_float(variable.aval)
    }
    gradients = _unscaled_gradients(
        lambda scaled: (pull_back(scaled),),
        [_cotangent(output, rng) for output in outputs],
    )
    return _report(gradients, (), dtypes).linear


def _alone(eqn: Equation, inputs: list[Any]) -> Callable[..., Any]:
    debug_info = _debug_info(eqn)._replace(
        arg_names=("",) * len(inputs), result_paths=("",) * len(eqn.outvars)
    )
    jaxpr = core.Jaxpr([], inputs, eqn.outvars, [eqn], debug_info=debug_info)
    function: Callable[..., Any] = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    return function


def _debug_info(eqn: Equation) -> Any:
    return programs_in(eqn)[0].debug_info


def _made_up(kind: Array, rng: np.random.Generator) -> Array:
    """Return numbers in (1/4, 3/4), where most functions are defined; zeros of other
    dtypes, since index 0 always exists.
    """
    shape = kind.shape
    if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(
            jax.random.key(0, impl=KEY_IMPLEMENTATIONS.get(str(kind.dtype))), shape
        )
    return jnp.asarray(
        rng.uniform(0.25, 0.75, shape) if is_float(kind) else np.zeros(shape),
        kind.dtype,
    )


def _cotangent(output: Array, rng: np.random.Generator) -> Array:
    if is_float(output):
        return _made_up(output, rng)
    return np.zeros(np.shape(output), jax.dtypes.float0)
