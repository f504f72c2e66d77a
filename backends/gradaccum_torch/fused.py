"""The division of a window's sum inside the update itself, where the inner optimizer is one of torch's fused ones.

Their kernels divide each gradient by ``optimizer.grad_scale`` as they read it, which is how `torch.amp.GradScaler` unscales. A window's
divisor (loss scale, denominator and clipping in one) goes the same way, and a pass over the gradients is saved. The kernels divide in
float32 by a float32, bit for bit what dividing first would give; so other dtypes are left to that, unless the divisor has no rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks


def can_divide(inner: torch.optim.Optimizer, divisor: float) -> bool:
    """Whether ``inner.step()`` itself can divide what is in ``.grad``, exactly and unseen by anyone who looks before it."""
    # A subclass with a step of its own may read the gradients in Python; a hook may too.
    known = type(inner).step.__module__.startswith("torch.optim.") and getattr(inner, "_step_supports_amp_scaling", False)
    return known and not _hooked(inner) and all(_takes(group, divisor) for group in inner.param_groups)


@contextmanager
def dividing(inner: torch.optim.Optimizer, divisor: float) -> Iterator[None]:
    """Let every ``inner.step()`` in this context divide by `divisor`; ``.grad`` holds the divided gradient after it."""
    device = next((parameter.device for group in inner.param_groups for parameter in group["params"]), torch.device("cpu"))
    rounded = torch.tensor(divisor, dtype=torch.float32).item()
    # Filled where it is used: a copy from the host would be one more wait for the device.
    inner.grad_scale, inner.found_inf = torch.full((), rounded, dtype=torch.float32, device=device), None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del inner.grad_scale, inner.found_inf  # type: ignore[attr-defined]


def _hooked(inner: torch.optim.Optimizer) -> bool:
    return bool(inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def _takes(group: dict[str, object], divisor: float) -> bool:
    params = group["params"]
    assert isinstance(params, list)
    return bool(group.get("fused")) and all(_divides_exactly(parameter, divisor) for parameter in params)


def _divides_exactly(parameter: Tensor, divisor: float) -> bool:
    dtype = parameter.dtype
    return dtype is torch.float32 or (dtype is torch.float64 and torch.tensor(divisor, dtype=torch.float32).item() == divisor)
