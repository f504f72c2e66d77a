"""Where the gradients of a coupled loss go: into ``.grad``, or into the window of a wrapped optimizer.

In a window the loss is micro-batch 0, of weight 1, and scaled by the loss scale. The others bring the gradient of their outputs, which has
the scale already, and have weight 0. So the window divides by 1 and the scale, whatever its reduction, and half-precision gradients move
into their sums after each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gradaccum_torch.large_batch.checks import touched_error
from gradaccum_torch.large_batch.gradients import Gradients
from gradaccum_torch.optimizer import AccumulatingOptimizer


class Coupler(Protocol):
    """Takes the loss of all outputs, then the outputs of each micro-batch."""

    def kept(self) -> AbstractContextManager[None]:
        """If the block raises, every gradient is what it was before."""

    def expect(self, leaves: Iterable[Tensor]) -> None:
        """Collect for `leaves`, parameters that are known before a graph is, in case they get a gradient."""

    def require_untouched(self) -> None:
        """The user's functions have left ``.grad`` alone."""

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        """Leave the gradient of `loss` in ``.grad`` of `outputs`, scaled if there is a scale, and collect that of other leaves."""

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Collect what the `gradients` of a micro-batch's `outputs` make of the parameters'."""

    def close(self) -> None:
        """All micro-batches were added: hand the gradients over."""

    def delivered(self) -> bool:
        """Whether `close` has handed them over, though an interrupt came meanwhile."""

    def flush(self) -> None:
        """Make the update, if there is one to be made."""


class CoupledInGrad:
    """Collects in ``.grad``."""

    def __init__(self) -> None:
        self._gradients = Gradients()

    @contextmanager
    def kept(self) -> Iterator[None]:
        with self._gradients.kept():
            yield

    def expect(self, leaves: Iterable[Tensor]) -> None:
        self._gradients.expect(leaves)

    def require_untouched(self) -> None:
        self._gradients.require_untouched()

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        self._gradients.leave(outputs)
        self.add([loss], [torch.ones_like(loss)])

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if outputs:
            self._gradients.reach(*outputs)
            self._gradients.backward(outputs, gradients)

    def close(self) -> None:
        self._gradients.deliver(1.0)

    def delivered(self) -> bool:
        return self._gradients.delivered

    def flush(self) -> None:
        return


class CoupledInWindow:
    """Collects in the next window of a wrapped optimizer, and closes it.

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

    def differentiate(self, loss: Tensor, outputs: Sequence[Tensor]) -> None:
        self._others.leave(outputs)
        self._collect([self._optimizer.scale(loss)], None)

    def add(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if outputs:
            self._window.begin_weightless(outputs[0])
            self._collect(outputs, gradients)

    def close(self) -> None:
        self._others.deliver(self._window.scale() if self._others else 1.0)

    def delivered(self) -> bool:
        return False  # Before the window is flushed an error makes it forgotten.

    def flush(self) -> None:
        self._optimizer.flush()

    def _collect(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        self._others.pass_by(self._window.parameters)  # FSDP2 makes whole ones in the forward pass.
        self._others.reach(*tensors)
        torch.autograd.backward(tensors, gradients)
        self._others.note()
        self._optimizer.step()
