"""The division of a window's sum inside the update itself, where the inner optimizer is one of torch's fused ones.

Their kernels divide each gradient by ``optimizer.grad_scale`` as they read it, which is how `torch.amp.GradScaler` unscales. A window's
divisor (loss scale, denominator and clipping in one) goes the same way, and a pass over the gradients is saved. The kernels divide in
float32 by a float32, bit for bit what dividing first would give. So float64 goes this way only where the divisor is a float32, and half
precision never.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradaccum_torch.hooks import all_step_pre_hooks, step_pre_hooks
from gradaccum_torch.masters import Group
from gradaccum_torch.tensors import DTYPE, operand
from gradaccum_torch.torch_private import DIVIDES_BY_GRAD_SCALE

_FLOAT32 = {torch.float32}
_REAL = (Tensor, torch.nn.Parameter)
"""A fake tensor takes no real one beside it."""
_WIDE = {torch.float32, torch.float64}


def can_divide(inner: torch.optim.Optimizer, divisor: float) -> bool:
    """Whether ``inner.step()`` itself can divide what is in ``.grad``, exactly, and before any Python code reads it."""
    if not getattr(inner, DIVIDES_BY_GRAD_SCALE, False):
        return False
    return _is_torchs(inner) and not _is_hooked(inner) and all(_takes(group, divisor) for group in inner.param_groups)


class Dividing:
    """Inside its ``with`` block every ``inner.step()`` divides by `divisor`; ``.grad`` holds the divided gradient after it."""

    def __init__(self, inner: torch.optim.Optimizer, divisor: float) -> None:
        self._inner, self._divisor = inner, divisor

    def __enter__(self) -> None:
        inner: Any = self._inner
        first = next((group["params"][0] for group in inner.param_groups if group["params"]), None)
        inner.grad_scale, inner.found_inf = _scale(self._divisor, first), None

    def __exit__(self, *_: object) -> None:
        inner: Any = self._inner
        del inner.grad_scale, inner.found_inf


def _scale(divisor: float, parameter: Tensor | None) -> Tensor:
    """`divisor` in float32, shape ``()``, where `parameter` is."""
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type == "cpu" and type(parameter) in _REAL:
        return operand(divisor, torch.float32)
    scale = torch.tensor(divisor, dtype=torch.float32, device="cpu")
    # Filled where it is used: a copy from the host would be one more wait for the device.
    return scale if device.type == "cpu" else torch.full((), scale.item(), dtype=torch.float32, device=device)


def _is_float32(divisor: float) -> bool:
    return torch.tensor(divisor, dtype=torch.float32, device="cpu").item() == divisor


def _is_torchs(inner: torch.optim.Optimizer) -> bool:
    """Whether ``inner.step`` is torch's own: a subclass's, or one that was patched onto it, may read the gradients in Python."""
    step: Any = None if "step" in vars(inner) else type(inner).step
    while step is not None and step.__globals__["__name__"].startswith("torch.optim."):
        # functools.wraps copies the name of the module too, but not the module's variables.
        if (step := getattr(step, "__wrapped__", None)) is None:
            return True
    return False


def _is_hooked(inner: torch.optim.Optimizer) -> bool:
    return bool(step_pre_hooks(inner) or all_step_pre_hooks)


def _takes(group: Group, divisor: float) -> bool:
    dtypes = set(map(DTYPE, group["params"]))
    return bool(group.get("fused")) and (dtypes <= _FLOAT32 or (dtypes <= _WIDE and _is_float32(divisor)))
