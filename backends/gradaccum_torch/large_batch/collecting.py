"""The losses of the micro-batches, one after the other, on their way to a `Destination`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gradaccum_torch.large_batch.destination import Destination, InGrad, InWindow
from gradaccum_torch.large_batch.loss import Shares
from gradaccum_torch.optimizer import AccumulatingOptimizer


class Collector(Destination, Protocol):
    """Takes the loss of each micro-batch."""

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        """Differentiate the loss of a micro-batch, shape ``()``."""


class LossesInGrad(InGrad):
    """Collects in ``.grad``.

    Args:
        shares: what each micro-batch counts for.
    """

    def __init__(self, shares: Shares) -> None:
        super().__init__()
        self._shares = shares
        self._unit: float | None = None
        """The divisor that the incoming gradients have already; what is left of it divides the sum at the end."""
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        if contribution:
            self._gradients.reach(loss)
            if self._unit is None:
                self._unit = self._unit_for(loss)
            self._gradients.backward([loss], [self._seed(contribution / self._unit, loss)])

    def close(self) -> None:
        self._gradients.deliver(1.0 if self._unit is None else self._shares.divisor / self._unit)

    def _unit_for(self, loss: Tensor) -> float:
        """The whole divisor, so that no pass over the sums is needed.

        Half precision is divided as the wide sums are cast, and until then small gradients do not underflow: there the largest micro-batch
        begins with 1.
        """
        if self._gradients.are_half() or loss.dtype in (torch.float16, torch.bfloat16):
            return max(self._shares.contributions)
        return self._shares.divisor

    def _seed(self, factor: float, loss: Tensor) -> Tensor:
        key = factor, loss.dtype, loss.device
        if key not in self._seeds:
            self._seeds[key] = torch.full_like(loss, factor, requires_grad=False)
        return self._seeds[key]


class LossesInWindow(InWindow):
    """Collects in the next window of a wrapped optimizer, and closes it.

    Args:
        optimizer: the wrapped optimizer, with ``steps=None``.
        shares: what each micro-batch counts for.
    """

    def __init__(self, optimizer: AccumulatingOptimizer, shares: Shares) -> None:
        super().__init__(optimizer)
        self._shares = shares

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        if contribution:
            self._reach(loss)
        self._optimizer.backward(loss, weight=weight)
        self._others.note()
        self._optimizer.step()

    def close(self) -> None:
        self._deliver(self._shares.divisor)
