"""Argument checks. They run while JAX traces a call, so an invalid call raises an error
before anything has changed.
"""

from __future__ import annotations

from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum import ArgumentTypeError, GradientError, kit
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
"""The state classes of optimizers that accumulate gradients themselves."""


def require_dtype(accumulate_dtype: DType) -> DType:
    if accumulate_dtype is None:
        return None
    dtype = accumulate_dtype
    if isinstance(dtype, str):
        # Look up the name in jnp to get JAX's own bfloat16, because another package may
        # have registered a different bfloat16 with NumPy under the same name.
        dtype = getattr(jnp, dtype, dtype)
    with suppress(TypeError):
        dtype = jnp.dtype(dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return dtype
    raise accumulate_dtype_error(accumulate_dtype)


def require_params_alone(params: Params) -> None:
    """Raise if `params` contains a flax nnx random stream, or mixes parameters with
    other nnx variables. A random stream among the parameters would give every
    micro-batch the same dropout mask.
    """
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable)
    kinds_by_path = {
        path: [base.__name__ for base in type(node).__mro__]
        for path, node in flat
        if is_variable(node)
    }
    has_parameters = any("Param" in kinds for kinds in kinds_by_path.values())
    for path, kinds in kinds_by_path.items():
        if "RngState" in kinds or (has_parameters and "Param" not in kinds):
            raise ArgumentTypeError(
                f"params{jax.tree_util.keystr(path)}: expected only parameters; got a"
                f" {kinds[0]} of a flax nnx module. Write graph, params, rest ="
                " nnx.split(model, nnx.Param, ...), and begin the loss function with"
                " model = nnx.merge(graph, params, rest, copy=True). If the model"
                " changes variables in rest, return them as aux. If rest contains"
                " random streams, also call nnx.reseed(model, default=key) in the loss"
                " function, with a key from the batch."
            )


def require_plain(inner_state: InnerState) -> None:
    """Raise if the inner optimizer itself accumulates gradients."""

    def is_accumulating(node: object) -> bool:
        return isinstance(node, ACCUMULATING)

    nodes = jax.tree.leaves(inner_state, is_leaf=is_accumulating)
    for node in filter(is_accumulating, nodes):
        raise wrapped_twice_error(node)


# The weight, the loss and the denominator that the caller passes are checked and
# converted to scalar arrays here.


def as_weight(weight: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's weight as a scalar array of `dtype`, or None if `weight`
    is None.

    The value of a traced weight is unknown during tracing. If the value turns out to be
    negative or not finite, the micro-batch is treated as if its gradient were not
    finite.
    """
    if weight is None:
        return None
    if hasattr(weight, "__jax_array__"):  # such as a symbolic size of `jax.export`
        weight = jnp.asarray(weight)
    if np.shape(weight) != ():
        raise ArgumentTypeError(
            f"weight: expected a scalar; got an array of shape {np.shape(weight)}. Add"
            " up the weights of the items, for example weight=mask.sum()."
        )
    if isinstance(weight, jax.core.Tracer):
        return weight.astype(dtype)
    return jnp.asarray(require_weight(weight), dtype)


def as_denominator(denominator: Scalar, options: Options, dtype: DType) -> Scalar:
    """Return the denominator of a window as a scalar array of `dtype`, or None if
    `denominator` is None.

    The value of a traced denominator is unknown during tracing. If the value turns out
    not to be a finite number > 0, the window ends without an update.
    """
    if isinstance(denominator, jax.core.Tracer):
        kit.require_denominator_allowed(options)
        return denominator.astype(dtype).reshape(())
    if denominator is None:
        return None
    return jnp.asarray(kit.require_denominator(denominator, options), dtype)


def as_loss(value: Scalar, dtype: DType) -> Scalar:
    """Return a micro-batch's loss as a scalar array of `dtype`, or None if `value` is
    None.
    """
    if value is None:
        return None
    return jnp.asarray(value).astype(dtype).reshape(())


NamedLeaves = list[tuple[str, Array]]


def align(gradients: Tree, accumulator: Tree) -> Gradients:
    """Check that `gradients` match `accumulator` in structure and shapes. Return them
    in the order of the accumulator's leaves, with None for each leaf to which nothing
    is added.

    NumPy arrays are copied, because the caller might overwrite an array with the
    gradients of the next micro-batch before JAX has read it.
    """
    totals, structure = _named_leaves(accumulator)
    named_gradients, gradient_structure = _named_leaves(gradients)
    if structure != gradient_structure:
        names = {name for name, _ in totals} ^ {name for name, _ in named_gradients}
        expected = "the structure of the parameters"
        got = f"a structure that differs at {sorted(names)[:3]}"
        if not names:  # Only the containers differ.
            expected = f"{expected}, {structure}"
            got = str(gradient_structure)
        raise gradient_error("", expected, got)
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
                name,
                f"a gradient of shape {total.shape}",
                f"a gradient of shape {shape}",
            )
        if isinstance(gradient, np.ndarray):
            gradient = gradient.copy()
        aligned_gradients.append(gradient)
    return aligned_gradients


def _named_leaves(tree: Tree) -> tuple[NamedLeaves, Tree]:
    """Return the leaves of `tree` with their paths, and the tree's structure. A leaf of
    dtype float0, JAX's dtype for the gradients of integers, is replaced with None.
    """
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
        " the parameters that you passed to tx.init."
    )
