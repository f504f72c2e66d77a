"""What a micro-batch weighs: its number of items, what the user's function says of it, or the sum of its items' weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from gradaccum import ArgumentValueError
from gradaccum.kit import Cut, Nest, explain, item_weights_error, leaves_of, moving_weight_error
from gradaccum_mindspore.checks import weight_as_number
from gradaccum_mindspore.large_batch.randomness import DEPTH, named_by


def as_array(weights: Any, items: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Per-item weights as float64 of shape (items,).

    Raises:
        ArgumentValueError: they are not one finite number >= 0 for each item.
    """
    given = weights.asnumpy() if isinstance(weights, Tensor) else weights
    try:
        array = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise item_weights_error(items, f"an object of type {type(weights).__name__}") from None
    if array.shape != (items,):
        raise item_weights_error(items, f"shape {array.shape}")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise item_weights_error(items, str(array[~(np.isfinite(array) & (array >= 0))][0]))
    return array


def item_weights(weight: Any, singles: Iterable[tuple[Nest, ...]], items: int) -> list[float]:
    """The weight of each item; `singles` are the micro-batches of one item, about which a callable is asked."""
    if callable(weight):
        return [weight_as_number(weight(*single)) for single in singles]
    return [float(each) for each in as_array(weight, items)]


def weight_of(weight: Any, arguments: tuple[Nest, ...], items: int | None, cut: Cut | None, total: int | None) -> float:
    """The weight of one micro-batch.

    Args:
        weight: the option.
        arguments: the micro-batch.
        items: how many items it has; None if nobody knows.
        cut: where it was cut from the batch.
        total: the items of the batch.

    Raises:
        ArgumentValueError, ArgumentTypeError: the weight is no finite number >= 0, or cannot be known.
    """
    if callable(weight):
        given = weight(*arguments)
        if given is None:
            fix = "Return the number of tokens, say: weight=lambda x, mask: mask.sum()."
            raise explain(ArgumentValueError, "weight", expected="a function that returns a number", found="None", fix=fix)
        return weight_as_number(given)
    if weight is not None:
        if cut is None or total is None:
            raise _unknown_error("per-item weights beside a split of your own, which may order items anew")
        return float(as_array(weight, total)[cut.start : cut.stop].sum())
    if items is None:
        raise _unknown_error("a micro-batch of your own split whose leaves have different lengths")
    return float(items)


def constant(weight: Any, positions: tuple[int, ...], parameters: Sequence[Parameter]) -> Any:
    """`weight`, but a callable that may depend on what is differentiated raises if it does: its derivative is no part of the gradients.

    Args:
        weight: the option, of a reduction that divides by weights.
        positions: the arguments that are differentiated by.
        parameters: what `moving` returned.
    """
    if not callable(weight) or not (positions or parameters):
        return weight

    def checked(*arguments: Nest) -> Any:
        given, mode = weight(*arguments), ms.get_context("mode")
        if isinstance(given, Tensor) and given.is_floating_point():
            ms.set_context(mode=ms.PYNATIVE_MODE)  # Graph mode cannot read a lambda inside a call.
            try:
                slopes = ms.grad(weight, positions or None, parameters or None)(*arguments)
            finally:
                ms.set_context(mode=mode)
            leaves: list[Tensor] = [leaf.value for leaf in leaves_of(slopes)]
            if any(leaf.asnumpy().any() for leaf in leaves):
                fix = "Leave it out of grad_position= and weights=; or weigh by what ops.stop_gradient gives, if fn divides by that too."
                raise moving_weight_error(fix)
        return given

    return checked


def moving(weight: Any, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Those of `parameters` that a callable `weight` names, itself or through a Cell, so that it may depend on them."""
    named: set[int] = set()
    for each in named_by(weight, DEPTH):
        named.update(map(id, each.get_parameters() if isinstance(each, nn.Cell) else [each]))
    return tuple(each for each in parameters if id(each) in named)


def _unknown_error(found: str) -> ArgumentValueError:
    fix = "Write weight= a callable of the micro-batch that returns its number of items or tokens."
    return explain(ArgumentValueError, "weight", expected="a way to weigh each micro-batch", found=found, fix=fix)
