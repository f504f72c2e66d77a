"""The large batch in one call, in NumPy: the executable definition of what every
backend's call returns.

It keeps every micro-batch's part and adds up at the end by the formulas of the
definition, which no backend can afford.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from gradaccum import ArgumentTypeError, ArgumentValueError, kit
from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.specs import Array, Arrays, Batch


class Part(NamedTuple):
    """What one micro-batch gave."""

    items: int
    weight: float
    loss: float
    gradient: Arrays
    aux: Any


LossFn = Callable[[Any], tuple[float, Arrays, Any]]
"""The loss, the gradient and other outputs of a micro-batch, or None."""


def pieces(
    batch: tuple[Any, ...], weight: Any, options: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], float]]:
    """The micro-batches, each with its weight: the sum of its items', or their number;
    only the first two arguments are cut.
    """
    ways = [
        options.get(name)
        for name in ("steps", "micro_batch_size", "micro_batch_weight")
    ]
    split, axes = options.get("split"), options.get("axes", 0)
    division = kit.make_division(*ways, own_split=split is not None)
    if split is not None:
        return [
            (piece, weight_of(piece, weight))
            for piece in own_parts(split, batch, division.steps)
        ]
    nest, lists = kit.mark_lists(tuple(batch), axes)
    placed = zip(
        kit.leaves_of(nest, "batch"), kit.spread(axes, nest, "axes"), strict=True
    )
    sizes = [
        (leaf.path, length_along(leaf.value, axis, leaf.path))
        for leaf, axis in placed
        if axis is not None
    ]
    items, batch = (
        kit.require_one_size(
            [(path, size) for path, size in sizes if size is not None], lists
        ),
        Batch(*batch[:2]),
    )
    single = (
        [weight_of(batch.rows(i, i + 1), weight) for i in range(items)]
        if callable(weight)
        else weight
    )
    each = None if single is None else kit.require_item_weights(single, items)
    made = [
        (batch.rows(start, stop), (start, stop))
        for start, stop in kit.divided(division, items, each)
    ]
    return [
        (
            piece,
            weight_of(piece, weight)
            if each is None or callable(weight)
            else sum(each[slice(*place)]),
        )
        for piece, place in made
    ]


def length_along(value: Any, axis: Any, path: str) -> int | None:
    """The items of a leaf; None where it has none: it is given whole."""
    if not isinstance(axis, int):
        raise kit.explain(
            ArgumentTypeError,
            "axes",
            expected="an int or None for each leaf",
            got=axis,
            fix="Write axes=0.",
        )
    if not hasattr(value, "dtype"):
        return len(value) if isinstance(value, Sized) else None
    if not -value.ndim <= axis < value.ndim:
        fix = "Write axes=None for a leaf that is given whole."
        raise kit.explain(
            ArgumentValueError,
            path,
            expected=f"an array with an axis {axis}",
            found=f"shape {value.shape}",
            fix=fix,
        )
    return int(value.shape[axis])


def own_parts(
    split: Any, batch: tuple[Any, ...], steps: int | None
) -> list[tuple[Any, ...]]:
    """What the user's `split` makes of the batch."""
    made = (
        (split(*batch) if steps is None else split(*batch, steps=steps))
        if callable(split)
        else None
    )
    parts = list(made) if isinstance(made, Iterable) else []
    if not 0 < len(parts) <= (steps or math.inf):
        expected = "a function that returns the micro-batches, at most as many as steps"
        raise kit.explain(
            ArgumentValueError,
            "split",
            expected=expected,
            found=f"{len(parts)} of them",
            fix="Return a list of (x, y).",
        )
    return parts


def weight_of(piece: tuple[Any, ...], weight: Any) -> float:
    """The weight of a micro-batch: what the user's function says of it, or its number
    of items.
    """
    if callable(weight):
        made = weight(*piece)
        return kit.require_weight(
            made.item() if np.size(made) == 1 and hasattr(made, "item") else made
        )
    if weight is not None or len(set(map(len, piece))) > 1:
        fix = "Write weight= a function of the micro-batch."
        raise kit.explain(
            ArgumentValueError,
            "weight",
            expected="a function beside split=",
            found="none",
            fix=fix,
        )
    return float(len(piece[0]))


def checked(
    returned: tuple[float, Arrays, Any], declared: Any
) -> tuple[float, Arrays, Any]:
    """Raise unless a loss function has returned one number as its loss, and other
    outputs if they were `declared`.
    """
    loss, _, aux = returned
    if (aux is None) == bool(declared):
        raise kit.aux_shape_error(
            "a tuple of 2" if aux is not None else "the loss alone",
            declared=bool(declared),
        )
    require_scalar(loss)
    return returned


def require_scalar(loss: Any) -> None:
    """Raise unless the loss is one number."""
    if np.shape(loss):
        raise kit.scalar_loss_error(f"an array of shape {np.shape(loss)}")


def value_and_grad(
    loss_fn: LossFn,
    batch: tuple[Any, ...],
    *,
    reduction: str = "mean",
    weight: Any = None,
    aux: Any = None,
    **division: Any,
) -> tuple[float, Arrays, Any]:
    """Loss, gradient and merged outputs of the large batch."""
    kit.require_reduction(reduction)
    for kind in aux.values() if isinstance(aux, Mapping) else [aux] if aux else []:
        kit.require_kind(kind)
    parts = [
        Part(len(piece[0]), w, *checked(loss_fn(piece), aux))
        for piece, w in pieces(batch, weight, division)
    ]
    weights = [part.weight for part in parts]
    factors = weights if reduction == "mean" else [1.0] * len(parts)
    divisor = 1.0 if reduction == "sum" else sum(weights) or 1.0
    loss = loss_of([part.loss for part in parts], weights, reduction)
    gradient = {
        name: _total(factors, [part.gradient[name] for part in parts], weights)
        / divisor
        for name in parts[0].gradient
    }
    return loss, gradient, _merged(aux, parts) if aux else {}


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
    given = [
        (w, *checked(loss_fn(piece), None))
        for piece, w in pieces(batch, weight, division)
    ]
    for w, loss, gradient, _ in given:
        optimizer.step(gradient, w, loss)
    optimizer.flush()
    return loss_of(
        [loss for _, loss, *_ in given],
        [w for w, *_ in given],
        optimizer.options.reduction,
    )


def require_closed_by_caller(options: kit.Options) -> None:
    """Raise unless the window ends when the caller says so."""
    if options.steps is not None:
        found = f"steps={options.steps}"
        raise kit.explain(
            ArgumentValueError,
            "optimizer",
            expected="one wrapped with steps=None",
            found=found,
            fix="Write steps=None.",
        )


def loss_of(losses: Sequence[float], weights: Sequence[float], reduction: str) -> float:
    """The large batch's loss from those of its micro-batches."""
    factors = weights if reduction == "mean" else [1.0] * len(losses)
    divisor = 1.0 if reduction == "sum" else sum(weights) or 1.0
    return (
        sum(
            factor * loss
            for factor, loss, weight in zip(factors, losses, weights, strict=True)
            if weight
        )
        / divisor
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
    outputs = _merged(
        "concatenate", [Part(0, 0.0, 0.0, {}, outputs_fn(piece)[0]) for piece in cut]
    )
    loss, gradients, own = loss_fn(outputs)
    require_scalar(loss)
    edges = np.cumsum([len(piece[0]) for piece in cut])[:-1]
    shares = {name: np.split(gradient, edges) for name, gradient in gradients.items()}
    parts = [
        outputs_fn(piece)[1]({name: share[place] for name, share in shares.items()})
        for place, piece in enumerate(cut)
    ]
    return loss, {
        name: _total([1.0] * len(parts), [part[name] for part in parts])
        for name in parts[0]
    } | own


def _total(
    factors: Sequence[float],
    arrays: Sequence[Array],
    weights: Sequence[float] | None = None,
) -> Array:
    """The sum of `arrays`, each by its factor; those of weight 0 add nothing, whatever
    they hold.
    """
    kept = zip(factors, arrays, weights or [1.0] * len(arrays), strict=True)
    terms = [
        np.asarray(factor, array.dtype) * array
        for factor, array, weight in kept
        if weight
    ]
    return np.sum(terms, axis=0) if terms else np.zeros_like(arrays[0])


def _merged(declared: Any, parts: Sequence[Part]) -> Any:
    """The outputs of all, merged as `declared`: a kind for each, or one for all."""
    kinds = kit.kinds_of(declared, parts[0].aux)
    rows = zip(
        *([leaf.value for leaf in kit.leaves_of(part.aux, "aux")] for part in parts),
        strict=True,
    )
    return kit.with_leaves(
        parts[0].aux,
        iter(
            [
                _merge(kind, parts, list(values))
                for kind, values in zip(kinds, rows, strict=True)
            ]
        ),
    )


def _merge(kind: str, parts: Sequence[Part], values: list[Array]) -> Array:
    match kind:
        case "concatenate":
            if not np.ndim(values[0]):
                raise kit.concatenate_error("aux", "one of shape ()")
            return np.concatenate(values)
        case "max" | "min":
            return np.asarray(
                np.max(values, axis=0) if kind == "max" else np.min(values, axis=0)
            )
        case "sum":
            return _total([1.0] * len(parts), values)
    factors = [part.weight for part in parts]
    return _total([factor / (sum(factors) or 1) for factor in factors], values, factors)
