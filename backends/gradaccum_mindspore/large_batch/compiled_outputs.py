"""How the other outputs of micro-batches merge in compiled code, as `merging.MergedOutputs` merges them where Python calls.

A loop of compiled code needs the shape of what it carries before it runs, and only a first micro-batch tells the shapes of outputs. So
that one stands before the loop. What is concatenated fills its place in a Tensor of all micro-batches of one size; the last, smaller
micro-batch comes behind it.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from gradaccum.kit import concatenate_error, finished, kinds_of, merged, share
from gradaccum_mindspore.large_batch.merging import OPERATORS
from gradaccum_mindspore.large_batch.nests import EMPTY, axis_at, axis_of, check_keys, check_prefix, leaves_in
from gradaccum_mindspore.sums import where

Outputs = tuple[Tensor, ...]


def others_of(value: Any) -> Any:
    """The outputs beside the loss as they are declared: the only one, or the tuple of several."""
    return value[0] if len(value) == 1 else value


def kinds_in(declared: Any, nest: Any) -> tuple[str, ...]:
    """The kind of each leaf of a nest, from the user's declaration: one kind, or a prefix nest of kinds."""
    found: tuple[str, ...] = ()
    if isinstance(nest, (tuple, list)):
        check_prefix(declared, len(nest), "aux")
        for place in range(len(nest)):
            found = found + kinds_in(axis_at(declared, place), nest[place])
        return found
    if isinstance(nest, dict):
        check_keys(declared, tuple(nest.keys()), "aux")
        for key in nest.keys():  # noqa: SIM118 - the compiler iterates over no dict
            found = found + kinds_in(axis_of(declared, key), nest[key])
        return found
    return (leaf_kind(declared),)


def shares_of(kinds: tuple[str, ...], outputs: Any, items: Tensor, weight: Tensor) -> Outputs:
    """What one micro-batch gives to each merged output; a mean over no weight gives nothing, though it be NaN."""
    leaves = leaves_in(outputs)
    shares: Outputs = ()
    for place in range(len(kinds)):
        kind, value = kinds[place], leaves[place]
        if kind == "concatenate":
            check_rows(len(value.shape))
        given = share(kind, value, _like(items, value), _like(weight, value), OPERATORS)
        if kind == "weighted_mean":
            given = where(weight != 0, given, ops.zeros_like(given))
        shares = (*shares, given)
    return shares


def begun(kinds: tuple[str, ...], shares: Outputs, count: int) -> Outputs:
    """The merged outputs after the first of `count` micro-batches of one size."""
    made: Outputs = ()
    for place in range(len(kinds)):
        given = shares[place]
        if kinds[place] == "concatenate":
            given = ops.broadcast_to(given.expand_dims(0), (count, *given.shape))
        made = (*made, given)
    return made


def with_shares(kinds: tuple[str, ...], so_far: Outputs, shares: Outputs, step: Tensor) -> Outputs:
    """The merged outputs with those of the micro-batch at `step`, an int32 Tensor of shape ()."""
    made: Outputs = ()
    for place in range(len(kinds)):
        if kinds[place] == "concatenate":
            value = ops.tensor_scatter_update(so_far[place], step.reshape((1, 1)), shares[place].expand_dims(0))
        else:
            value = merged(kinds[place], so_far[place], shares[place], OPERATORS)
        made = (*made, value)
    return made


def rows_joined(kinds: tuple[str, ...], so_far: Outputs) -> Outputs:
    """The merged outputs with the rows of all micro-batches along one axis."""
    made: Outputs = ()
    for place in range(len(kinds)):
        value = so_far[place]
        if kinds[place] == "concatenate":
            value = value.reshape((value.shape[0] * value.shape[1], *value.shape[2:]))
        made = (*made, value)
    return made


def with_tail(kinds: tuple[str, ...], so_far: Outputs, shares: Outputs) -> Outputs:
    """The merged outputs, joined, with those of a last, smaller micro-batch."""
    made: Outputs = ()
    for place in range(len(kinds)):
        if kinds[place] == "concatenate":
            value = ops.concat((so_far[place], shares[place]), 0)
        else:
            value = merged(kinds[place], so_far[place], shares[place], OPERATORS)
        made = (*made, value)
    return made


def finished_outputs(kinds: tuple[str, ...], so_far: Outputs, items: Tensor, weight: Tensor) -> Outputs:
    """The large batch's outputs; a batch of weight 0 has means of 0."""
    total = where(weight == 0, weight + 1, weight)
    made: Outputs = ()
    for place in range(len(kinds)):
        kind, value = kinds[place], so_far[place]
        made = (*made, finished(kind, value, _like(items, value), _like(total, value)))
    return made


def _like(number: Tensor, value: Tensor) -> Tensor:
    """A number in the dtype in which a mean of such values is taken."""
    return number.astype(ms.float64 if value.dtype == ms.float64 else ms.float32)


@constexpr  # type: ignore[untyped-decorator]
def leaf_kind(declared: Any) -> str:
    """The kind of one leaf; refuses what is none, and a declaration that goes deeper than the outputs, while compiling."""
    return kinds_of(declared, EMPTY)[0]


@constexpr  # type: ignore[untyped-decorator]
def check_rows(axes: int) -> None:
    """Refuse to concatenate scalars, while compiling."""
    if axes == 0:
        raise concatenate_error("aux", "a scalar")
