"""`gradaccum_mindspore.verify`: a check whether accumulation is right for a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from gradaccum import VerificationReport
from gradaccum.kit import Batch, Nest, as_loss, examine
from gradaccum_mindspore.verification.subject import MindSporeSubject


def verify(
    model: nn.Cell,
    loss_fn: Callable[..., Any],
    batch: Nest,
    steps: int | None = None,
    *,
    reduction: str = "mean",
    weight: Any = None,
    axes: Nest = 0,
    has_aux: bool = False,
) -> VerificationReport:
    """Check whether gradient accumulation is right for a loss, and if not, why: see
    `gradaccum.verify`.

    It runs in PyNative mode, in the mode of training that the model is in; functions
    under ``ms.jit`` run compiled. At the end the parameters, plain attributes of Cells,
    modes, random states and the context are restored. Not for two threads at once.

    MindSpore's random operators cannot be given numbers, so that an item draws another
    dropout mask in another micro-batch. Dropout Cells run in evaluation mode, and the
    report says so. A loss that draws such numbers itself cannot be compared.

    Args:
        model: the Cell; its trainable parameters are differentiated by.
        loss_fn: ``loss_fn(model, *batch)`` returns a floating Tensor of one element.
            The usual criterion, ``criterion(output, *targets)``, is called with
            ``model(batch[0])`` and the rest of the batch; a function that closes over
            its model, ``loss_fn(*batch)``, with the batch.
        batch: a tuple or list of nests of Tensors and NumPy arrays with the items along
            axis 0: a few real items, at least `steps`. A dictionary is one argument, or
            arguments by name; other values are passed in full.
        steps: micro-batches that the batch is divided into, at least 2; by default 4,
            or as many as there are items.
        reduction: how accumulation will add up: "mean", "sum" or "sum_per_item".
        weight: as accumulation will have it: a callable ``weight(*micro_batch)``, or an
            array with one number per item.
        axes: a prefix nest of `batch`: the axis of items of each array, or None for
            what is passed in full.
        has_aux: `loss_fn` returns ``(loss, aux)``; `aux` is ignored.

    Raises:
        ArgumentValueError: the loss is no scalar, arrays have unequal numbers of items,
            or `steps` or `weight` does not suit the batch.
    """
    parameters = {id(parameter) for parameter in model.trainable_params()}

    def is_model(value: object) -> bool:
        if not isinstance(value, nn.Cell):
            return False
        return any(id(each) in parameters for each in value.trainable_params())

    loss, arguments = as_loss(loss_fn, batch, is_model)
    item_batch = Batch(arguments, axes, is_array, take)
    if isinstance(weight, Tensor):
        weight = weight.asnumpy()
    weigh = item_batch.weight_of(weight)
    subject = MindSporeSubject(model, loss, item_batch, weigh, has_aux)
    # The report says which gradients are not finite.
    with np.errstate(all="ignore"):
        return examine(subject, steps, reduction)


def is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def take(array: Any, axis: int | None, items: Sequence[int]) -> Any:
    if axis is None:
        return array
    places = np.asarray(items, np.int32)
    if isinstance(array, Tensor):
        return ops.gather(array, Tensor(places), axis)
    return np.take(array, places, axis)
