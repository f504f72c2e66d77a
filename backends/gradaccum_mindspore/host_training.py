"""The training cell where Python chooses the compiled programs: one for a micro-batch, `HostWindow`'s for the end of a window.

No program has a branch, and no micro-batch asks whether its window is full. There is one program for all micro-batches, the last of a
window too: two would compile the network twice, and each would draw the random numbers of its dropout from the start of the same sequence.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from gradaccum_mindspore.host_window import HostWindow, Program
from gradaccum_mindspore.pynative_window import require_room


class MicroBatch(Program):
    """Adds one micro-batch of the training cell; the window stays open."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, *inputs: object) -> Tensor:
        return self.cell.added(*inputs)

    def follow(self) -> None:
        """Train or not as the cell does. `set_train` would say so to the cells below too, some of which the user may have frozen."""
        self._phase = self.cell._phase
        self.add_flags(training=self.cell.training)


class HostTraining:
    """Calls the programs of one training cell.

    Args:
        cell: a `gradaccum_mindspore.TrainOneStepCell`.
        steps: the micro-batches of a window.
    """

    def __init__(self, cell: nn.Cell, steps: int) -> None:
        self.cell, self.steps = cell, steps
        self.storage, self.update = cell.optimizer.storage, cell.optimizer.update
        self.window = HostWindow(cell.optimizer.compiled_window, self.update)
        self.micro_batch = MicroBatch(cell)

    def __call__(self, *inputs: object) -> Any:
        """One micro-batch; returns what its program returns, the loss.

        Raises:
            UsageError: the window is full already, because its update raised or was interrupted.
        """
        ends = self.storage.micro_step.item() + 1 >= self.steps
        if ends:
            require_room(self.storage.pull(), self.steps)
        if self.micro_batch.training != self.cell.training:
            self.micro_batch.follow()
        loss = self.micro_batch(*inputs)
        if ends:
            self.window.close(self.storage.pull(), self.update)
        return loss
