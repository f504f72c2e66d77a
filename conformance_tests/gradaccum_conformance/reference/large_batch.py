"""The large batch in one call, in NumPy: the executable definition of what every backend's call returns.

It keeps every micro-batch's part and adds up at the end by the formulas of the definition, which no backend can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from gradaccum.kit import (
    divided,
    leaves_of,
    make_division,
    mark_lists,
    require_item_weights,
    require_kind,
    require_one_size,
    require_reduction,
    spread,
)
from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.specs import Array, Arrays, Batch


class Part(NamedTuple):
    """What one micro-batch gave."""

    items: int
    weight: float
    loss: float
    gradient: Arrays
    aux: Arrays


LossFn = Callable[[Batch], tuple[float, Arrays, Arrays]]
"""The loss, the gradient and other outputs of a micro-batch."""


def pieces(batch: Batch, weight: Array | None, arguments: Mapping[str, Any]) -> list[tuple[Batch, float]]:
    """The micro-batches, each with its weight: the sum of its items', or their number; only the first two arguments are cut."""
    division = make_division(*(arguments.get(name) for name in ("steps", "micro_batch_size", "micro_batch_weight")))
    nest, lists = mark_lists(tuple(batch), arguments.get("axes", 0))
    placed = zip(leaves_of(nest, "batch"), spread(arguments.get("axes", 0), nest, "axes"), strict=True)
    sizes = [(leaf.path, len(leaf.value)) for leaf, axis in placed if axis is not None and isinstance(leaf.value, Sized)]
    items, batch = require_one_size(sizes, lists), Batch(*batch[:2])
    each = np.ones(items) if weight is None else np.array(require_item_weights(weight, items))
    cuts = divided(division, items, None if weight is None else list(each))
    return [(batch.rows(start, stop), float(each[start:stop].sum())) for start, stop in cuts]


def value_and_grad(
    loss_fn: LossFn,
    batch: Batch,
    *,
    reduction: str = "mean",
    weight: Array | None = None,
    aux: Mapping[str, str] | None = None,
    **division: Any,
) -> tuple[float, Arrays, Arrays]:
    """Loss, gradient and merged outputs of the large batch."""
    require_reduction(reduction)
    for kind in (aux or {}).values():
        require_kind(kind)
    parts = [Part(piece.items, w, *loss_fn(piece)) for piece, w in pieces(batch, weight, division)]
    weights = [part.weight for part in parts]
    factors = weights if reduction == "mean" else [1.0] * len(parts)
    divisor = 1.0 if reduction == "sum" else sum(weights) or 1.0
    loss = loss_of([part.loss for part in parts], weights, reduction)
    names = parts[0].gradient
    gradient = {name: _total(factors, [part.gradient[name] for part in parts]) / divisor for name in names}
    return loss, gradient, {name: _merge(kind, parts, name) for name, kind in (aux or {}).items()}


def update(optimizer: ReferenceAccumulation, loss_fn: LossFn, batch: Batch, *, weight: Array | None = None, **division: Any) -> float:
    """A whole window of a wrapped optimizer from one large batch, and its loss; the gradients of `loss_fn` have the loss scale."""
    losses, weights = [], []
    for piece, w in pieces(batch, weight, division):
        loss, gradient, _ = loss_fn(piece)
        optimizer.step(gradient, w, loss)
        losses.append(loss)
        weights.append(w)
    optimizer.flush()
    return loss_of(losses, weights, optimizer.options.reduction)


def loss_of(losses: Sequence[float], weights: Sequence[float], reduction: str) -> float:
    """The large batch's loss from those of its micro-batches."""
    factors = weights if reduction == "mean" else [1.0] * len(losses)
    divisor = 1.0 if reduction == "sum" else sum(weights) or 1.0
    return sum(factor * loss for factor, loss in zip(factors, losses, strict=True)) / divisor


def coupled_value_and_grad(
    outputs_fn: Callable[[Batch], tuple[Arrays, Callable[[Arrays], Arrays]]],
    loss_fn: Callable[[Arrays], tuple[float, Arrays, Arrays]],
    batch: Batch,
    **division: Any,
) -> tuple[float, Arrays]:
    """Loss and gradient of a loss that couples the items.

    Args:
        outputs_fn: a micro-batch's outputs, and what maps their gradient to the parameters'.
        loss_fn: of all outputs the loss, its gradient with respect to them, and that with respect to its own parameters.
        batch: the large batch.
        division: how it is split.
    """
    cut = [piece for piece, _ in pieces(batch, None, division)]
    outputs = [outputs_fn(piece)[0] for piece in cut]
    loss, gradients, own = loss_fn({name: np.concatenate([part[name] for part in outputs]) for name in outputs[0]})
    edges = np.cumsum([piece.items for piece in cut])[:-1]
    shares = {name: np.split(gradient, edges) for name, gradient in gradients.items()}
    parts = [outputs_fn(piece)[1]({name: share[place] for name, share in shares.items()}) for place, piece in enumerate(cut)]
    return loss, {name: _total([1.0] * len(parts), [part[name] for part in parts]) for name in parts[0]} | own


def _total(factors: Sequence[float], arrays: Sequence[Array]) -> Array:
    total: Array = np.sum([np.asarray(factor, array.dtype) * array for factor, array in zip(factors, arrays, strict=True)], axis=0)
    return total


def _merge(kind: str, parts: Sequence[Part], name: str) -> Array:
    values = [part.aux[name] for part in parts]
    match kind:
        case "concatenate":
            return np.concatenate(values)
        case "max" | "min":
            return np.asarray(np.max(values, axis=0) if kind == "max" else np.min(values, axis=0))
        case "sum":
            return _total([1.0] * len(parts), values)
    factors = [part.items if kind == "mean" else part.weight for part in parts]
    return _total([factor / sum(factors) for factor in factors], values)
