"""`gradaccum_mindspore.verify`: whether accumulation is right for a loss in MindSpore,
and if not, why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from gradaccum import ArgumentTypeError, VerificationReport
from gradaccum.kit import (
    Nest,
    as_loss,
    examine,
    explain,
    first_of,
    require_bool,
    require_weight,
)
from gradaccum_mindspore.checks import item_weights
from gradaccum_mindspore.verification.batch import Batch, wide
from gradaccum_mindspore.verification.subject import MindSporeSubject, Weight


def verify(
    model: nn.Cell,
    loss_fn: Callable[..., Any],
    batch: Nest,
    steps: int | None = None,
    *,
    reduction: str = "mean",
    weight: object = None,
    axes: Nest = 0,
    has_aux: bool = False,
) -> VerificationReport:
    """Tell whether gradient accumulation is right for a loss, and if not, why: see
    `gradaccum.verify`.

    It runs in PyNative mode, in the mode of training that the model is in; functions
    under ``ms.jit`` run compiled. `mindspore.nn.Dropout` gives each item the same
    numbers in every micro-batch. At the end everything is restored. Not for two threads
    at once.

    Args:
        model: the Cell; its trainable parameters are differentiated by.
        loss_fn: ``loss_fn(model, *batch)`` returns a floating Tensor of one element.
            The usual criterion, ``criterion(output, *targets)``, is called with
            ``model(batch[0])`` and the rest of the batch; a function that closes over
            its model, ``loss_fn(*batch)``, with the batch.
        batch: a tuple of nests of Tensors and NumPy arrays with the items along axis 0,
            the loss's arguments after the model: a few real items, at least `steps`.
            One nest alone is the only argument, or a dictionary of arguments by name; a
            plain value is given whole.
        steps: micro-batches that the batch is divided into, at least 2; by default 4,
            or as many as there are items.
        reduction: how accumulation will add up: "mean", "sum" or "sum_per_item".
        weight: as accumulation will have it: a callable ``weight(*micro_batch)``, or an
            array with one number per item.
        axes: a prefix nest of `batch`: the axis of items of each leaf, or None for what
            is given whole.
        has_aux: `loss_fn` returns ``(loss, aux)``; `aux` is ignored.

    Raises:
        ArgumentTypeError: `model` is no Cell with trainable parameters, or another
            argument has the wrong type.
        ArgumentValueError: the loss is no scalar, leaves have unequal numbers of items,
            or an argument has a value that makes no sense.
    """
    if not isinstance(model, nn.Cell) or not model.trainable_params():
        found = f"an object of type {type(model).__name__}"
        fix = "Write verify(net, loss_fn, batch)."
        raise explain(
            ArgumentTypeError,
            "model",
            expected="a mindspore.nn.Cell with trainable parameters",
            found=found,
            fix=fix,
        )
    own = {id(parameter) for parameter in model.trainable_params()}
    arguments = batch if isinstance(batch, tuple) else (batch,)
    loss, arguments = as_loss(
        loss_fn,
        model,
        arguments,
        lambda value: (
            isinstance(value, nn.Cell)
            and any(id(each) in own for each in value.trainable_params())
        ),
    )
    require_bool("has_aux", has_aux)
    if has_aux:
        loss = first_of(loss)
    divided = Batch(arguments, axes)
    # Gradients that are not finite are told in the report.
    with np.errstate(all="ignore"):
        return examine(
            MindSporeSubject(model, loss, divided, _make_weight(weight, divided)),
            steps,
            reduction,
        )


def _make_weight(weight: Any, batch: Batch) -> Weight | None:
    if weight is None:
        return None
    if callable(weight) and not isinstance(weight, Tensor):
        return lambda part: _number(weight(*batch.part(part)))
    each = item_weights(weight, batch.items)
    return lambda part: math.fsum(each[item] for item in part)


def _number(weight: Any) -> float:
    plain = weight if isinstance(weight, int | float) else wide(weight)
    return require_weight(
        plain.item() if isinstance(plain, np.ndarray) and plain.ndim == 0 else plain
    )
