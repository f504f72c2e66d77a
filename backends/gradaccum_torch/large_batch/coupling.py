"""A coupled loss, and then the outputs of the micro-batches, on their way to a `Destination`.

In a window the loss is micro-batch 0, of weight 1, and scaled by the loss scale. The others bring the gradient of their outputs, which has
the scale already, and have weight 0. So the window divides by 1 and the scale, whatever its reduction, and half-precision gradients move
into their sums after each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradaccum_torch.large_batch.destination import Destination, InGrad, InWindow


class Coupler(Destination, Protocol):
    """Takes the loss of all outputs, then the outputs of each micro-batch."""

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        """Leave the gradient of `loss` in ``.grad`` of `outputs`, scaled if there is a scale, and collect that of other leaves."""

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Collect what the `gradients` of a micro-batch's `outputs` make of the parameters'."""


class CoupledInGrad(InGrad):
    """Collects in ``.grad``."""

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        self._gradients.leave(outputs)
        self.add([loss], [torch.ones_like(loss)])

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if outputs:
            self._gradients.reach(*outputs)
            self._gradients.backward(outputs, gradients)

    def close(self) -> None:
        self._gradients.deliver(1.0)


class CoupledInWindow(InWindow):
    """Collects in the next window of a wrapped optimizer, and closes it."""

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        self._others.leave(outputs)
        self._collect([self._optimizer.scale(loss)], None)

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if outputs:
            self._window.begin_weightless()
            self._collect(outputs, gradients)

    def close(self) -> None:
        self._deliver(1.0)

    def _collect(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        self._reach(*tensors)
        torch.autograd.backward(tensors, gradients)
        self._others.note()
        self._optimizer.step()
