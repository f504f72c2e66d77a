"""The weight of each micro-batch, in Python numbers, read from the device at most once per call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, ArgumentValueError, GradAccumError
from gradaccum.kit import Cut, explain, moving_weight_error, require_item_weights, require_weight

Weight: TypeAlias = Callable[..., Any] | Sequence[float] | Tensor | None
"""A callable of the micro-batch, one number per item, or None."""


class Weights:
    """Weighs micro-batches.

    Args:
        given: the user's ``weight=``. A tensor or array has shape ``(items,)`` and any real dtype.
        items: the number of items in the large batch; None where the user's own split decides.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is neither a callable nor one finite number >= 0 for each item.
    """

    def __init__(self, given: Weight, items: int | None) -> None:
        self._of_micro_batch = given if callable(given) else None
        self.per_item = None if given is None or callable(given) else _per_item(given, items)
        """Each item's, if they were given so."""

    def of(self, given: Sequence[tuple[Any, ...]], items: Sequence[int | None], cuts: Sequence[Cut] | None) -> list[float]:
        """The weight of each micro-batch, by the callable, by the sum over its items, or by its number of items.

        Raises:
            ArgumentTypeError, ArgumentValueError: the callable gives no finite number >= 0; or nothing was given, and the user's own
                split leaves the number of items open.
        """
        if self._of_micro_batch is not None:
            return _checked([self._of_micro_batch(*arguments) for arguments in given])
        if self.per_item is not None and cuts is not None:
            per_item = self.per_item
            return [math.fsum(per_item[cut.start : cut.stop]) for cut in cuts]
        return [float(_known(number)) for number in items]


def _per_item(given: Any, items: int | None) -> list[float]:
    if items is None:
        fix = "Write weight= a callable of the micro-batch: weight=lambda x, y: len(y)."
        raise explain(ArgumentTypeError, "weight", expected="a callable beside split=", found="one number per item", fix=fix)
    # A tensor comes from its device in one transfer.
    return require_item_weights(given.tolist() if isinstance(given, Tensor) and given.dim() == 1 else given, items)


def _checked(weights: list[Any]) -> list[float]:
    """`weights` as floats; those that are tensors come from the device together."""
    tensors = [place for place, value in enumerate(weights) if isinstance(value, Tensor)]
    for place in tensors:
        if weights[place].numel() != 1 or weights[place].is_complex():
            raise _no_number_error(weights[place])
        if weights[place].requires_grad:
            raise moving_weight_error("Return weight.detach(), if the loss function divides by a detached number too.")
    if tensors:
        read = torch.stack([weights[place].detach().double().reshape(()) for place in tensors]).tolist()
        for place, value in zip(tensors, read, strict=True):
            weights[place] = value
    return [require_weight(value) for value in weights]


def _no_number_error(given: Tensor) -> GradAccumError:
    fix = "Return one number per micro-batch: weight=lambda x, mask: mask.sum()."
    found = f"a tensor of shape {tuple(given.shape)} and {given.dtype}"
    return explain(ArgumentValueError, "weight", expected="a callable that returns a number", found=found, fix=fix)


def _known(number: int | None) -> int:
    if number is None:
        raise _unknown_items_error()
    return number


def _unknown_items_error() -> GradAccumError:
    fix = "Write weight= a callable of the micro-batch that returns its number of items or tokens."
    found = "a micro-batch of your own split whose leaves have several lengths"
    return explain(ArgumentValueError, "weight", expected="a weight that can be counted", found=found, fix=fix)
