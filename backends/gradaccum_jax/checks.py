"""What is refused, at the call that is wrong and before anything changed: while JAX traces, at no cost when the program runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError, ArgumentValueError, GradientError, accumulate_dtype_error, explain, require_weight
from gradaccum_jax.masters import is_half
from gradaccum_jax.state import AccumulationState


def require_dtype(accumulate_dtype: Any) -> Any:
    """`accumulate_dtype` as a dtype, None as it is.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is no floating dtype.
    """
    if accumulate_dtype is None:
        return None
    # JAX's own bfloat16, whatever another package in this process has registered with NumPy under that name.
    named = getattr(jnp, accumulate_dtype, accumulate_dtype) if isinstance(accumulate_dtype, str) else accumulate_dtype
    try:
        dtype = jnp.dtype(named)
    except TypeError as error:
        raise accumulate_dtype_error(accumulate_dtype) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise accumulate_dtype_error(accumulate_dtype)
    return dtype


def require_state(state: Any) -> AccumulationState:
    """`state` if it is a wrapped optimizer's.

    Raises:
        ArgumentTypeError: it is not.
    """
    if isinstance(state, AccumulationState):
        return state
    fix = "Pass what tx.init(params) returned. A checkpoint is restored into that structure; in a chain it is one of the chain's states."
    raise explain(ArgumentTypeError, "state", expected="the state of a wrapped optimizer", got=f"a {type(state).__name__}", fix=fix)


def require_params(params: Any, masters: Any) -> None:
    """Refuse parameters that `masters` are not the masters of.

    Raises:
        ArgumentTypeError: there are none.
        ArgumentValueError: their float16 and bfloat16 leaves have other paths or shapes.
    """
    fix = "Pass the parameters that tx.init was given: tx.update(grads, state, params)."
    if params is None:
        raise explain(ArgumentTypeError, "params", expected="the parameters, as master_weights=True", got="nothing at all", fix=fix)
    wanted, given = _shapes(masters), _shapes(params, is_half)
    if wanted != given:
        expected = f"float16 or bfloat16 parameters of these shapes: {wanted}"
        raise explain(ArgumentValueError, "params", expected=expected, got=f"these: {given}", fix=fix)


def _shapes(tree: Any, chosen: Callable[[Any], bool] = lambda leaf: True) -> dict[str, Any]:
    """The shapes of the leaves that are `chosen`, by path."""
    return {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if chosen(leaf)}


def as_weight(weight: Any, dtype: Any) -> Any:
    """A micro-batch's weight as a scalar array of `dtype`; None as it is.

    A traced weight cannot be looked at: one that is negative or not finite is treated as a gradient that is not finite.

    Raises:
        ArgumentTypeError: it is not a real scalar.
        ArgumentValueError: it is negative, infinite or NaN.
    """
    if weight is None:
        return None
    if np.shape(weight) != ():
        fix = "Sum the weights of the items: weight=mask.sum()."
        raise explain(ArgumentTypeError, "weight", expected="a scalar", got=f"shape {np.shape(weight)}", fix=fix)
    if not isinstance(weight, jax.core.Tracer):
        return jnp.asarray(require_weight(weight), dtype)
    if not jnp.issubdtype(weight.dtype, jnp.floating) and not jnp.issubdtype(weight.dtype, jnp.integer):
        raise explain(ArgumentTypeError, "weight", expected="a real number", got=f"dtype {weight.dtype}", fix="Cast it to float32.")
    return weight.astype(dtype)


def align(gradients: Any, accumulator: Any, *, any_float: bool) -> list[Any]:
    """The gradients in the order of the accumulator's leaves; None where there is none.

    A None may also stand for a whole subtree. Containers may differ in type as long as the paths agree.

    Args:
        gradients: the tree the user gave.
        accumulator: the tree of sums.
        any_float: let through dtypes that are wider than the accumulator's, because its dtype was chosen by the user.

    Raises:
        GradientError: another structure, shape or dtype, naming the path of the leaf.
    """
    held, _ = jax.tree_util.tree_flatten_with_path(accumulator)
    given, _ = jax.tree_util.tree_flatten_with_path(gradients, is_leaf=lambda node: node is None)
    found = {jax.tree_util.keystr(path): leaf for path, leaf in given}
    absent = tuple(path for path, leaf in found.items() if leaf is None)
    names = [jax.tree_util.keystr(path) for path, _ in held]
    _check_names(names, found, absent)
    for name, (_, leaf) in zip(names, held, strict=True):
        _check_leaf(name, found.get(name), leaf, any_float)
    return [_array(found.get(name)) for name in names]


def _check_names(names: list[str], found: dict[str, Any], absent: tuple[str, ...]) -> None:
    for name in names:
        if name not in found and not any(_is_under(name, path) for path in absent):
            _refuse(name, "a gradient (None if the parameter took no part)", "nothing at all")
    for name in found.keys() - set(names):
        if found[name] is not None:
            _refuse(name, "no gradient, as the parameters have no such leaf", f"one of shape {np.shape(found[name])}")


def _is_under(name: str, path: str) -> bool:
    return name.startswith(path) and name[len(path)] in "[."


def _check_leaf(name: str, gradient: Any, held: Any, any_float: bool) -> None:
    if _array(gradient) is None:
        return
    if np.shape(gradient) != held.shape:
        _refuse(name, f"a gradient of shape {held.shape}", f"one of shape {np.shape(gradient)}")
    try:
        dtype = jnp.result_type(gradient)
    except TypeError:
        _refuse(name, "an array", f"a {type(gradient).__name__}")
    if any_float and jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(held.dtype, jnp.inexact):
        return
    if jnp.issubdtype(dtype, jnp.inexact) != jnp.issubdtype(held.dtype, jnp.inexact):
        _refuse(name, f"a gradient of dtype {held.dtype}", f"one of dtype {dtype}")
    if jnp.promote_types(dtype, held.dtype) != held.dtype:
        _refuse(name, f"a gradient of a dtype that {held.dtype} holds", f"one of dtype {dtype}")


def _array(gradient: Any) -> Any:
    """None for a float0 too: JAX's gradient of an integer parameter."""
    return None if getattr(gradient, "dtype", None) == jax.dtypes.float0 else gradient


def _refuse(name: str, expected: str, got: str) -> NoReturn:
    fix = "Differentiate with respect to the parameters that were given to tx.init."
    raise explain(GradientError, f"grads{name}", expected=expected, got=got, fix=fix)
