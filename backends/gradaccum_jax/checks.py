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
    is_key,
    is_none,
    takes_part,
    unique,
    variables_in,
    wider,
)
from gradaccum_jax.sharding import ADD_UP, axes_in_parts
from gradaccum_jax.state import AccumulationState, require_values

ACCUMULATING = (AccumulationState, optax.MultiStepsState)
"""The states of optimizers that accumulate."""


def require_dtype(accumulate_dtype: DType) -> DType:
    if accumulate_dtype is None:
        return None
    # By attribute of jnp, to get JAX's own bfloat16: another package may have
    # registered one with NumPy under that name.
    named = (
        getattr(jnp, accumulate_dtype, accumulate_dtype)
        if isinstance(accumulate_dtype, str)
        else accumulate_dtype
    )
    try:
        dtype = jnp.dtype(named)
    except TypeError as error:
        raise accumulate_dtype_error(accumulate_dtype) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise accumulate_dtype_error(accumulate_dtype)
    return dtype


def require_arrays(tree: Tree, name: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not (
            hasattr(leaf, "dtype")
            or hasattr(leaf, "__jax_array__")
            or isinstance(leaf, bool | int | float | complex)
        ):
            where, found = (
                f"{name}{jax.tree_util.keystr(path)}",
                f"a {type(leaf).__name__}",
            )
            fix = (
                "Of an equinox model pass params: params, static = eqx.partition(model,"
                " eqx.is_inexact_array). The loss combines them."
            )
            raise explain(
                ArgumentTypeError, where, expected="arrays alone", found=found, fix=fix
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
    trained = any("Param" in each.kinds for each in variables)
    for each in variables:
        if "RngState" in each.kinds:
            found = "a random stream of a flax nnx module"
            fix = f"{SPLIT}; nnx.reseed(model, default=key) with a key of the batch."
        elif trained and "Param" not in each.kinds:
            found = f"a {each.kinds[0]} of a flax nnx module"
            fix = f"{SPLIT}; return what it changes there as aux."
        else:
            continue
        raise explain(
            ArgumentTypeError,
            name_of(each.path),
            expected="parameters alone",
            found=found,
            fix=fix,
        )


def require_no_statistics(params: Params) -> None:
    """Raise unless no parameter is a running statistic of a flax nnx module."""
    for each in variables_in(params):
        if "BatchStat" in each.kinds:
            raise explain(
                ArgumentTypeError,
                f"params{jax.tree_util.keystr(each.path)}",
                expected="parameters alone",
                found=f"a {each.kinds[0]} of a flax nnx module",
                fix="Write tx.init(nnx.state(model, nnx.Param)).",
            )


def require_state(state: object) -> AccumulationState:
    if isinstance(state, AccumulationState):
        return require_values(state)
    fix = (
        "Pass what tx.init(params) returned. A checkpoint is restored into that"
        " structure; in a chain it is one of the chain's states."
    )
    raise explain(
        ArgumentTypeError,
        "state",
        expected="the state of a wrapped optimizer",
        found=f"a {type(state).__name__}",
        fix=fix,
    )


def require_one_device(state: AccumulationState) -> None:
    """Raise unless `state` is that of one device, as it is inside of a step."""
    if np.ndim(state.weight) == np.ndim(state.micro_step):
        return
    fix = (
        "Run the step, a flush too, by gradaccum_jax.data_parallel(step, mesh,"
        " axis_name). In a jax.shard_map of your own, call tx.init there too."
    )
    found = "that of all, as data_parallel returns it: its sums have an axis of devices"
    raise explain(
        UsageError, "state", expected="the state of one device", found=found, fix=fix
    )


def require_plain(
    inner_state: InnerState, accumulating: tuple[type, ...] = ACCUMULATING
) -> None:
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
    wanted, given = _shapes(masters), _shapes(params, is_half)
    if wanted != given:
        expected = f"half-precision parameters of these shapes: {wanted}"
        raise explain(
            ArgumentValueError,
            "params",
            expected=expected,
            found=f"these: {given}",
            fix=fix,
        )


def _shapes(
    tree: Tree, chosen: Callable[[Array], bool] = lambda leaf: True
) -> dict[str, tuple[int, ...]]:
    leaves = [
        (jax.tree_util.keystr(path), np.shape(leaf))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if chosen(leaf)
    ]
    return dict(
        zip(
            unique([name for name, _ in leaves]),
            [shape for _, shape in leaves],
            strict=True,
        )
    )


def as_weight(weight: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's weight as a scalar array of `dtype`; None as it is.

    A traced weight cannot be checked: a negative or non-finite one counts as a
    non-finite gradient.
    """
    if weight is None:
        return None
    # a symbolic size of `jax.export` has one
    weight = jnp.asarray(weight) if hasattr(weight, "__jax_array__") else weight
    if np.shape(weight) != ():
        fix = "Sum the weights of the items: weight=mask.sum()."
        raise explain(
            ArgumentTypeError,
            "weight",
            expected="a scalar",
            found=f"shape {np.shape(weight)}",
            fix=fix,
        )
    return (
        _traced_number("weight", weight, dtype)
        if isinstance(weight, jax.core.Tracer)
        else jnp.asarray(require_weight(weight), dtype)
    )


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
    if number.shape or not (
        jnp.issubdtype(number.dtype, jnp.floating)
        or jnp.issubdtype(number.dtype, jnp.integer)
    ):
        found, fix = (
            f"dtype {number.dtype} and shape {number.shape}",
            "Sum it up, and cast it to float32.",
        )
        raise explain(
            ArgumentTypeError, name, expected="a real number", found=found, fix=fix
        )
    return number.astype(dtype)


def as_last(last: Scalar) -> Scalar:
    """Return whether a micro-batch is its window's last as a bool array of shape ();
    None as it is.
    """
    if last is None:
        return None
    if not isinstance(last, bool) and (
        getattr(last, "shape", None) != ()
        or str(getattr(last, "dtype", None)) != "bool"
    ):
        fix = (
            "Write last=True or last=False, or pass what gradaccum_jax.epoch(loader)"
            " yields beside the batch."
        )
        raise explain(
            ArgumentTypeError,
            "last",
            expected="True or False, or a bool scalar",
            got=last,
            fix=fix,
        )
    return jnp.asarray(last)


def as_loss(value: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's loss as a scalar array of `dtype`; None as it is.

    Raises:
        ArgumentTypeError: it is not a real scalar.
    """
    if value is None:
        return None
    expected, fix = (
        "the micro-batch's loss, a real scalar, not scaled",
        "Write tx.update(grads, state, params, value=loss).",
    )
    try:
        loss = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise explain(
            ArgumentTypeError,
            "value",
            expected=expected,
            found=f"a {type(value).__name__}",
            fix=fix,
        ) from error
    if (
        loss.shape != ()
        or not jnp.issubdtype(loss.dtype, jnp.number)
        or jnp.issubdtype(loss.dtype, jnp.complexfloating)
    ):
        raise explain(
            ArgumentTypeError,
            "value",
            expected=expected,
            found=f"one of dtype {loss.dtype} and shape {loss.shape}",
            fix=fix,
        )
    return loss.astype(dtype)


# The user's gradients in the order of the sums, and the gradients that are refused.


FIX = "Differentiate with respect to the parameters that were given to tx.init."
Named = list[tuple[str, Array]]


def align(gradients: Tree, accumulator: Tree, *, any_float: bool) -> Gradients:
    """Return the gradients in the order of the accumulator's leaves; None for a
    parameter without one.

    NumPy's arrays are copied: JAX reads their memory later, when the caller may have
    written the next micro-batch's gradient there.
    """
    held, structure = _named(accumulator)
    given, other = _named(gradients)
    if structure != other:
        _refuse_structure(held, given)
    for (name, leaf), (_, gradient) in zip(held, given, strict=True):
        _check_leaf(name, gradient, leaf, any_float)
    pairs = zip(held, given, strict=True)
    return [
        own.copy() if isinstance(own, np.ndarray) else own
        for (_, leaf), (_, own) in pairs
        if leaf is not None
    ]


def _named(tree: Tree) -> tuple[Named, Tree]:
    """Return the leaves by path, None and float0 as None, and the structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    # A float0 is JAX's gradient of an integer parameter.
    arrays = [
        None if getattr(leaf, "dtype", None) == jax.dtypes.float0 else leaf
        for _, leaf in flat
    ]
    return [
        (jax.tree_util.keystr(path), leaf)
        for (path, _), leaf in zip(flat, arrays, strict=True)
    ], structure


def _refuse_structure(held: Named, given: Named) -> NoReturn:
    wanted, found = dict(held), dict(given)
    for name in (name for name in wanted if name not in found):
        _refuse(
            name, "a gradient (None if the parameter took no part)", "nothing at all"
        )
    for name in (name for name in found if name not in wanted):
        _refuse(name, "no gradient, as the parameters have no such leaf", "one")
    _refuse(
        "", "the containers of the parameters", "others with leaves of the same names"
    )


def _check_leaf(name: str, gradient: Array, held: Array, any_float: bool) -> None:
    if gradient is None:
        return
    if held is None:
        _refuse(
            name,
            "no gradient, as the parameters have no such leaf",
            f"one of shape {np.shape(gradient)}",
        )
    if np.shape(gradient) != held.shape:
        _refuse(
            name,
            f"a gradient of shape {held.shape}",
            f"one of shape {np.shape(gradient)}",
        )
    try:
        dtype = jnp.result_type(gradient)
    except TypeError:
        _refuse(name, "an array", f"a {type(gradient).__name__}")
    if axes := axes_in_parts(gradient):
        _refuse(
            name,
            "a gradient whose parts are added up",
            f"one typed reduced or unreduced over {sorted(axes)}",
            ADD_UP,
        )
    _check_dtype(name, dtype, held, any_float)


def _check_dtype(name: str, dtype: DType, held: Array, any_float: bool) -> None:
    if not takes_part(held):
        fix = "Give None or float0, as jax.grad does; train it as a float."
        _refuse(
            name,
            f"no gradient, as a parameter of dtype {held.dtype} takes no part",
            f"one of dtype {dtype}",
            fix,
        )
    if not jnp.issubdtype(dtype, jnp.inexact):
        _refuse(name, f"a gradient of dtype {held.dtype}", f"one of dtype {dtype}")
    same_kind = jnp.issubdtype(dtype, jnp.complexfloating) == jnp.issubdtype(
        held.dtype, jnp.complexfloating
    )
    if dtype.itemsize < 2 or (
        not (any_float and same_kind) and wider(dtype, held.dtype) != held.dtype
    ):
        _refuse(
            name,
            f"a gradient of a dtype that {held.dtype} holds",
            f"one of dtype {dtype}",
        )


def _refuse(name: str, expected: str, found: str, fix: str = FIX) -> NoReturn:
    raise explain(
        GradientError, f"grads{name}", expected=expected, found=found, fix=fix
    )


def require_function(name: str, function: object, fix: str) -> None:
    if not callable(function):
        raise explain(
            ArgumentTypeError, name, expected="a function", got=function, fix=fix
        )


# What a layered window refuses.


def require_whole_micro_batches(options: Options) -> None:
    if options.on_overflow == "drop_micro_batch":
        raise explain(
            UsageError,
            "tx",
            expected="one that looks at no single micro-batch",
            found="one with on_overflow=",
            fix="Leave on_overflow out, or call gradaccum_jax.value_and_update.",
        )


def require_stacked(params: Params) -> tuple[Tree, ...]:
    """Raise unless `params` are three or four trees of numbers, the second with one
    leading axis in all of its arrays.
    """
    if not isinstance(params, tuple) or len(params) not in (3, 4):
        expected, fix = (
            "a tuple (prelude, layers, head) or (prelude, layers, head, tied)",
            "Write {} for a part without parameters.",
        )
        raise explain(
            ArgumentTypeError,
            "params",
            expected=expected,
            found=f"a {type(params).__name__}",
            fix=fix,
        )
    require_arrays(params, "params")
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params[1])}
    if (
        len(counts) != 1
        or counts & {(), (0,)}
        or any(map(is_key, jax.tree.leaves(params)))
    ):
        expected, found = (
            "arrays of numbers, with one leading axis in params[1]",
            f"leading axes {sorted(counts)}, or a random key",
        )
        fix = (
            "Stack the layers: jax.tree.map(lambda *leaves: jnp.stack(leaves),"
            " *layers). Pass keys in the batch."
        )
        raise explain(
            ArgumentValueError, "params", expected=expected, found=found, fix=fix
        )
    return tuple(jax.tree.map(jnp.asarray, params))


def require_like(name: str, given: Tree, like: Tree, expected: str, fix: str) -> Tree:
    """Raise unless `given` has arrays of the same paths, dtypes and shapes as `like`;
    return it.
    """
    wanted, found = _types(like), _types(given)
    if wanted != found:
        path = min(dict(wanted.items() ^ found.items()))
        expected, got = (
            f"{expected}, {wanted.get(path, 'nothing')}",
            found.get(path, "nothing"),
        )
        raise explain(
            ArgumentValueError, f"{name}{path}", expected=expected, found=got, fix=fix
        )
    return given


def _types(tree: Tree) -> dict[str, str]:
    held = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(np.shape(leaf))}"
        for path, leaf in held
    }
