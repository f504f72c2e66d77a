"""The loss of a micro-batch as it is returned, and that of the large batch as the core weighs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import ArgumentValueError
from gradaccum.kit import (
    Fields,
    Nest,
    Options,
    accumulate,
    aux_shape_error,
    contribution,
    divisor,
    explain,
    initial_state,
    scalar_loss_error,
    select,
    usable,
)
from gradaccum_torch.large_batch.batch import MicroBatch
from gradaccum_torch.sums import HALF


class Shares(NamedTuple):
    """What each micro-batch counts for: the large batch's gradient is sum(contribution * gradient) / divisor."""

    contributions: list[float]
    """0 for a micro-batch of weight 0, which adds nothing."""
    divisor: float


def shares_of(weights: Sequence[float], options: Options) -> Shares:
    """The shares of micro-batches with these weights, by the reduction of `options`."""
    fields: Fields = initial_state()
    contributions = []
    for weight in weights:
        contributions.append(float(contribution(weight, options)) if usable(fields, weight, True) else 0.0)
        fields = accumulate(fields, weight, True, select)
    return Shares(contributions, float(divisor(fields, options, select)))


def evaluated(loss_fn: Callable[..., Any], micro_batch: MicroBatch, *, has_aux: bool) -> tuple[Tensor, Nest]:
    """The loss, a real scalar tensor of shape ``()``, and the aux of one micro-batch.

    Raises:
        ArgumentValueError: it is something else, or it has no graph although the micro-batch counts.
    """
    returned = loss_fn(*micro_batch.arguments)
    if has_aux != (isinstance(returned, tuple) and len(returned) == 2):
        shape = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise aux_shape_error(shape, declared=has_aux)
    loss, aux = returned if has_aux else (returned, None)
    if not isinstance(loss, Tensor):
        raise scalar_loss_error(f"a {type(loss).__name__}")
    if loss.dim() or not loss.is_floating_point():
        raise scalar_loss_error(f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}")
    if micro_batch.weight and not loss.requires_grad:
        fix = "Compute it from parameters that require gradients, outside of torch.no_grad(); give weight 0 to what is to add nothing."
        raise explain(ArgumentValueError, "loss_fn", expected="a loss that can be differentiated", found="one without a graph", fix=fix)
    return loss, aux


def large_batch_loss(losses: Sequence[Tensor], shares: Shares) -> Tensor:
    """The large batch's loss from the `losses` of its micro-batches, in their dtype, summed in float32 at least; 0 where none counts."""
    dtype = losses[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    counted = [(loss.to(wide), factor / shares.divisor) for loss, factor in zip(losses, shares.contributions, strict=True) if factor]
    if not counted:
        return torch.zeros_like(losses[0])
    values, factors = zip(*counted, strict=True)
    same = len(set(factors)) == 1
    by = factors[0] if same else torch.tensor(factors, dtype=wide, device=losses[0].device)
    total: Tensor = torch.stack(values).sum() * by if same else (torch.stack(values) * by).sum()
    return total.to(dtype)
