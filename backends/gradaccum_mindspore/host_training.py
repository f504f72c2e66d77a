"""A training cell's micro-batch where Python chooses the compiled programs: the window goes on, or it ends.

Two programs make a window: the micro-batch, which adds, and the end, which updates. Where nothing is measured and the weight is known
before, the last micro-batch and the end are one. No program has a branch, and no micro-batch asks whether its window is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from gradaccum.kit import Decision, State, accumulate, at_rest, decide, measures, select
from gradaccum_mindspore.host_window import Ending, HostWindow, Program, number
from gradaccum_mindspore.plain_ends import LARGEST_WEIGHT, SMALLEST_WEIGHT
from gradaccum_mindspore.pynative_window import require_room


class MicroBatch(Program):
    """Adds one micro-batch of the training cell; the window stays open."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, *inputs: object) -> Tensor:
        return self.cell.added(*inputs)


class LastMicroBatch(Ending):
    """Adds the last micro-batch of a window that is applied whatever it holds, and ends the window."""

    def __init__(self, cell: nn.Cell, multiplies: bool) -> None:
        super().__init__(cell.optimizer.compiled_window, cell.optimizer.update, multiplies)
        self.cell = cell

    def construct(self, divisor: Tensor, loss_divisor: Tensor, *inputs: object) -> Tensor:
        window, known = self.window, self.window.storage.knowledge
        loss, gradients, weight = self.cell.differentiated(*inputs)
        value = window.unknown
        if loss.size == 1:
            value = known.compiled_last(known.compiled_part(window.loss_number(loss), window.amount(weight)), loss_divisor)
        window.add(window.ordered(gradients), weight, None)
        self.end(divisor)
        known.compiled_write(value, None)
        return ops.depend(loss, window.write_event(window.plain_event))


class HostTraining:
    """Calls the programs of one training cell.

    Args:
        cell: a `gradaccum_mindspore.TrainOneStepCell`.
        steps: the micro-batches of a window.
        weigh: the weight of a micro-batch, if it is known before the micro-batch is run; else None.
    """

    def __init__(self, cell: nn.Cell, steps: int, weigh: Callable[..., float | None]) -> None:
        self.cell, self.steps, self.weigh = cell, steps, weigh
        self.storage, self.update = cell.optimizer.storage, cell.optimizer.update
        self.options = self.storage.options
        self.window = HostWindow(cell.optimizer.compiled_window, self.update)
        self.must_look = measures(self.options) or self.window.scale_moves
        self.micro_batch = MicroBatch(cell)
        self.last = {multiplies: LastMicroBatch(cell, multiplies) for multiplies in (False, True)}

    def __call__(self, *inputs: object) -> Any:
        """One micro-batch; returns what its program returns, the loss.

        Raises:
            UsageError: the window is full already, because its update raised or was interrupted.
        """
        if self.storage.micro_step.item() + 1 < self.steps:
            return self.run(self.micro_batch, *inputs)
        state = self.storage.pull()
        require_room(state, self.steps)
        after = self.foreseen(state, *inputs)
        if after is not None:
            decision = Decision(*decide(after, math.nan, True, self.options, select, self.storage.largest))
            if decision.apply:
                return self.run_last(state, after, decision.divisor, *inputs)
        loss = self.run(self.micro_batch, *inputs)
        self.window.close(self.storage.pull(), self.update)
        return loss

    def foreseen(self, state: State, *inputs: object) -> State | None:
        """The state after a micro-batch of which nothing has to be known but its weight, and that is known; else None."""
        weight = None if self.must_look else self.weigh(*inputs)
        if weight is None or not SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT:
            return None
        return at_rest(State(*accumulate(state, weight, True, select)), float64_weight=self.storage.float_dtype == ms.float64)

    def run_last(self, state: State, after: State, divisor: float, *inputs: object) -> Any:
        """The last micro-batch and the end of its window."""
        multiplies, factor = self.window.factor(divisor)
        _, told, _ = self.storage.knowledge.loss.tolist()
        whole = 1.0 if self.options.reduction == "sum" else after.weight
        loss_divisor = whole if told == state.weight else math.nan
        return self.run(self.last[multiplies], factor, number(loss_divisor, self.storage.float_dtype), *inputs)

    def run(self, program: Program, *inputs: object) -> Any:
        """Call a program in the training cell's own phase, of training or not."""
        if program.training != self.cell.training:
            program.set_train(self.cell.training)
        return program(*inputs)
