"""The factor of a loss before it is differentiated: its weight times the loss scale."""

from __future__ import annotations

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Options, State, contribution, explain
from gradaccum_torch.grad_scaler import ScalerLink


def require_loss(loss: object) -> Tensor:
    """`loss` if it is a tensor.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not isinstance(loss, Tensor):
        raise explain(ArgumentTypeError, "loss", expected="a torch.Tensor", got=loss, fix="Write opt.backward(loss).")
    return loss


def require_graph(loss: Tensor) -> Tensor:
    """`loss` of weight 0 if it can be differentiated.

    Raises:
        UsageError: it cannot.
    """
    if not loss.requires_grad:
        fix = "Run the model on any batch on this worker too, and give its loss with weight=0."
        expected, found = "one of the model, because every backward pass is that of all workers", "one without a graph"
        raise explain(UsageError, "loss", expected=expected, found=found, fix=fix)
    return loss


def factor(weight: float, fields: State, options: Options) -> float:
    """The factor of a loss of that weight: contribution times loss scale."""
    product: float = contribution(weight, options) * fields.loss_scale
    return product


def scaled(loss: Tensor, weight: float, fields: State, options: Options, scaler: ScalerLink | None) -> Tensor:
    """`loss`, of any shape, times its `factor`; a `torch.amp.GradScaler` scales it on the device, where its scale is.

    Raises:
        UsageError: its dtype cannot hold the factor, however far the loss scale backs off.
    """
    own, rule = float(contribution(weight, options)), options.scale_rule
    if own == 1 and scaler is None and fields.loss_scale == 1:
        return loss
    _require_in_range(loss, own * (rule.init_scale if rule.backoff_factor == 1 else rule.min_scale))
    with torch.enable_grad():  # backward() works inside torch.no_grad(), and so must this.
        if scaler is not None:
            loss = scaler.scale(loss)
        else:
            own *= fields.loss_scale
        return loss if own == 1 else loss * own


def _require_in_range(loss: Tensor, factor: float) -> None:
    """A `loss` can be handed `factor` as its gradient: autograd casts that to the dtype of the loss, however it was multiplied.

    Raises:
        UsageError: `factor` is beyond that dtype, as only float16's range is so small, so that no gradient could be finite.
    """
    if loss.dtype is torch.float16 and factor > torch.finfo(torch.float16).max:
        raise explain(
            UsageError,
            "loss",
            expected=f"a dtype that holds weight x loss scale, which is at least {factor:g} here",
            found="a float16 loss, in which that is inf, so that every gradient would overflow",
            fix="Compute the loss in float32: loss_fn(output.float(), target).",
        )
