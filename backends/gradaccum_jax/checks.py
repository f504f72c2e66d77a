"""Checks of arguments, at the call that is wrong, before anything changed, while JAX
traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradientError,
    UsageError,
    kit,
)
from gradaccum.kit import (
    Options,
    Scalar,
    accumulate_dtype_error,
    explain,
    require_weight,
    wrapped_twice_error,
)
from gradaccum_jax.arrays import (
    Array,
    DType,
    Gradients,
    InnerState,
    Params,
    Tree,
    Variable,
    is_half,
    is_none,
    takes_part,
    unique,
    variables_in,
    wider,
)
from gradaccum_jax.gradient_sum import is_left_out
from gradaccum_jax.sharding import ADD_UP, axes_in_parts
from gradaccum_jax.state import AccumulationState, require_values

ACCUMULATING = (AccumulationState, optax.MultiStepsState)
"""The states of optimizers that accumulate."""


def require_dtype(accumulate_dtype: DType) -> DType:
    if accumulate_dtype is None:
        return None
    dtype = accumulate_dtype
    if isinstance(dtype, str):
        # By attribute of jnp, to get JAX's own bfloat16: another package may have
        # registered one with NumPy under that name.
        dtype = getattr(jnp, dtype, dtype)
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise accumulate_dtype_error(accumulate_dtype) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise accumulate_dtype_error(accumulate_dtype)
    return dtype


def require_arrays(tree: Tree, name: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_number = isinstance(leaf, bool | int | float | complex)
        if not (is_number or hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__")):
            raise explain(
                ArgumentTypeError,
                f"{name}{jax.tree_util.keystr(path)}",
                expected="arrays alone",
                found=f"a {type(leaf).__name__}",
                fix="Of an equinox model pass params: params, static ="
                " eqx.partition(model, eqx.is_inexact_array). The loss combines them.",
            )


SPLIT = (
    "Write graph, params, rest = nnx.split(model, nnx.Param, ...), and in the loss"
    " function of params model = nnx.merge(graph, params, rest, copy=True)"
)
"""What to do with a flax nnx module."""


def require_params_alone(
    variables: list[Variable], name_of: Callable[[Any], str]
) -> None:
    """Raise unless no flax nnx variable is a random stream, with which each micro-batch
    would draw the same mask, or stands beside parameters without being one.
    """
    has_parameters = any("Param" in variable.kinds for variable in variables)
    for variable in variables:
        if "RngState" in variable.kinds:
            found = "a random stream of a flax nnx module"
            fix = f"{SPLIT}; nnx.reseed(model, default=key) with a key of the batch."
        elif has_parameters and "Param" not in variable.kinds:
            found = f"a {variable.kinds[0]} of a flax nnx module"
            fix = f"{SPLIT}; return what it changes there as aux."
        else:
            continue
        raise explain(
            ArgumentTypeError,
            name_of(variable.path),
            expected="parameters alone",
            found=found,
            fix=fix,
        )


def require_no_statistics(params: Params) -> None:
    """Raise unless no parameter is a running statistic of a flax nnx module."""
    for variable in variables_in(params):
        if "BatchStat" in variable.kinds:
            raise explain(
                ArgumentTypeError,
                f"params{jax.tree_util.keystr(variable.path)}",
                expected="parameters alone",
                found=f"a {variable.kinds[0]} of a flax nnx module",
                fix="Write tx.init(nnx.state(model, nnx.Param)).",
            )


def require_state(state: object) -> AccumulationState:
    if isinstance(state, AccumulationState):
        return require_values(state)
    raise explain(
        ArgumentTypeError,
        "state",
        expected="the state of a wrapped optimizer",
        found=f"a {type(state).__name__}",
        fix="Pass what tx.init(params) returned. A checkpoint is restored into that"
        " structure; in a chain it is one of the chain's states.",
    )


def require_one_device(state: AccumulationState) -> None:
    """Raise unless `state` is that of one device, as it is inside of a step."""
    if np.ndim(state.weight) != np.ndim(state.micro_step):
        raise explain(
            UsageError,
            "state",
            expected="the state of one device",
            found="that of all, as data_parallel returns it: its sums have an axis of"
            " devices",
            fix="Run the step, a flush too, by gradaccum_jax.data_parallel(step, mesh,"
            " axis_name). In a jax.shard_map of your own, call tx.init there too.",
        )


def require_plain(
    inner_state: InnerState, accumulating: tuple[type, ...] = ACCUMULATING
) -> None:
    """Raise unless the inner optimizer does not accumulate by itself."""
    nodes = jax.tree.leaves(
        inner_state, is_leaf=lambda node: isinstance(node, accumulating)
    )
    for node in nodes:
        if isinstance(node, accumulating):
            raise wrapped_twice_error(node)


def require_params(params: Params, masters: Tree) -> None:
    fix = "Pass the parameters that tx.init was given: tx.update(grads, state, params)."
    if params is None:
        raise explain(
            ArgumentTypeError,
            "params",
            expected="the parameters, as master_weights=True",
            found="nothing at all",
            fix=fix,
        )
    master_shapes = _shapes(masters, lambda leaf: True)
    half_shapes = _shapes(params, is_half)
    if master_shapes != half_shapes:
        raise explain(
            ArgumentValueError,
            "params",
            expected=f"half-precision parameters of these shapes: {master_shapes}",
            found=f"these: {half_shapes}",
            fix=fix,
        )


def _shapes(
    tree: Tree, is_chosen: Callable[[Array], bool]
) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    chosen = [(path, leaf) for path, leaf in flat if is_chosen(leaf)]
    names = unique(jax.tree_util.keystr(path) for path, _ in chosen)
    shapes = [np.shape(leaf) for _, leaf in chosen]
    return dict(zip(names, shapes, strict=True))


# Numbers that come with a micro-batch or with the end of a window.


def as_weight(weight: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's weight as a scalar array of `dtype`; None as it is.

    A traced weight cannot be checked: a negative or non-finite one counts as a
    non-finite gradient.
    """
    if weight is None:
        return None
    if hasattr(weight, "__jax_array__"):  # a symbolic size of `jax.export` has one
        weight = jnp.asarray(weight)
    if np.shape(weight) != ():
        raise explain(
            ArgumentTypeError,
            "weight",
            expected="a scalar",
            found=f"shape {np.shape(weight)}",
            fix="Sum the weights of the items: weight=mask.sum().",
        )
    if isinstance(weight, jax.core.Tracer):
        return _traced_number("weight", weight, dtype)
    return jnp.asarray(require_weight(weight), dtype)


def as_denominator(denominator: Scalar, options: Options, dtype: DType) -> Scalar:
    """Return the divisor of a window as a scalar array of `dtype`; None as it is.

    A traced one cannot be checked: if it is not finite or not above 0, the window ends
    without an update.
    """
    if denominator is None:
        return None
    if not isinstance(denominator, jax.core.Tracer):
        return jnp.asarray(kit.require_denominator(denominator, options), dtype)
    kit.require_denominator_allowed(options)
    return _traced_number("denominator", denominator, dtype)


def _traced_number(name: str, number: Array, dtype: DType) -> Array:
    is_real = jnp.issubdtype(number.dtype, jnp.floating)
    is_real = is_real or jnp.issubdtype(number.dtype, jnp.integer)
    if number.shape or not is_real:
        raise explain(
            ArgumentTypeError,
            name,
            expected="a real number",
            found=f"dtype {number.dtype} and shape {number.shape}",
            fix="Sum it up, and cast it to float32.",
        )
    return number.astype(dtype)


def as_last(last: Scalar) -> Scalar:
    """Return whether a micro-batch is its window's last as a bool array of shape ();
    None as it is.
    """
    if last is None:
        return None
    shape = getattr(last, "shape", None)
    is_bool_scalar = shape == () and last.dtype == bool
    if not isinstance(last, bool) and not is_bool_scalar:
        raise explain(
            ArgumentTypeError,
            "last",
            expected="True or False, or a bool scalar",
            got=last,
            fix="Write last=True or last=False, or pass what"
            " gradaccum_jax.epoch(loader) yields beside the batch.",
        )
    return jnp.asarray(last)


def as_loss(value: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's loss as a scalar array of `dtype`; None as it is."""
    if value is None:
        return None
    try:
        loss = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise _loss_error(f"a {type(value).__name__}") from error
    is_number = jnp.issubdtype(loss.dtype, jnp.number)
    if loss.shape or not is_number or jnp.iscomplexobj(loss):
        raise _loss_error(f"one of dtype {loss.dtype} and shape {loss.shape}")
    return loss.astype(dtype)


def _loss_error(found: str) -> ArgumentTypeError:
    return explain(
        ArgumentTypeError,
        "value",
        expected="the micro-batch's loss, a real scalar, not scaled",
        found=found,
        fix="Write tx.update(grads, state, params, value=loss).",
    )


# The user's gradients in the order of the sums, and the gradients that are refused.


FIX = "Differentiate with respect to the parameters that were given to tx.init."
NamedLeaves = list[tuple[str, Array]]


def align(gradients: Tree, accumulator: Tree, *, any_float: bool) -> Gradients:
    """Return the gradients in the order of the sum's leaves; None for a parameter
    without one.

    NumPy's arrays are copied: JAX reads their memory later, when the caller may have
    written the next micro-batch's gradient there.
    """
    totals, structure = _named_leaves(accumulator)
    named_gradients, other_structure = _named_leaves(gradients)
    if structure != other_structure:
        _refuse_structure(dict(totals), dict(named_gradients))
    aligned: Gradients = []
    for (name, total), (_, gradient) in zip(totals, named_gradients, strict=True):
        if gradient is not None:
            _check_gradient(name, gradient, total, any_float)
        if isinstance(gradient, np.ndarray):
            gradient = gradient.copy()
        if total is not None:
            aligned.append(gradient)
    return aligned


def _named_leaves(tree: Tree) -> tuple[NamedLeaves, Tree]:
    """Return the leaves by path, None and float0 as None, and the structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    named: NamedLeaves = []
    for path, leaf in flat:
        # A float0 is JAX's gradient of an integer parameter.
        is_float0 = getattr(leaf, "dtype", None) == jax.dtypes.float0
        named.append((jax.tree_util.keystr(path), None if is_float0 else leaf))
    return named, structure


def _refuse_structure(
    totals: dict[str, Array], gradients: dict[str, Array]
) -> NoReturn:
    for name in totals:
        if name not in gradients:
            expected = "a gradient (None if the parameter took no part)"
            _refuse(name, expected, "nothing at all")
    for name in gradients:
        if name not in totals:
            _refuse(name, NO_SUCH_LEAF, "one")
    expected = "the containers of the parameters"
    _refuse("", expected, "others with leaves of the same names")


NO_SUCH_LEAF = "no gradient, as the parameters have no such leaf"


def _check_gradient(name: str, gradient: Array, total: Array, any_float: bool) -> None:
    shape = np.shape(gradient)
    if total is None:
        _refuse(name, NO_SUCH_LEAF, f"one of shape {shape}")
    if shape != total.shape and not is_left_out(total, gradient):
        _refuse(name, f"a gradient of shape {total.shape}", f"one of shape {shape}")
    try:
        dtype = jnp.result_type(gradient)
    except TypeError:
        _refuse(name, "an array", f"a {type(gradient).__name__}")
    axes = axes_in_parts(gradient)
    if axes:
        expected = "a gradient whose parts are added up"
        found = f"one typed reduced or unreduced over {sorted(axes)}"
        _refuse(name, expected, found, ADD_UP)
    _check_dtype(name, dtype, total, any_float)


def _check_dtype(name: str, dtype: DType, total: Array, any_float: bool) -> None:
    found = f"one of dtype {dtype}"
    if not takes_part(total):
        expected = f"no gradient, as a parameter of dtype {total.dtype} takes no part"
        fix = "Give None or float0, as jax.grad does; train it as a float."
        _refuse(name, expected, found, fix)
    if not jnp.issubdtype(dtype, jnp.inexact):
        _refuse(name, f"a gradient of dtype {total.dtype}", found)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    is_sum_complex = jnp.issubdtype(total.dtype, jnp.complexfloating)
    any_allowed = any_float and is_complex == is_sum_complex
    # JAX promotes no float8.
    if dtype.itemsize < 2 or not (
        any_allowed or wider(dtype, total.dtype) == total.dtype
    ):
        _refuse(name, f"a gradient of a dtype that {total.dtype} holds", found)


def _refuse(name: str, expected: str, found: str, fix: str = FIX) -> NoReturn:
    raise explain(
        GradientError, f"grads{name}", expected=expected, found=found, fix=fix
    )


def require_function(name: str, function: object, fix: str) -> None:
    if not callable(function):
        raise explain(
            ArgumentTypeError, name, expected="a function", got=function, fix=fix
        )
