"""One program over all micro-batches of a large batch: the loss, the weight and the aux are added up here, the gradients by the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum.kit import Options, Scalar, add_loss
from gradaccum_jax import sums
from gradaccum_jax.large_batch.gradients import Differentiation, denominator
from gradaccum_jax.large_batch.groups import Group, MicroBatch, in_order, over
from gradaccum_jax.large_batch.merging import Merging, make_merging
from gradaccum_jax.large_batch.splitting import Source, groups_in, items_in, largest_in
from gradaccum_jax.large_batch.weights import Weight, known_items, weight_of
from gradaccum_jax.types import Array, Axes, DType, Tree
from gradaccum_jax.varying import axes_of, vary

G = TypeVar("G")


class Question(NamedTuple):
    """What the user asks about every micro-batch."""

    differentiation: Differentiation
    weight: Weight
    aux: Tree
    """How aux merges; "sum" where there is none."""
    options: Options
    """With the reduction."""
    axis_names: tuple[str, ...] = ()
    """The mesh axes whose devices share the batch."""


class Gathering(NamedTuple, Generic[G]):
    """What becomes of the micro-batches' gradients."""

    start: G
    add: Callable[[G, list[Array], Scalar, Scalar], G]
    """``add(held, gradients, weight, loss)``; a Python number as the weight where the program knows it."""
    relative: bool
    """Whether weights may be counted in units of the largest micro-batch, so that most of them are 1 and cost nothing."""
    axes: Axes = frozenset()
    """The manual mesh axes along which each device has gradients of its own, to be reduced later."""
    scale: Scalar = None
    """What the loss is multiplied by before differentiation."""


class Made(NamedTuple, Generic[G]):
    """What all micro-batches came to."""

    held: G
    weight: Scalar
    """The weight of the large batch, as `denominator` wants it."""
    loss: Scalar
    """That of the large batch."""
    aux: Tree


class Own(NamedTuple):
    """What is added up here."""

    weight: Scalar
    loss: Scalar
    aux: list[Array]


class Carry(NamedTuple, Generic[G]):
    """What goes from one micro-batch to the next."""

    held: G
    own: Own


def run(question: Question, by: tuple[Tree, ...], source: Source, gathering: Gathering[G]) -> Made[G]:
    """Run all micro-batches.

    Args:
        question: what is asked about each.
        by: the arguments to differentiate by, of this device.
        source: the batch, cut.
        gathering: what becomes of the gradients.

    Raises:
        ArgumentValueError, ArgumentTypeError: the loss function, the aux or a weight is not as it was declared.
    """
    groups, axes = groups_in(source), axes_in(by, source, question.axis_names)
    first, by = first_number(groups, question.axis_names), copies(by, gathering.axes)
    sample = groups[0].take(jax.tree.map(lambda leaf: leaf[0], groups[0].places), jnp.int32(0))
    like, aux = jax.eval_shape(lambda by: question.differentiation.value(by, sample.arguments), by)
    merging = make_merging(question.aux, aux)
    counting = _Counting(question, merging, _unit(question, merging, source, relative=gathering.relative), weight_dtype(by, like))

    def body(carry: Carry[G], micro_batch: MicroBatch) -> tuple[Carry[G], list[Array]]:
        loss, aux, gradients = question.differentiation.value_and_gradients(by, micro_batch.arguments, gathering.scale)
        weight = counting.weight(micro_batch)
        own, rows = counting.add(carry.own, loss, aux, micro_batch, weight)
        return Carry(gathering.add(carry.held, gradients, weight, loss), copies(own, axes)), rows

    nothing = jnp.zeros((), counting.dtype)
    start = Carry(gathering.start, copies(Own(nothing, jnp.zeros((), sums.sum_dtype(like, None)), merging.start()), axes))
    (held, own), rows = over(groups, body, start, first)
    own = counting.known(_over_devices(own, merging, question.axis_names), source)
    items = _all_items(source, question.axis_names) if merging.counts_items else None
    loss = (own.loss / denominator(own.weight, question.options)).astype(like.dtype)
    by_weight = jnp.where(own.weight == 0, 1, own.weight)
    return Made(held, own.weight, loss, merging.finish(own.aux, in_order(groups, rows), items, by_weight))


class _Counting(NamedTuple):
    """How a micro-batch counts."""

    question: Question
    merging: Merging
    unit: int | None
    dtype: DType

    def weight(self, micro_batch: MicroBatch) -> Scalar:
        return weight_of(micro_batch, self.question.weight, self.unit, self.dtype)

    def known(self, own: Own, source: Source) -> Own:
        """`own` of all devices, with a constant as the weight where the user gives none: XLA then counts nothing in the loop."""
        if self.question.weight is not None or self.unit is None:
            return own
        return own._replace(weight=jnp.asarray(_all_items(source, self.question.axis_names) / self.unit, self.dtype))

    def add(self, held: Own, loss: Scalar, aux: Tree, micro_batch: MicroBatch, weight: Scalar) -> tuple[Own, list[Array]]:
        """Loss, weight and aux; with weight 0 nothing is added, even of a NaN."""
        items = known_items(micro_batch.items) if self.merging.counts_items else None
        merged, rows = self.merging.add(held.aux, aux, items, weight)
        dtype = held.loss.dtype
        own, always = jnp.asarray(weight, dtype), jnp.asarray(True)
        total = add_loss(held.loss, loss.astype(dtype), own, own != 0, self.question.options, sums.passing(always))
        return Own((held.weight + weight).astype(self.dtype), total, merged), rows


def weight_dtype(by: tuple[Tree, ...], loss: Array) -> DType:
    """float64 if a parameter or the loss is float64, else float32."""
    wide = any(jnp.result_type(leaf) in ("float64", "complex128") for leaf in (*jax.tree.leaves(by), loss))
    return jnp.dtype("float64" if wide else "float32")


def axes_in(by: Tree, source: Source, axis_names: tuple[str, ...]) -> Axes:
    """The manual mesh axes along which anything here may differ from device to device."""
    return frozenset(axis_names).union(*(axes_of(leaf) for leaf in jax.tree.leaves((by, source))))


def copies(tree: G, axes: Axes) -> G:
    """`tree` as copies that may differ along `axes`: else `jax.grad` would reduce over the devices in every micro-batch."""
    made: G = jax.tree.map(lambda leaf: vary(leaf, axes), tree) if axes else tree
    return made


def _unit(question: Question, merging: Merging, source: Source, *, relative: bool) -> int | None:
    counts_items = "weighted_mean" in merging.kinds or question.options.noise_decay is not None
    if question.options.reduction == "sum" and not counts_items:
        return None
    return known_items(largest_in(source)) if relative and question.weight is None and question.options.reduction == "mean" else 1


def first_number(groups: list[Group], axis_names: tuple[str, ...]) -> Scalar:
    """The number of this device's first micro-batch among those of all devices."""
    count = sum(len(group.numbers) for group in groups)
    return lax.axis_index(axis_names) * count if axis_names else 0


def _all_items(source: Source, axis_names: tuple[str, ...]) -> int:
    return known_items(items_in(source)) * (lax.axis_size(axis_names) if axis_names else 1)


def _over_devices(own: Own, merging: Merging, axis_names: tuple[str, ...]) -> Own:
    """Weight, loss and merged aux of all devices; the gradients are the caller's."""
    if not axis_names:
        return own
    summed = [leaf for leaf, is_sum in zip(own.aux, merging.is_sum(), strict=True) if is_sum]
    library: Any = lax
    # One by one: JAX 0.7 does not transpose a psum of several arrays where only some have a derivative.
    weight, loss, *made = (library.psum(leaf, axis_names) for leaf in (own.weight, own.loss, *summed))
    given = iter(made)
    extremes = merging.over_devices(own.aux, axis_names)
    aux = [next(given) if is_sum else leaf for leaf, is_sum in zip(extremes, merging.is_sum(), strict=True)]
    return own._replace(weight=weight, loss=loss, aux=aux)
