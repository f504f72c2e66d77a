"""`gradaccum_mindspore.verify`: check that accumulation gives correct results for a
given loss.
"""

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
    """Check whether gradient accumulation gives correct results for a loss, and if not,
    why. See `gradaccum.verify`.

    The check runs in PyNative mode, and the model keeps its current mode (training or
    evaluation). Functions that are decorated with ``ms.jit`` still run compiled. At the
    end the parameters, plain attributes of Cells, modes, random states and the context
    are restored. Do not run it in two threads at once.

    MindSpore's random operators accept no random numbers from outside, so the same item
    would get different dropout masks in different micro-batches. Therefore Dropout
    Cells run in evaluation mode, and the report says so. A loss that draws random
    numbers itself cannot be compared.

    Args:
        model: the Cell. The loss is differentiated with respect to its trainable
            parameters.
        loss_fn: ``loss_fn(model, *batch)`` returns a floating-point Tensor with one
            element. An ordinary criterion, ``criterion(output, *targets)``, is called
            with ``model(batch[0])`` and the rest of the batch. A function that closes
            over its model, ``loss_fn(*batch)``, is called with the batch.
        batch: a tuple or list of nests of Tensors and NumPy arrays with the items along
            axis 0. A few real items are enough, but there must be at least `steps`
            items. A dictionary is passed as one argument or as keyword arguments.
            Values that are not arrays are passed whole.
        steps: the number of micro-batches that the batch is divided into, at least 2;
            by default 4, or the number of items if that is smaller.
        reduction: how the micro-batches will be added up: "mean", "sum" or
            "sum_per_item".
        weight: the weights that training will use: a callable ``weight(*micro_batch)``,
            or an array with one number per item.
        axes: the axis along which each array contains its items: an int for all arrays,
            or a prefix nest of `batch`. None means that a value is passed whole.
        has_aux: True if `loss_fn` returns ``(loss, aux)``; `aux` is ignored.

    Raises:
        ArgumentValueError: the loss is not a scalar, arrays have unequal numbers of
            items, or `steps` or `weight` does not fit the batch.
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
    # NumPy need not warn, because the report says which gradients are not finite.
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
