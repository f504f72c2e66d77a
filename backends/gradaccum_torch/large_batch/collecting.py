"""Where the gradients of a call go: into ``.grad``, or into the window of a wrapped optimizer.

In a window the loss scale, the sums, the overflow policy, clipping and workers are the wrapper's. Leaves that are not its own, as those of
a critic that a generator's loss goes through, get the large batch's gradient beside the window, freed of scale and weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gradaccum_torch.large_batch.checks import touched_error
from gradaccum_torch.large_batch.gradients import Gradients
from gradaccum_torch.large_batch.loss import Shares
from gradaccum_torch.optimizer import AccumulatingOptimizer


class Collector(Protocol):
    """Takes the losses of the micro-batches, one after the other."""

    def kept(self) -> AbstractContextManager[None]:
        """If the block raises, every gradient is what it was before."""

    def expect(self, leaves: Iterable[Tensor]) -> None:
        """Collect for `leaves`, parameters that are known before a graph is, in case they get a gradient."""

    def require_untouched(self) -> None:
        """The loss function has left ``.grad`` alone."""

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        """Differentiate the loss of a micro-batch, shape ``()``."""

    def close(self) -> None:
        """All micro-batches were added: hand the gradients over."""

    def delivered(self) -> bool:
        """Whether `close` has handed them over, though an interrupt came meanwhile."""

    def flush(self) -> None:
        """Make the update, if there is one to be made."""


class InGrad:
    """Collects in ``.grad``.

    Args:
        shares: what each micro-batch counts for.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares, self._gradients = shares, Gradients()
        self._unit: float | None = None
        """The divisor that the incoming gradients have already; what is left of it divides the sum at the end."""
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        with self._gradients.kept():
            yield

    def expect(self, leaves: Iterable[Tensor]) -> None:
        self._gradients.expect(leaves)

    def require_untouched(self) -> None:
        self._gradients.require_untouched()

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        if contribution:
            self._gradients.reach(loss)
            if self._unit is None:
                self._unit = self._unit_for(loss)
            self._gradients.backward([loss], [self._seed(contribution / self._unit, loss)])

    def close(self) -> None:
        self._gradients.deliver(1.0 if self._unit is None else self._shares.divisor / self._unit)

    def delivered(self) -> bool:
        return self._gradients.delivered

    def flush(self) -> None:
        return

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


class InWindow:
    """Collects in the next window of a wrapped optimizer, and closes it.

    Args:
        optimizer: the wrapped optimizer, with ``steps=None``.
        shares: what each micro-batch counts for.
    """

    def __init__(self, optimizer: AccumulatingOptimizer, shares: Shares) -> None:
        self._optimizer, self._shares = optimizer, shares
        self._window = optimizer.whole_window()
        self._others = Gradients(others=self._window.parameters)

    @contextmanager
    def kept(self) -> Iterator[None]:
        with self._others.kept(), self._window:
            yield

    def expect(self, leaves: Iterable[Tensor]) -> None:
        self._others.expect(leaves)

    def require_untouched(self) -> None:
        self._others.require_untouched()
        if self._window.arrived:
            raise touched_error()

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        if contribution:
            self._others.pass_by(self._window.parameters)  # FSDP2 makes whole ones in the forward pass.
            self._others.reach(loss)
        self._optimizer.backward(loss, weight=weight)
        self._others.note()
        self._optimizer.step()

    def close(self) -> None:
        self._others.deliver(self._shares.divisor * self._window.scale() if self._others else 1.0)

    def delivered(self) -> bool:
        return False  # Before the window is flushed an error makes it forgotten.

    def flush(self) -> None:
        self._optimizer.flush()
