"""Checks of arguments, at the call that is wrong, before anything changed, while JAX
traces.
"""

from __future__ import annotations

from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum import (
    ArgumentTypeError,
    GradientError,
    kit,
)
from gradaccum.kit import (
    Options,
    Scalar,
    accumulate_dtype_error,
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
    is_none,
    is_variable,
    takes_part,
)
from gradaccum_jax.gradient_sum import has_sum
from gradaccum_jax.state import AccumulationState

ACCUMULATING = (AccumulationState, optax.MultiStepsState, optax.ApplyEvery)
"""The states of optimizers that accumulate."""


def require_dtype(accumulate_dtype: DType) -> DType:
    if accumulate_dtype is None:
        return None
    dtype = accumulate_dtype
    if isinstance(dtype, str):
        # By attribute of jnp, to get JAX's own bfloat16: another package may have
        # registered one with NumPy under that name.
        dtype = getattr(jnp, dtype, dtype)
    with suppress(TypeError):
        dtype = jnp.dtype(dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return dtype
    raise accumulate_dtype_error(accumulate_dtype)


def require_params_alone(params: Params) -> None:
    """Raise if a flax nnx variable is a random stream, with which each micro-batch would
    draw the same mask, or stands beside parameters without being one.
    """
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)[0]
    kinds_by_path = {
        path: [base.__name__ for base in type(node).__mro__]
        for path, node in flat
        if is_variable(node)
    }
    has_parameters = any("Param" in kinds for kinds in kinds_by_path.values())
    for path, kinds in kinds_by_path.items():
        if "RngState" in kinds or (has_parameters and "Param" not in kinds):
            raise ArgumentTypeError(
                f"params{jax.tree_util.keystr(path)}: expected parameters alone; got a"
                f" {kinds[0]} of a flax nnx module. Write graph, params, rest ="
                " nnx.split(model, nnx.Param, ...), and in the loss function of params"
                " model = nnx.merge(graph, params, rest, copy=True). Return what the"
                " model changes in rest as aux; for random streams, write"
                " nnx.reseed(model, default=key) with a key of the batch."
            )


def require_plain(inner_state: InnerState) -> None:
    """Raise if the inner optimizer accumulates by itself."""

    def is_accumulating(node: object) -> bool:
        return isinstance(node, ACCUMULATING)

    nodes = jax.tree.leaves(inner_state, is_leaf=is_accumulating)
    for node in filter(is_accumulating, nodes):
        raise wrapped_twice_error(node)


# Numbers that come with a micro-batch or with the end of a window.


def as_weight(weight: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's weight as a scalar array of `dtype`; None as it is.

    The value of a traced weight is not known: a negative or non-finite one counts as a
    non-finite gradient.
    """
    if weight is None:
        return None
    if hasattr(weight, "__jax_array__"):  # a symbolic size of `jax.export` has one
        weight = jnp.asarray(weight)
    if np.shape(weight) != ():
        raise ArgumentTypeError(
            f"weight: expected a scalar; got shape {np.shape(weight)}. Sum the weights"
            " of the items: weight=mask.sum()."
        )
    if isinstance(weight, jax.core.Tracer):
        return weight.astype(dtype)
    return jnp.asarray(require_weight(weight), dtype)


def as_denominator(denominator: Scalar, options: Options, dtype: DType) -> Scalar:
    """Return the divisor of a window as a scalar array of `dtype`; None as it is.

    The value of a traced divisor is not known: if it is not finite or not above 0, the
    window ends without an update.
    """
    if isinstance(denominator, jax.core.Tracer):
        kit.require_denominator_allowed(options)
        return denominator.astype(dtype).reshape(())
    if denominator is None:
        return None
    return jnp.asarray(kit.require_denominator(denominator, options), dtype)


def as_loss(value: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's loss as a scalar array of `dtype`; None as it is."""
    if value is None:
        return None
    return jnp.asarray(value).astype(dtype).reshape(())


# The user's gradients, in the order of the sums.


NamedLeaves = list[tuple[str, Array]]


def align(gradients: Tree, accumulator: Tree) -> Gradients:
    """Return the gradients in the order of the sum's leaves; None for a parameter that
    takes no part.

    NumPy's arrays are copied: JAX reads their memory later, when the caller may have
    written the next micro-batch's gradient there.
    """
    totals, structure = _named_leaves(accumulator)
    named_gradients, gradient_structure = _named_leaves(gradients)
    if structure != gradient_structure:
        names = {name for name, _ in totals} ^ {name for name, _ in named_gradients}
        raise gradient_error(
            "",
            "the structure of the parameters",
            f"another structure, which differs in {sorted(names)[:3]}",
        )
    aligned_gradients: Gradients = []
    for (name, total), (_, gradient) in zip(totals, named_gradients, strict=True):
        if total is None:
            continue
        if gradient is None or not (takes_part(total) and has_sum(total)):
            aligned_gradients.append(None)
            continue
        shape = np.shape(gradient)
        if shape != total.shape:
            raise gradient_error(
                name, f"a gradient of shape {total.shape}", f"one of shape {shape}"
            )
        if isinstance(gradient, np.ndarray):
            gradient = gradient.copy()
        aligned_gradients.append(gradient)
    return aligned_gradients


def _named_leaves(tree: Tree) -> tuple[NamedLeaves, Tree]:
    """Return the leaves by path, None and float0 as None, and the structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    leaves: NamedLeaves = []
    for path, leaf in flat:
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            leaf = None  # JAX's gradient of an integer parameter
        leaves.append((jax.tree_util.keystr(path), leaf))
    return leaves, structure


def gradient_error(name: str, expected: str, found: str) -> GradientError:
    return GradientError(
        f"grads{name}: expected {expected}; got {found}. Differentiate with respect to"
        " the parameters that tx.init was given."
    )
