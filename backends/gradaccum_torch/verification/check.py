"""`gradaccum_torch.verify` checks that accumulation gives correct gradients for a given
loss.
"""

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
    """Check whether gradient accumulation gives the right gradient for a loss, and
    report the cause if it does not; see `gradaccum.verify`.

    The model runs in its current mode. Gradients come from `torch.autograd.grad`, so
    that ``.grad`` is not used and hooks on it do not run, whereas hooks on tensors and
    modules do. The model's parameters, buffers and attributes and the random states are
    restored.

    Each micro-batch begins with the same random state. A random number that is drawn
    once per micro-batch is therefore the same in all runs. A dropout mask is not,
    because it has a row for each item. Layers that draw random numbers per item
    therefore run in evaluation mode, and the report says so. A loss function that draws
    random numbers per item itself cannot be compared.

    Args:
        model: the model, whose trainable parameters are compared. If the loss has its
            own parameters, pass a module that contains both.
        loss_fn: ``loss_fn(model, *batch)``, which returns a scalar tensor. A criterion
            ``criterion(output, *targets)`` is also accepted, and is called with
            ``model(batch[0])`` and the rest of the batch. A function ``loss_fn(*batch)``
            that closes over its model is called with the batch.
        batch: a tuple or list of nests of tensors and NumPy arrays. Other values are
            not split. A dictionary is passed as one argument, or as arguments by name.
        steps: the number of micro-batches, from 2 to the number of items; by default 4,
            or the number of items if that is smaller.
        reduction: as in `gradaccum.wrap`.
        weight: either a callable ``weight(*micro_batch)``, or a sequence with one
            number per item. Default: the number of items.
        axes: the batch axis of each array in `batch`: one number for all arrays, or a
            nest of numbers, each of which may stand for a whole sub-nest. None means
            that an array is not split.
        has_aux: whether `loss_fn` returns ``(loss, aux)``; `aux` is ignored.

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
    """Return a copy of the given items of `array`, because a loss may write into its
    inputs. If `axis` is None, copy the whole array.
    """
    if isinstance(array, np.ndarray):
        return array.copy() if axis is None else array.take(list(items), axis)
    if axis is None:
        return array.detach().clone()
    places = torch.tensor(list(items), device=array.device)
    return array.detach().index_select(axis, places)
