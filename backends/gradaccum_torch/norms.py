"""2-norms of many tensors in few calls, and what the tensors held when those were taken.

On a CPU one more call takes as long as the norm of a thousand numbers, so small tensors are copied side by side and have one norm
together. An accelerator has a kernel for many tensors, which is left to do it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

SMALL = 4096
"""Elements up to which a CPU copies a tensor in less time than one more call takes."""
FEW = 4
"""Up to so many small tensors the copy is one call too many."""


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are on a CPU and have one dtype, float32 or float64, so that calls can be saved and no rounding is another."""
    dtype = tensors[0].dtype if tensors else None
    return dtype in (torch.float32, torch.float64) and all(tensor.dtype is dtype and tensor.is_cpu for tensor in tensors)


class Norms:
    """The norms of `tensors`, dense ones of any shapes, dtypes and devices: of each large one, and of many small ones together."""

    def __init__(self, tensors: list[Tensor]) -> None:
        small = [tensor for tensor in tensors if tensor.numel() <= SMALL]
        self._small = small if len(small) > FEW and are_alike(tensors) else []
        self._large = [tensor for tensor in tensors if tensor.numel() > SMALL] if self._small else tensors
        self._copy = _flatten_dense_tensors(self._small) if self._small else None  # type: ignore[no-untyped-call]
        self.each = self._of_the_large()
        """Tensors of shape ``()``, on the devices of what they measure."""
        if self._copy is not None:
            self.each.append(torch.linalg.vector_norm(self._copy))

    def undo(self, divisor: float) -> None:
        """Give the tensors back what they held, where somebody has divided them by `divisor` since: the large ones up to rounding."""
        for tensor, before, now in zip(self._large, self.each, self._of_the_large(), strict=False):
            if now != before:
                tensor.mul_(divisor)
        if self._copy is not None:
            held = _unflatten_dense_tensors(self._copy, self._small)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(self._small, list(held))

    def _of_the_large(self) -> list[Tensor]:
        return list(torch._foreach_norm(self._large)) if self._large else []
