"""Whether a loss passes its incoming gradient on through every part, as loss scaling assumes.

The check looks twice: the gradients of the whole loss at several scales tell whether something is wrong, the traced program tells where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import ArgumentValueError, LinearityReport
from gradaccum.kit import explain
from gradaccum_jax.linearity.custom_rules import equations, non_linear_rules
from gradaccum_jax.linearity.errors import is_float, report, unscaled_gradients
from gradaccum_jax.types import Array, Leaves, Params, Tree


def verify_loss_scaling(loss_fn: Callable[..., Any], params: Params, *args: Tree) -> LinearityReport:
    """Check that grad(s x loss) = s x grad(loss) for s in 2^0 ... 2^16.

    Powers of two multiply a float exactly, so the two sides differ only in numbers that leave a dtype's range. To keep such numbers out,
    float16 and bfloat16 leaves of `params` and `args` are taken as float32 where `loss_fn` can be traced so. If `loss_fn` itself computes
    in float16, only the four largest scales with finite gradients are compared: at smaller scales gradients may have vanished, the reason
    for loss scaling. The tolerance is sixteen units in the last place of the coarsest floating dtype in the program.

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
    kinds = [variable.aval for found in equations(program.jaxpr) for variable in found.eqn.outvars]
    dtypes = {kind.dtype for kind in (*program.in_avals, *kinds) if hasattr(kind, "dtype") and is_float(kind)}
    value, pull_back = jax.vjp(lambda tree: loss_fn(tree, *args), params)
    gradients = unscaled_gradients(pull_back, jnp.ones_like(value))
    return report(gradients, non_linear_rules(program.jaxpr), dtypes)


def _in_float32(loss_fn: Callable[..., Any], params: Params, args: tuple[Tree, ...]) -> tuple[Params, tuple[Tree, ...]]:
    """The arguments with half-precision leaves as float32, unless the function then mixes dtypes that do not go together."""

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
