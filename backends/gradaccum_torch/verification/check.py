"""`gradaccum_torch.verify`: checks whether accumulation is right for a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradaccum import VerificationReport
from gradaccum.kit import Batch, Nest, as_loss, examine
from gradaccum_torch.extensions import DIVIDED_LOSS, is_divided_by
from gradaccum_torch.verification.subject import TorchSubject


def verify(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    steps: int | None = None,
    *,
    reduction: str = "mean",
    weight: Any = None,
    axes: Nest = 0,
    has_aux: bool = False,
) -> VerificationReport:
    """Check whether gradient accumulation is right for a loss, and if not, say why; see
    `gradaccum.verify`.

    The model runs in its current mode. Gradients come from `torch.autograd.grad`,
    without ``.grad`` and its hooks; hooks on tensors and modules run. The model's
    parameters, buffers and attributes and the random states are restored.

    Each micro-batch begins with the same random state. This keeps a number fixed that
    is drawn once per micro-batch, but not a dropout mask, which has a row for each
    item. Layers that draw such numbers therefore run in evaluation mode, and the report
    says so. This needs no replay of random numbers, and the loss is compared without
    its noise. A loss function that draws such numbers itself cannot be compared.

    Args:
        model: the model, whose trainable parameters are compared. If the loss has its
            own parameters, pass a module that contains both.
        loss_fn: ``loss_fn(model, *batch)``, which returns a scalar tensor. The usual
            criterion, ``criterion(output, *targets)``, is called with
            ``model(batch[0])`` and the rest of the batch. A function that closes over
            its model, ``loss_fn(*batch)``, is called with the batch.
        batch: a tuple or list of nests of tensors and NumPy arrays; other values are
            passed whole. A dictionary is one argument, or arguments by name.
        steps: the number of micro-batches, from 2 to the number of items; by default 4,
            or the number of items if that is smaller.
        reduction: as in `gradaccum.wrap`.
        weight: a callable ``weight(*micro_batch)`` or one number per item. Default: the
            number of items.
        axes: a prefix nest of `batch` with the batch axis of each array; None means
            that the array is passed whole.
        has_aux: `loss_fn` returns ``(loss, aux)``; `aux` is ignored.

    Raises:
        ArgumentValueError: arrays have unequal numbers of items, or `steps` or `weight`
            does not fit the batch.
        UsageError: the loss goes through a reentrant checkpoint, which hides its
            parameters from `torch.autograd.grad`.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    parameters = set(model.parameters())

    def is_model(value: object) -> bool:
        if not isinstance(value, nn.Module):
            return False
        return not parameters.isdisjoint(value.parameters())

    loss, arguments = as_loss(loss_fn, batch, is_model)
    item_batch = Batch(arguments, axes, is_array, take)
    subject = TorchSubject(
        model, loss, item_batch, item_batch.weight_of(weight), has_aux
    )
    report = examine(subject, steps, reduction)
    if steps is not None and is_divided_by(subject.division, steps, reduction):
        note = DIVIDED_LOSS.format(steps=steps).removeprefix("gradaccum: ")
        return replace(report, notes=(*report.notes, note))
    return report


def is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def take(array: Any, axis: int | None, items: Sequence[int]) -> Any:
    """Return copies of the items, because a loss may write into its inputs."""
    if isinstance(array, np.ndarray):
        return array.copy() if axis is None else array.take(list(items), axis)
    if axis is None:
        return array.detach().clone()
    places = torch.tensor(list(items), device=array.device)
    return array.detach().index_select(axis, places)
