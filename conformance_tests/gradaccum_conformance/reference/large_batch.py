"""The large batch in one call, in NumPy: the executable definition of what every
backend's call returns.

It keeps every micro-batch's part and adds up at the end by the formulas of the
definition, which no backend can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from gradaccum import ArgumentTypeError, ArgumentValueError, kit
from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.specs import Array, Arrays, Batch


class Part(NamedTuple):
    """What one micro-batch gave."""

    weight: float
    loss: float
    gradient: Arrays
    aux: Any


LossFn = Callable[[Any], tuple[float, Arrays, Any]]
"""The loss, the gradient and other outputs of a micro-batch, or None."""


def pieces(
    batch: tuple[Any, ...], weight: Any, options: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], float]]:
    """The micro-batches, each with its weight: the sum of its items' weights, or their
    number; only the first two arguments are cut.
    """
    axes = options.get("axes", 0)
    division = kit.make_division(options.get("steps"), options.get("micro_batch_size"))
    placed = zip(
        kit.leaves_of(batch, "batch"), kit.spread(axes, batch, "axes"), strict=True
    )
    sizes = [
        (leaf.path, length_along(leaf.value, axis, leaf.path))
        for leaf, axis in placed
        if axis is not None
    ]
    items = kit.require_one_size(
        [(path, size) for path, size in sizes if size is not None],
        kit.lists_of_one_kind(batch, axes),
    )
    if weight is not None and not callable(weight):
        weight = kit.require_item_weights(weight, items)
    made: list[tuple[tuple[Any, ...], float]] = []
    for start, stop in kit.divided(division, items):
        piece = Batch(*batch[:2]).rows(start, stop)
        if isinstance(weight, list):
            made.append((piece, sum(weight[start:stop])))
        else:
            made.append((piece, weight_of(piece, weight)))
    return made


def length_along(value: Any, axis: Any, path: str) -> int | None:
    """The items of a leaf; None where it has none: it is given whole."""
    if not isinstance(axis, int):
        raise ArgumentTypeError(
            f"axes: expected an int or None for each leaf; got {axis!r}"
            f" ({type(axis).__name__}). Write axes=0."
        )
    if not hasattr(value, "dtype"):
        return len(value) if isinstance(value, Sized) else None
    return int(value.shape[kit.batch_axis(kit.Leaf(path, value), value.shape, axis)])


def weight_of(piece: tuple[Any, ...], weight: Any) -> float:
    """The weight of a micro-batch: what the user's function says of it, or its number
    of items.
    """
    if weight is None:
        return float(len(piece[0]))
    made = weight(*piece)
    is_array_of_one = np.size(made) == 1 and hasattr(made, "item")
    return kit.require_weight(made.item() if is_array_of_one else made)


def checked(
    returned: tuple[float, Arrays, Any], has_aux: bool
) -> tuple[float, Arrays, Any]:
    """Raise unless a loss function has returned one number as its loss, and other
    outputs if `has_aux` says so.
    """
    loss, _, aux = returned
    if has_aux and aux is None:
        raise kit.missing_aux_error(loss)
    if not has_aux and aux is not None:
        raise kit.scalar_loss_error("a tuple of 2")
    require_scalar(loss)
    return returned


def require_scalar(loss: Any) -> None:
    """Raise unless the loss is one number."""
    if np.shape(loss):
        raise kit.scalar_loss_error(f"an array of shape {np.shape(loss)}")


def reduced(parts: Sequence[Part], reduction: str) -> tuple[float, Arrays]:
    """The loss and the gradient by the definition. Parts of weight 0 add nothing,
    whatever they hold.
    """
    total_weight = sum(part.weight for part in parts)
    divisor = (reduction != "sum" and total_weight) or 1.0
    loss = 0.0
    sums = {name: np.zeros_like(array) for name, array in parts[0].gradient.items()}
    for part in parts:
        if part.weight:
            factor = part.weight if reduction == "mean" else 1.0
            loss += factor * part.loss
            for name, array in part.gradient.items():
                sums[name] = sums[name] + np.asarray(factor, array.dtype) * array
    return loss / divisor, {name: total / divisor for name, total in sums.items()}


def value_and_grad(
    loss_fn: LossFn,
    batch: tuple[Any, ...],
    *,
    reduction: str = "mean",
    weight: Any = None,
    has_aux: bool = False,
    merge_aux: Any = None,
    **division: Any,
) -> tuple[float, Arrays, Any]:
    """Loss, gradient and outputs of the large batch."""
    kit.require_reduction(reduction)
    parts = [
        Part(w, *checked(loss_fn(piece), has_aux))
        for piece, w in pieces(batch, weight, division)
    ]
    auxes = [part.aux for part in parts]
    weights = [part.weight for part in parts]
    aux = merged(auxes, weights, merge_aux) if has_aux else None
    return *reduced(parts, reduction), aux


def update(
    optimizer: ReferenceAccumulation,
    loss_fn: LossFn,
    batch: tuple[Any, ...],
    *,
    weight: Any = None,
    **division: Any,
) -> float:
    """A whole window of a wrapped optimizer from one large batch, and its loss; the
    gradients of `loss_fn` have the loss scale.
    """
    require_closed_by_caller(optimizer.options)
    parts = [
        Part(w, *checked(loss_fn(piece), False))
        for piece, w in pieces(batch, weight, division)
    ]
    for part in parts:
        optimizer.step(part.gradient, part.weight, part.loss)
    optimizer.flush()
    return reduced(parts, optimizer.options.reduction)[0]


def require_closed_by_caller(options: kit.Options) -> None:
    """Raise unless the window ends when the caller says so."""
    if options.steps is not None:
        found = f"steps={options.steps}"
        raise ArgumentValueError(
            "optimizer: expected an optimizer that was wrapped with steps=None; got"
            f" {found}. Write steps=None."
        )


def coupled_value_and_grad(
    outputs_fn: Callable[[Any], tuple[Arrays, Callable[[Arrays], Arrays]]],
    loss_fn: Callable[[Arrays], tuple[float, Arrays, Arrays]],
    batch: tuple[Any, ...],
    **division: Any,
) -> tuple[float, Arrays]:
    """Loss and gradient of a loss that couples the items.

    Args:
        outputs_fn: a micro-batch's outputs, and what maps their gradient to the
            parameters'.
        loss_fn: of all outputs the loss, its gradient with respect to them, and that
            with respect to its own parameters.
        batch: the large batch.
        division: how it is split.
    """
    cut = [piece for piece, _ in pieces(batch, None, division)]
    outputs = concatenated([outputs_fn(piece)[0] for piece in cut])
    loss, gradients, own = loss_fn(outputs)
    require_scalar(loss)
    edges = np.cumsum([len(piece[0]) for piece in cut])[:-1]
    shares = {name: np.split(gradient, edges) for name, gradient in gradients.items()}
    parts = []
    for place, piece in enumerate(cut):
        _, backward = outputs_fn(piece)
        gradient = backward({name: share[place] for name, share in shares.items()})
        parts.append(Part(1.0, 0.0, gradient, None))
    return loss, reduced(parts, "sum")[1] | own


def merged(auxes: Sequence[Any], weights: Sequence[float], merge_aux: Any) -> Any:
    """The other outputs of all micro-batches: by the user's function, concatenated
    along the items, or each stacked, a row per micro-batch.
    """
    if callable(merge_aux):
        return merge_aux(auxes, weights)
    if merge_aux == "concatenate":
        return concatenated(auxes)
    return _by_leaf(np.stack, auxes)


def concatenated(outputs: Sequence[Any]) -> Any:
    """Nests of arrays, concatenated leaf by leaf."""
    return _by_leaf(np.concatenate, outputs)


def _by_leaf(join: Callable[..., Array], nests: Sequence[Any]) -> Any:
    rows = zip(
        *([leaf.value for leaf in kit.leaves_of(nest)] for nest in nests), strict=True
    )
    return kit.with_leaves(nests[0], iter([join(values) for values in rows]))
