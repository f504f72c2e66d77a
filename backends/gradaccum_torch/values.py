"""Whether the values in ``.grad`` are what autograd left there, by the norm of each gradient.

A version tells that something wrote, not what: ``clip_grad_norm_(parameters, inf)`` writes and changes nothing, ``p.grad.data.clamp_()``
changes and is not counted. A norm tells both, for a pass over the gradients and a wait for the device. A training loop does to every
window what it did to its first. So norms are kept in the first window, and after it only if a call was seen that writes what was there.
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
        """The norms to compare with, shape ``(number,)``; None: no comparison is to be made."""

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
        """Whether `gradients` have the values noted; waits for the device. An inf or NaN stays one, whatever it is multiplied by."""
        now, noted = _norms(gradients), self.noted
        if now is None or noted is None or now.shape != noted.shape:
            return False
        a, b = torch.stack([noted, now]).tolist()
        return bool(a == b) or not (math.isfinite(sum(a)) or math.isfinite(sum(b)))


@torch.no_grad()
def _norms(gradients: Iterable[Tensor]) -> Tensor | None:
    """A norm each, of what is in this process, shape ``(number,)``; None where there are none."""
    tensors = dense_parts([local(gradient) for gradient in gradients])
    if not tensors:
        return None
    # Inside the backward pass autocast is as it was in the forward pass, and would give the norm another dtype than outside.
    with torch.autocast(tensors[0].device.type, enabled=False):
        return side_by_side(foreach_norm(tensors))
