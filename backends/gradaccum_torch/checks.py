"""Checks of what a user hands over: the optimizer, the accumulation dtype, the window's size, a loss."""

from __future__ import annotations

from typing import Any

import torch

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Options, accumulate_dtype_error, explain, require_steps, select, steps_at


def require_accumulate_dtype(dtype: Any) -> torch.dtype | None:
    """`accumulate_dtype` as a torch dtype; a name such as ``"float32"`` counts.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is no real floating-point dtype.
    """
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise accumulate_dtype_error(dtype)
    return found


def window_size(options: Options, optimizer_step: int) -> int | None:
    """How many micro-batches the window that follows update `optimizer_step` holds; None: the caller closes it.

    Raises:
        ArgumentTypeError, ArgumentValueError: a callable ``steps`` gave something else than an int >= 1.
    """
    if options.steps is None or isinstance(options.steps, int):
        return options.steps  # Checked by wrap.
    return require_steps(steps_at(options.steps, optimizer_step, select), optimizer_step)


def require_loss(loss: Any) -> torch.Tensor:
    """`loss` if it is a tensor.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not isinstance(loss, torch.Tensor):
        raise explain(ArgumentTypeError, "loss", expected="a torch.Tensor", got=loss, fix="Write opt.backward(loss).")
    return loss


def require_in_range(loss: torch.Tensor, factor: float) -> None:
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


def require_layouts(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`optimizer` if its trainable parameters are dense: torch adds no gradient to a compressed one.

    Raises:
        ArgumentTypeError: one is in a compressed sparse layout, such as CSR.
    """
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.requires_grad and parameter.layout in _COMPRESSED:
            expected, fix = "dense parameters", "Hold the values in a dense parameter, and build the sparse tensor in the forward pass."
            raise explain(ArgumentTypeError, "optimizer", expected=expected, found=f"a parameter in the layout {parameter.layout}", fix=fix)
    return optimizer


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
