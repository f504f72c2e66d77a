"""Whether the values in ``.grad`` are what autograd left there, by two norms of each gradient.

A version tells that something wrote, not what: ``clip_grad_norm_(parameters, inf)`` writes and changes nothing, ``p.grad.data.clamp_()``
changes and is not counted. Norms tell both, for two passes over the gradients and a wait for the device. A training loop does to every
window what it did to its first. So norms are kept in the first window, and after it only if a call was seen that writes what was there.
The squares of small elements vanish and those of large ones overflow, and so the largest magnitude is kept beside the 2-norm. Neither sees
a change of signs or places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gradaccum_torch.tensors import dense_parts, side_by_side
from gradaccum_torch.torch_private import foreach_norm, local


class Values:
    """The norms of the gradients as autograd left them."""

    def __init__(self) -> None:
        self._rewritten = False
        self.wanted = True
        """Norms are to be noted at the end of each backward pass."""
        self.noted: Tensor | None = None
        """The norms to compare with, shape ``(2, number)``; None: no comparison is to be made."""

    def note(self, gradients: Iterable[Tensor]) -> None:
        """Take the values of `gradients` for what autograd left there."""
        self.noted = _norms(gradients)

    def forget(self) -> None:
        """The notes are out of date: ``.grad`` should hold something else now."""
        self.noted = None

    def window_ended(self) -> None:
        """The first window is over."""
        self.wanted, self.noted = self._rewritten, None

    def rewritten(self) -> None:
        """A call wrote the values that were there: go on comparing."""
        self._rewritten = self.wanted = True

    def same(self, gradients: Iterable[Tensor]) -> bool:
        """Whether `gradients` have the values noted; waits for the device.

        A clip multiplies all by what an inf or NaN in one of them makes of its factor. So where one is, nothing is compared.
        """
        now, noted = _norms(gradients), self.noted
        if now is None or noted is None or now.shape != noted.shape:
            return False
        before, after = noted.tolist(), now.tolist()
        return bool(before == after) or not all(map(math.isfinite, (*before[1], *after[1])))


@torch.no_grad()
def _norms(gradients: Iterable[Tensor]) -> Tensor | None:
    """The 2-norm of each and its largest magnitude, of what is in this process, shape ``(2, number)``; None where there are none."""
    parts = dense_parts([local(gradient) for gradient in gradients])
    if not parts:
        return None
    tensors = [part for part in parts if part.numel()] or [torch.zeros(1)]
    # Inside the backward pass autocast is as it was in the forward pass, and would give the norm another dtype than outside.
    with torch.autocast(tensors[0].device.type, enabled=False):
        return torch.stack([side_by_side(foreach_norm(tensors)), side_by_side(foreach_norm(tensors, math.inf))])
