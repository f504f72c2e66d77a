"""Checks of a user's arguments: the optimizer, the accumulation dtype, the window's size."""

from __future__ import annotations

import torch

from gradaccum import ArgumentTypeError
from gradaccum.kit import Options, UntilWeight, accumulate_dtype_error, explain, require_steps, select, steps_at


def require_accumulate_dtype(dtype: object) -> torch.dtype | None:
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


Size = int | UntilWeight | None
"""How long a window is: its micro-batches, or its weight; None: the caller closes it."""


def window_size(options: Options, optimizer_step: int) -> Size:
    """How long the window is that follows update `optimizer_step`.

    Raises:
        ArgumentTypeError, ArgumentValueError: a callable ``steps`` gave something else than an int >= 1.
    """
    if options.steps is None or isinstance(options.steps, int):
        return options.steps  # Checked by wrap.
    return require_steps(steps_at(options.steps, optimizer_step, select), optimizer_step, options.steps)


def known_window_size(options: Options, optimizer_step: int) -> Size:
    """`window_size` of a window that has not begun; None if the schedule raises, which it will do again in the window's first ``step``."""
    try:
        return window_size(options, optimizer_step)
    except Exception:
        return None


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


def require_update_in_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer` makes its update in ``step``, from what is in ``.grad``.

    LOMO and AdaLOMO, known by ``fused_backward``, make it in hooks of the backward pass. Opacus' optimizer makes it from gradients by
    sample, which it keeps itself.

    Raises:
        ArgumentTypeError: it is one of these.
    """
    name, own = type(optimizer).__name__, "Use it alone: "
    if callable(getattr(optimizer, "fused_backward", None)):
        found = f"{name}, which makes it within each backward pass and keeps no gradient to add up"
        raise explain(ArgumentTypeError, "optimizer", expected=_IN_STEP, found=found, fix=f"{own}it does not accumulate.")
    if any(kind.__module__.partition(".")[0] == "opacus" for kind in type(optimizer).__mro__):
        found = f"{name} of Opacus, which makes it from gradients by sample"
        fix = f"{own}opacus.utils.batch_memory_manager.BatchMemoryManager adds up clipped gradients, and adds noise once per batch."
        raise explain(ArgumentTypeError, "optimizer", expected=_IN_STEP, found=found, fix=fix)


_IN_STEP = "an optimizer that makes its update in step() from what is in .grad"
