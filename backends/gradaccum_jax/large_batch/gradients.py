"""The gradient of one micro-batch, and the sum of those of a large batch.

The arithmetic of reductions is that of `gradaccum.wrap`: each micro-batch's `contribution`, the whole batch's `divisor`, and sums that are
float32 for half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Options, Scalar, aux_shape_error, contribution, divisor, explain, scalar_loss_error
from gradaccum_jax import sums
from gradaccum_jax.checks import require_arrays
from gradaccum_jax.dtypes import takes_part
from gradaccum_jax.trees import is_variable
from gradaccum_jax.types import Array, DType, Tree
from gradaccum_jax.unreduced import axes_reduced
from gradaccum_jax.varying import axes_of


@dataclass(frozen=True)
class Differentiation:
    """A loss function, and by which of its arguments it is differentiated."""

    loss_fn: Callable[..., Any]
    places: tuple[int, ...]
    """The places of these arguments, in the order in which the user named them."""
    has_aux: bool
    allow_int: bool
    """Whether integers among them are let through; they have no gradient."""
    single: bool
    """Whether the user named one place, and no tuple of them."""
    fix_for_int: str = "Write allow_int=True, and it has a float0 as its gradient; or hand it over with the batch, with axes=None."
    """What the error for an integer advises."""

    def parted(self, arguments: tuple[Tree, ...]) -> tuple[tuple[Tree, ...], tuple[Tree, ...]]:
        """The arguments to differentiate by, and the batch: all others, in their order.

        Raises:
            ArgumentValueError: there are not so many arguments.
            ArgumentTypeError: `check` refuses one to differentiate by, or its type is that of a gradient in parts; names the leaf.
        """
        if max(self.places) >= len(arguments):
            found, fix = f"{len(arguments)} arguments", "Call it as the loss function, with the batch in place of a micro-batch."
            raise explain(ArgumentValueError, "argnums", expected=f"an argument number {max(self.places)}", found=found, fix=fix)
        by = tuple(arguments[place] for place in self.places)
        self.check(by)
        for path, leaf in jax.tree_util.tree_flatten_with_path(by)[0]:
            if axes := axes_reduced(leaf):
                found = f"one typed reduced over {sorted(axes)}"
                fix = "Write jax.reshard(params, PartitionSpec()); tx.update and value_and_update take such types."
                raise explain(ArgumentTypeError, self._name(path), expected="a parameter of an ordinary type", found=found, fix=fix)
        return by, tuple(a for i, a in enumerate(arguments) if i not in self.places)

    def joined(self, by: tuple[Tree, ...], batch: tuple[Tree, ...]) -> list[Tree]:
        """The arguments of the loss function."""
        held, rest = dict(zip(self.places, by, strict=True)), iter(batch)
        return [held[place] if place in held else next(rest) for place in range(len(by) + len(batch))]

    def value(self, by: tuple[Tree, ...], batch: tuple[Tree, ...]) -> tuple[Scalar, Tree]:
        """The loss of a micro-batch, a floating scalar, and its aux, None without one.

        Raises:
            ArgumentValueError: the loss function returns something else.
        """
        made = self.loss_fn(*self.joined(by, batch))
        loss, aux = _parted(made) if self.has_aux else (made, None)
        return _scalar(loss), aux

    def value_and_gradients(self, by: tuple[Tree, ...], batch: tuple[Tree, ...], scale: Scalar = None) -> tuple[Scalar, Tree, list[Array]]:
        """The loss, the aux, and the gradient of loss times `scale` by each leaf that takes part, in the order of the leaves of `by`."""
        leaves, structure = jax.tree.flatten(by)
        moving = [leaf for leaf in leaves if takes_part(leaf)]

        def value(moving: list[Array]) -> tuple[Scalar, tuple[Scalar, Tree]]:
            given = iter(moving)
            loss, aux = self.value(jax.tree.unflatten(structure, [next(given) if takes_part(leaf) else leaf for leaf in leaves]), batch)
            return loss if scale is None else loss * scale, (loss, aux)

        (_, (loss, aux)), gradients = jax.value_and_grad(value, has_aux=True)(moving)
        return loss, aux, gradients

    def check(self, by: tuple[Tree, ...]) -> None:
        """Raise unless the arguments to differentiate by are arrays that have gradients; integers as the user allows.

        Raises:
            ArgumentTypeError: a leaf is no float, or a flax nnx module has a random stream; names it.
        """
        for place, tree in zip(self.places, by, strict=True):
            require_arrays(tree, f"argument {place}")
        for path, leaf in jax.tree_util.tree_flatten_with_path(by)[0]:
            if takes_part(leaf):
                continue
            self._require_no_stream(by)
            if not self.allow_int:
                found = str(jnp.result_type(leaf))
                raise explain(
                    ArgumentTypeError, self._name(path), expected="a float to differentiate by", found=found, fix=self.fix_for_int
                )

    def _require_no_stream(self, by: tuple[Tree, ...]) -> None:
        """Raise if a module has a random stream: every micro-batch would start from the same count, and draw the same mask."""
        for path, node in jax.tree_util.tree_flatten_with_path(by, is_leaf=is_variable)[0]:
            if "RngState" in {base.__name__ for base in type(node).__mro__}:
                fix = (
                    "Write graph, params, rest = nnx.split(model, nnx.Param, ...), and in the loss function of params "
                    "model = nnx.merge(graph, params, rest, copy=True); nnx.reseed(model, default=key) with a key of the batch."
                )
                found = "a random stream of a flax nnx module"
                raise explain(ArgumentTypeError, self._name(path), expected="parameters alone", found=found, fix=fix)

    def _name(self, path: Any) -> str:
        return f"argument {self.places[path[0].idx]}{jax.tree_util.keystr(path[1:])}"


def start(by: tuple[Tree, ...], accumulate_dtype: DType) -> list[Array]:
    """Empty sums, one for each leaf of `by` that takes part.

    Args:
        by: the arguments to differentiate by.
        accumulate_dtype: that of the sums; None: float32 for half precision, else the leaf's own.

    Raises:
        ArgumentValueError: JAX has `accumulate_dtype` switched off.
    """
    made: list[Array] = sums.zeros([leaf for leaf in jax.tree.leaves(by) if takes_part(leaf)], accumulate_dtype)
    return made


def add(held: list[Array], gradients: list[Array], weight: Scalar, options: Options) -> list[Array]:
    """`held` with one micro-batch's gradients more. With weight 0 it adds exactly nothing, even where they are NaN.

    Args:
        held: the sums so far.
        gradients: one for each of them.
        weight: a real scalar, a Python number where the program knows it: then a factor of 1 costs nothing.
        options: with the reduction.
    """
    known = isinstance(weight, int | float)
    factor = contribution(weight, options) if options.reduction == "mean" and not (known and weight == 1) else None
    given = jnp.asarray(factor, sums.weight_dtype(held)) if factor is not None and known else factor
    made: list[Array] = sums.add(held, gradients, given, True if known else weight != 0, jnp.asarray(True))
    return made


def finish(held: list[Array], weight: Scalar, by: tuple[Tree, ...], options: Options, axis_names: tuple[str, ...] = ()) -> tuple[Tree, ...]:
    """The gradient of the large batch in the dtypes of `by`: float0 for integers, as `jax.grad` has it.

    Each sum is reduced over the devices once: over `axis_names`, and over the axes along which it differs and its parameter does not, as
    `jax.grad` does in `jax.shard_map`.

    Args:
        held: the sums of all micro-batches.
        weight: the weight of all devices' micro-batches.
        by: the arguments to differentiate by, as they came.
        options: with the reduction.
        axis_names: the mesh axes whose devices share the batch.
    """
    divides = denominator(weight, options)
    leaves, structure = jax.tree.flatten(by)
    moving = [leaf for leaf in leaves if takes_part(leaf)]
    whole = [_reduced(total, axis_names) for total in held]
    made = iter([_quotient(total, divides, leaf) for total, leaf in zip(whole, moving, strict=True)])
    gradients = [next(made) if takes_part(leaf) else np.zeros(np.shape(leaf), jax.dtypes.float0) for leaf in leaves]
    found: tuple[Tree, ...] = jax.tree.unflatten(structure, gradients)
    return found


def denominator(weight: Scalar, options: Options) -> Scalar:
    """What the sums are divided by: 1 for "sum", else the weight, or 1 where that is 0."""
    nothing = 0 * weight
    return divisor((nothing, nothing, nothing, weight, nothing != 0, nothing + 1, nothing), options, jnp.where)


def _reduced(total: Array, axes: tuple[str, ...]) -> Array:
    library: Any = lax
    return library.psum(total, axes) if axes else total


def _quotient(total: Array, divides: Scalar, leaf: Array) -> Array:
    quotient = total / divides
    return _reduced(quotient, tuple(sorted(axes_of(quotient) - axes_of(leaf)))).astype(jnp.result_type(leaf))


def _parted(made: Any) -> tuple[Scalar, Tree]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise aux_shape_error(f"one that returns a {type(made).__name__}", declared=True)
    return made


def _scalar(loss: Any) -> Scalar:
    if isinstance(loss, tuple | list | dict):
        raise aux_shape_error(f"one that returns a {type(loss).__name__}", declared=False)
    if loss is None or np.shape(loss) != () or not (hasattr(loss, "dtype") or isinstance(loss, float)):
        raise scalar_loss_error("nothing" if loss is None else f"one of shape {np.shape(loss)}")
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise scalar_loss_error(f"one of dtype {jnp.result_type(loss)}")
    return jnp.asarray(loss)
