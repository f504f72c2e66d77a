"""Split a large batch into micro-batches, and compute the micro-batches' weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from gradaccum import ArgumentTypeError, ArgumentValueError, kit
from gradaccum.kit import Cut, Division, Nest, Options
from gradaccum_mindspore.checks import item_weights, weight_as_number
from gradaccum_mindspore.mindspore_private import is_graph_mode

Batch = tuple[Nest, ...]
Weight: TypeAlias = Callable[..., Any] | Sequence[float] | Tensor | None
"""Either a function that takes the arguments of a micro-batch, a sequence with one
number per item, or None, which gives each item weight 1.
"""


class Constant:
    """A placeholder for a number or a string of the batch in compiled code. Compiled
    code does not split lists of numbers or strings.
    """


INDIVISIBLE = (str, bytes, bool, int, float, complex, type(None), np.generic, Constant)
"""The types of values in a batch that are passed whole to each micro-batch."""


class CallOptions(NamedTuple):
    """The options of a function that processes a large batch."""

    division: Division
    reduction: Options
    """The options from which `gradaccum.kit.contribution` and `gradaccum.kit.divisor`
    compute the factor of each micro-batch and the divisor of the sum.
    """
    weight: Any = None
    axes: Nest = 0
    has_aux: bool = False
    merge_aux: Any = None

    def factor(self, weight: float) -> float:
        """Return the factor by which a micro-batch's gradients and loss are multiplied.
        With weight 0, it is 0 under any reduction.
        """
        return float(kit.contribution(weight, self.reduction)) * (weight > 0)

    def divisor(self, total_weight: float) -> float:
        state = kit.initial_state(1.0)._replace(weight=total_weight)
        return float(kit.divisor(state, self.reduction, kit.select))


def positional(fn: Callable[..., Any], batch: Batch, keywords: dict[str, Any]) -> Batch:
    """Return the arguments of a call as a tuple, in the order of the parameters of
    `fn`.

    Raises:
        ArgumentTypeError: one of `keywords` is a keyword-only parameter of `fn`.
    """
    if not keywords:
        return batch
    function = fn.construct if isinstance(fn, nn.Cell) else fn
    call = inspect.signature(function).bind(*batch, **keywords)
    call.apply_defaults()
    if call.kwargs:
        name = next(iter(call.kwargs))
        raise ArgumentTypeError(
            f"{name}: expected a parameter that the function also accepts by position;"
            f" got a keyword-only parameter. Wrap the function: lambda x, {name}:"
            f" forward(x, {name}={name})."
        )
    return call.args


class MicroBatch(NamedTuple):
    """The arguments with which the user's function is called for one micro-batch, and
    the micro-batch's weight.
    """

    arguments: Batch
    weight: float


def micro_batches(batch: Batch, options: CallOptions) -> Iterator[MicroBatch]:
    for cut, weight in zip(*cuts_and_weights(batch, options), strict=True):
        arguments = slices_of(batch, options.axes, cut)
        if weight is None:
            weight = weight_as_number(options.weight(*arguments))
        yield MicroBatch(arguments, weight)


def cuts_and_weights(
    batch: Batch, options: CallOptions
) -> tuple[Sequence[Cut], list[float | None]]:
    """Return the range of items in each micro-batch, and the weight of each
    micro-batch. The weights are None if the user passed a function that computes them.
    """
    items = number_of_items(batch, options.axes)
    cuts = kit.divided(options.division, items)
    if callable(options.weight):
        return cuts, [None] * len(cuts)
    if options.weight is None:
        return cuts, [float(cut.items) for cut in cuts]
    numbers = item_weights(options.weight, items)
    return cuts, [math.fsum(numbers[cut.start : cut.stop]) for cut in cuts]


def number_of_items(batch: Nest, axes: Nest) -> int:
    leaves = kit.leaves_of(batch, "batch")
    leaf_axes = kit.spread(axes, batch, "axes")
    sizes = [
        (leaf.path, size_along(leaf.value, axis, leaf.path))
        for leaf, axis in zip(leaves, leaf_axes, strict=True)
        if has_items(leaf.value, axis)
    ]
    return kit.require_one_size(sizes, kit.lists_of_one_kind(batch, axes))


def has_items(leaf: Any, axis: object) -> bool:
    return axis is not None and not isinstance(leaf, INDIVISIBLE)


def size_along(leaf: Any, axis: Any, path: str) -> int:
    if kit.is_column(leaf):
        return len(leaf)
    if not -len(leaf.shape) <= axis < len(leaf.shape):
        raise ArgumentValueError(
            f"{path}: expected an array with axis {axis}; got an array of shape"
            f" {tuple(leaf.shape)}. In axes=, give the axis along which the items"
            " lie, or None to pass the whole array to every micro-batch."
        )
    return int(leaf.shape[axis])


def slices_of(batch: Batch, axes: Nest, cut: Cut) -> Batch:
    """Return the arguments of one micro-batch: the part of `batch` with the items in
    `cut`.
    """
    leaves = kit.leaves_of(batch)
    leaf_axes = kit.spread(axes, batch, "axes")
    pairs = zip(leaves, leaf_axes, strict=True)
    slices = [slice_of(leaf.value, axis, cut) for leaf, axis in pairs]
    arguments: Any = kit.with_leaves(batch, iter(slices))
    if is_graph_mode():
        # Graph mode treats a container of Tensors as a constant, so it would compile
        # the function again for each micro-batch.
        arguments = map(mutable, arguments)
    return tuple(arguments)


def slice_of(leaf: Any, axis: Any, cut: Cut) -> Any:
    if not has_items(leaf, axis):
        return leaf
    if kit.is_column(leaf):
        return leaf[cut.start : cut.stop]
    before = (slice(None),) * (axis % leaf.ndim)
    part = leaf[(*before, slice(cut.start, cut.stop))]
    # Graph mode cannot return a slice that shares the memory of the batch.
    return part.copy() if is_graph_mode() else part


def mutable(argument: Nest) -> Nest:
    leaves = kit.leaves_of(argument)
    holds_tensors = all(isinstance(leaf.value, Tensor) for leaf in leaves)
    if kit.children_of(argument) and holds_tensors:
        return ms.mutable(argument)
    return argument
