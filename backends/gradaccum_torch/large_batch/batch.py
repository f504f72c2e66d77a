"""Splits a large batch into micro-batches. Each contains consecutive items along the
batch axis of each leaf, as views of the user's own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradaccum import ArgumentValueError, kit

PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""The types of values in a batch that are passed to each micro-batch without being
split.
"""

Weight: TypeAlias = Callable[..., Any] | Sequence[float] | Tensor | None
"""Either a function that takes the micro-batch and returns its weight, a sequence with
one number per item, or None.
"""
MergeAux: TypeAlias = Callable[[list[Any], list[float]], Any] | str | None
"""How the `aux` values of the micro-batches are combined: by a function that takes the
list of these values and the list of weights, by ``"concatenate"``, or not at all (None).
"""


class MicroBatch(NamedTuple):
    """The arguments of the loss function for one micro-batch, and the micro-batch's
    weight.
    """

    arguments: tuple[Any, ...]
    weight: float
    factor: float
    """The factor by which the micro-batch's loss and gradient are multiplied; 0 if its
    weight is 0.
    """


class CutBatch(NamedTuple):
    """The micro-batches of a large batch.

    The large batch's gradient is the sum of ``factor * gradient``, divided by
    `divisor`.
    """

    micro_batches: list[MicroBatch]
    divisor: float


class LargeBatch:
    """A large batch that is to be split into micro-batches: the loss function's
    arguments, the batch axis of each tensor in them, and the weights of the items.
    """

    def __init__(self, batch: tuple[Any, ...], axes: kit.Nest, weight: Weight) -> None:
        self.batch = batch
        leaves = kit.leaves_of(batch, "batch")
        leaf_axes: list[Any] = kit.spread(axes, batch, "axes")
        self.leaves = [
            (leaf, axis_of(leaf, axis))
            for leaf, axis in zip(leaves, leaf_axes, strict=True)
        ]
        self.tensors = tensors_of(batch)
        sizes = [
            (leaf.path, length_of(leaf.value, axis))
            for leaf, axis in self.leaves
            if axis is not None
        ]
        self.items = kit.require_one_size(sizes, kit.lists_of_one_kind(batch, axes))
        self.weight: Any = weight
        if isinstance(weight, Tensor):
            self.weight = weight.tolist()  # Copies all weights from the device at once.
        if weight is not None and not callable(weight):
            self.weight = kit.require_item_weights(self.weight, self.items)

    def cut(self, division: kit.Division, options: kit.Options) -> CutBatch:
        cuts = kit.divided(division, self.items)
        columns = [split_leaf(leaf.value, axis, cuts) for leaf, axis in self.leaves]
        arguments: list[Any] = [
            kit.with_leaves(self.batch, iter(row)) for row in zip(*columns, strict=True)
        ]
        state: kit.Fields = kit.initial_state()
        micro_batches = []
        weights = self._weights(cuts, arguments)
        for inputs, weight in zip(arguments, weights, strict=True):
            factor = 0.0
            if kit.usable(state, weight, True):
                factor = float(kit.contribution(weight, options))
            micro_batches.append(MicroBatch(inputs, weight, factor))
            state = kit.accumulate(state, weight, True, kit.select)
        return CutBatch(micro_batches, float(kit.divisor(state, options, kit.select)))

    def _weights(
        self, cuts: Sequence[kit.Cut], arguments: list[tuple[Any, ...]]
    ) -> list[float]:
        if self.weight is None:
            return [float(cut.items) for cut in cuts]
        if callable(self.weight):
            return [read_weight(self.weight(*inputs)) for inputs in arguments]
        return [math.fsum(self.weight[cut.start : cut.stop]) for cut in cuts]


def tensors_of(nest: kit.Nest) -> list[Tensor]:
    values = [leaf.value for leaf in kit.leaves_of(nest)]
    return [value for value in values if isinstance(value, Tensor)]


def axis_of(leaf: kit.Leaf, axis: int | None) -> int | None:
    """Return the batch axis of `leaf` as a number >= 0, or None if the leaf is not
    split.
    """
    value: Any = leaf.value
    if axis is None or isinstance(value, PLAIN):
        return None
    dimensions = 1 if kit.is_column(value) else int(getattr(value, "ndim", 0))
    if not -dimensions <= axis < dimensions:
        raise ArgumentValueError(
            f"{leaf.path}: expected an array with an axis {axis} to split; got a"
            f" {type(value).__name__} of {dimensions} dimensions. In axes=, set the"
            " batch axis of this array, or None to pass the array whole."
        )
    return axis % dimensions


def length_of(value: Any, axis: int) -> int:
    return len(value) if kit.is_column(value) else int(value.shape[axis])


def split_leaf(value: Any, axis: int | None, cuts: Sequence[kit.Cut]) -> list[Any]:
    """Return for each micro-batch its items of `value`, as a view. If `axis` is None,
    return `value` itself for each micro-batch.
    """
    if axis is None:
        return [value] * len(cuts)
    if isinstance(value, Tensor):
        return [value.narrow(axis, cut.start, cut.items) for cut in cuts]
    if kit.is_column(value):
        return [value[cut.start : cut.stop] for cut in cuts]
    before = (slice(None),) * axis
    return [value[(*before, slice(cut.start, cut.stop))] for cut in cuts]


def read_weight(weight: object) -> float:
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise kit.moving_weight_error(
            "Return weight.detach() if the loss function also divides by a detached"
            " number."
        )
    return kit.require_weight(weight)


def require_scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise kit.scalar_loss_error(f"a {type(loss).__name__}")
    if loss.dim():
        raise kit.scalar_loss_error(f"a tensor of shape {tuple(loss.shape)}")
    return loss


def copy_without_graph(leaf: object) -> object:
    """Return a copy of a tensor without its graph; return any other value as it is. The
    copy is needed because the replay of a CUDA graph overwrites the tensor in the next
    micro-batch.
    """
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def merge(auxes: list[Any], weights: list[float], merge_aux: MergeAux) -> Any:
    if merge_aux is None:
        return auxes
    if merge_aux == "concatenate":
        return concatenate(auxes)
    return merge_aux(auxes, weights)  # type: ignore[operator]


def concatenate(nests: Sequence[kit.Nest]) -> kit.Nest:
    """Return a nest whose tensors are the corresponding tensors of all `nests`,
    concatenated along their first axis.
    """
    tensors: list[Any] = [dict(kit.leaves_of(nest)) for nest in nests]
    columns = [[leaves[path] for leaves in tensors] for path in tensors[0]]
    return kit.with_leaves(nests[0], iter([torch.cat(column) for column in columns]))
