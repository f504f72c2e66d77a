"""Compute the loss and the gradient of a large batch: run the loss function on each
micro-batch, and add up the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum import kit
from gradaccum.kit import Options, Scalar
from gradaccum_jax import gradient_sum
from gradaccum_jax.arrays import Array, DType, Leaves, Params, Tree, moving_of
from gradaccum_jax.large_batch.batch import (
    LargeBatch,
    MicroBatch,
    Stacks,
    Weight,
    call_with,
    concatenate_items,
    concatenate_micro_batches,
    for_each_micro_batch,
    weight_of,
)
from gradaccum_jax.sharding import axes_of

S = TypeVar("S")


class LossSpec(NamedTuple):
    """The user's loss function, and how its results for micro-batches are combined."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    merge_aux: Any
    """How the auxiliary outputs of the micro-batches are combined: None, "concatenate",
    or a function that takes a list of all auxes and a list of all weights.
    """
    weight: Weight
    options: Options
    axis_names: tuple[str, ...]
    """The mesh axes along which the batch is sharded."""


def run(
    spec: LossSpec,
    params: Params,
    batch: LargeBatch,
    sums: S,
    add: Callable[[S, Leaves, Scalar, Scalar], S],
    scale: Scalar = None,
) -> tuple[Any, S, Scalar]:
    """Differentiate the loss of each micro-batch, and add up the gradients:
    ``sums = add(sums, gradients, weight, loss)``.

    Return the loss of the batch (or the pair of loss and aux), the sums after the last
    micro-batch, and the total weight on all devices. The loss is multiplied by `scale`
    before it is differentiated.
    """

    def body(sums: S, micro_batch: MicroBatch, _: Any) -> tuple[S, Tree]:
        def loss_of(params: Params) -> Any:
            return call_with(spec.loss_fn, params, micro_batch)

        loss, aux, gradients = value_and_gradients(loss_of, params, spec.has_aux, scale)
        dtype = gradient_sum.weight_dtype([moving_of(params)[0], loss])
        weight = weight_of(micro_batch, spec.weight, dtype)
        sums = add(sums, gradients, weight, loss)
        return sums, (loss, jnp.asarray(weight, dtype), aux)

    sums, stacks = for_each_micro_batch(batch, body, sums, axis_names=spec.axis_names)
    value, weight = summarize(spec, batch, stacks)
    return value, sums, weight


def summarize(spec: LossSpec, batch: LargeBatch, stacks: Stacks) -> tuple[Any, Scalar]:
    """Combine the stacked losses, weights and auxes of the micro-batches. Return the
    loss of the batch (or the pair of loss and aux), and the total weight on all
    devices.
    """
    losses, weights = concatenate_micro_batches([stack[:2] for stack in stacks])
    sum_dtype = gradient_sum.sum_dtype(losses, None)
    terms = kit.add_loss(
        jnp.zeros_like(losses, sum_dtype),
        losses.astype(sum_dtype),
        weights.astype(sum_dtype),
        weights != 0,
        spec.options,
        jnp.where,
    )
    total = sum_over_devices(jnp.sum(terms), spec.axis_names)
    weight = sum_over_devices(jnp.sum(weights), spec.axis_names)
    divisor = kit.denominator(weight, spec.options, jnp.where)
    loss = (total / divisor).astype(losses.dtype)
    if not spec.has_aux:
        return loss, weight
    auxes = [stack[2] for stack in stacks]
    return (loss, merge_auxes(spec.merge_aux, batch, auxes, weights)), weight


def merge_auxes(
    merge_aux: Any, batch: LargeBatch, auxes: Stacks, weights: Array
) -> Tree:
    if merge_aux is None:
        return concatenate_micro_batches(auxes)
    if merge_aux == "concatenate":
        return concatenate_items(batch, auxes, "aux")
    aux_list: list[Tree] = []
    for part, stack in zip(batch.parts(), auxes, strict=True):
        places = range(part.micro_batches)
        aux_list += [jax.tree.map(itemgetter(place), stack) for place in places]
    return merge_aux(aux_list, list(weights))


def value_and_gradients(
    function: Callable[[Any], Any], by: Tree, has_aux: bool, scale: Scalar = None
) -> tuple[Scalar, Tree, Leaves]:
    """Call ``function(by)``, which returns a loss, or ``(loss, aux)`` with `has_aux`.
    Return the loss, the aux (None without `has_aux`), and the gradients of
    ``loss * scale`` with respect to the floating-point leaves of the tree `by`. If
    `scale` is None, the loss is not scaled.
    """
    moving, put = moving_of(by)

    def scaled_loss(moving: Leaves) -> tuple[Scalar, tuple[Scalar, Tree]]:
        returned = function(put(moving))
        if has_aux and hasattr(returned, "shape"):
            raise kit.missing_aux_error(returned)
        loss, aux = returned if has_aux else (returned, None)
        if getattr(loss, "shape", ()) != ():
            raise kit.scalar_loss_error(f"a loss of shape {loss.shape}")
        return loss if scale is None else loss * scale, (loss, aux)

    (_, (loss, aux)), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(moving)
    return jnp.asarray(loss), aux, gradients


def empty_sums(by: Tree, accumulate_dtype: DType) -> Leaves:
    sums: Leaves = gradient_sum.zeros(moving_of(by)[0], accumulate_dtype)
    return sums


def add_gradients(
    sums: Leaves, gradients: Leaves, weight: Scalar, options: Options
) -> Leaves:
    """Add one micro-batch's gradients to `sums`. If the micro-batch's weight is 0, the
    sums do not change, even if a gradient is NaN.
    """
    factor = None
    is_one = isinstance(weight, float) and weight == 1
    if options.reduction == "mean" and not is_one:
        factor = jnp.asarray(weight, gradient_sum.weight_dtype(sums))
    new_sums: Leaves = gradient_sum.add(sums, gradients, factor, weight != 0)
    return new_sums


def gradients_of(
    sums: Leaves, divisor: Scalar, params: Params, axis_names: tuple[str, ...] = ()
) -> Tree:
    """Add up each of the `sums` over the devices along the mesh axes `axis_names`, and
    divide the total by `divisor`. Return the gradients in the dtypes of the parameters.

    If a sum may differ along another mesh axis, but its parameter does not, the sum is
    added up over this axis too, because a parameter that is the same on all devices
    needs the same gradient on all devices.
    """
    moving, put = moving_of(params)
    gradients = []
    for total, leaf in zip(sums, moving, strict=True):
        gradient = sum_over_devices(total, axis_names) / divisor
        names = tuple(sorted(axes_of(gradient) - axes_of(leaf)))
        gradient = sum_over_devices(gradient, names)
        gradients.append(gradient.astype(jnp.result_type(leaf)))
    return put(gradients)


def sum_over_devices(array: Array, axis_names: tuple[str, ...]) -> Array:
    return lax.psum(array, axis_names) if axis_names else array  # type: ignore[no-untyped-call]
