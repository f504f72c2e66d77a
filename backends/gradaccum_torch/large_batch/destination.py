"""Where the gradients of a call go: into ``.grad``, or into the window of a wrapped optimizer; alike for both kinds of loss.

In a window the loss scale, the sums, the overflow policy, clipping and workers are the wrapper's. Leaves that are not its own, as those of
a critic that a generator's loss goes through, get the large batch's gradient beside the window, freed of scale and weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from gradaccum_torch.large_batch.checks import touched_error
from gradaccum_torch.large_batch.gradients import Gradients
from gradaccum_torch.optimizer import AccumulatingOptimizer


class Destination(Protocol):
    """Takes the gradients of one call."""

    def kept(self) -> AbstractContextManager[None]:
        """If the block raises, every gradient is what it was before."""

    def expect(self, leaves: Iterable[Tensor]) -> None:
        """Collect for `leaves`, parameters that are known before a graph is, in case they get a gradient."""

    def require_untouched(self) -> None:
        """The user's functions have left ``.grad`` alone."""

    def close(self) -> None:
        """All micro-batches were added: hand the gradients over."""

    def delivered(self) -> bool:
        """Whether `close` has handed them over, though an interrupt came meanwhile."""

    def flush(self) -> None:
        """Make the update, if there is one to be made."""


class InGrad:
    """``.grad``."""

    def __init__(self) -> None:
        self._gradients = Gradients()

    def kept(self) -> AbstractContextManager[None]:
        return self._gradients.kept()

    def expect(self, leaves: Iterable[Tensor]) -> None:
        self._gradients.expect(leaves)

    def require_untouched(self) -> None:
        self._gradients.require_untouched()

    def delivered(self) -> bool:
        return self._gradients.delivered

    def flush(self) -> None:
        return


class InWindow:
    """The next window of a wrapped optimizer, which the call closes.

    Args:
        optimizer: the wrapped optimizer, with ``steps=None``.
    """

    def __init__(self, optimizer: AccumulatingOptimizer) -> None:
        self._optimizer, self._window = optimizer, optimizer.whole_window()
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

    def delivered(self) -> bool:
        return False  # Before the window is flushed an error makes it forgotten.

    def flush(self) -> None:
        self._optimizer.flush()

    def _reach(self, *tensors: Tensor) -> None:
        """Collect the leaves that a backward pass through `tensors` reaches beside the window's own."""
        self._others.pass_by(self._window.unsharded())
        self._others.reach(*tensors)

    def _deliver(self, divisor: float) -> None:
        """Hand the gradients of other leaves over, divided by `divisor` and the loss scale."""
        self._others.deliver(divisor * self._window.scale() if self._others else 1.0)
