"""A window that one call fills and closes, as `gradaccum_torch.backward` does: the
public face of a window for large batches and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum import UsageError
from gradaccum_torch.arithmetic import is_zero
from gradaccum_torch.extensions import rate_mark
from gradaccum_torch.gradient_sum import SumOnArrival
from gradaccum_torch.torch_private.fsdp import units_holding
from gradaccum_torch.torch_private.names import Versions, is_sharded
from gradaccum_torch.window import Window


class WholeWindow:
    """A window that one call fills and closes: inside its ``with`` block the
    micro-batches of the call are counted.

    If the block raises, the window is forgotten, and every ``.grad`` holds what it held
    before.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.options = window.options
        self._gradients_before: dict[Tensor, Tensor] = {}
        self._updated_parts: list[int] = []
        """Their updates cannot be undone."""

    def __enter__(self) -> WholeWindow:
        self._window.update.require_usable()
        if self._window.is_under_way():
            raise UsageError(
                "optimizer: expected one between two windows; got one with an open"
                " window. Call opt.flush() or opt.discard() first: this call makes a"
                " window of its own."
            )
        self._gradients_before = {
            parameter: parameter.grad
            for parameter in self._parameters()
            if parameter.grad is not None
        }
        # zero_grad(set_to_none=False) leaves zeros, into which autograd adds; anything
        # else would count as a part of the window.
        if not all(map(is_zero, self._gradients_before.values())):
            raise UsageError(
                ".grad: expected no gradients from before; got gradients. Call"
                " opt.zero_grad() first: the window is this call's batch alone."
            )
        self._window.watch.reset()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            return
        self._window.discard()
        with torch.no_grad():
            for parameter, gradient in self._gradients_before.items():
                parameter.grad = gradient.zero_()
        self._window.watch.reset()
        if self._updated_parts and error is not None:
            self._window.update.is_broken = True
            error.add_note(
                f"gradaccum: layers {self._updated_parts} were updated before this"
                " error, the last one perhaps in part, and cannot be undone; the other"
                " layers were not. Load the last checkpoint of the model and of the"
                " optimizer."
            )

    # What the window is like.

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._window.workers.group

    @property
    def parameter_ids(self) -> set[int]:
        return set(map(id, self._parameters()))

    @property
    def has_new_gradient(self) -> bool:
        """True if autograd has delivered something since the last micro-batch was
        counted.
        """
        return self._window.has_new_gradient

    def loss_scale(self) -> float:
        """Return the current loss scale; may wait for the device."""
        return float(self._window.current_state().loss_scale)

    def gathered_ids(self) -> set[int]:
        """Return the ids of the complete parameters that FSDP2 gathered in the last
        forward pass.
        """
        parameters = self._parameters()
        if not any(map(is_sharded, parameters)):
            return set()
        return {
            id(gathered)
            for unit in units_holding(parameters)
            for gathered in unit.gathered_parameters()
        }

    def _parameters(self) -> list[Tensor]:
        return self._window.masters.parameters()

    # Filling and closing it.

    def begin_weightless(self) -> None:
        """Prepare for a backward pass that delivers a part of what is counted already:
        no weight is added, the scale holds.
        """
        micro_batch = self._window.micro_batch
        micro_batch.set_weight(0.0)
        micro_batch.is_weighed = True
        micro_batch.has_loss = True
        micro_batch.is_scaled_by_hand = True

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Add what backward passes inside the block deliver to the sum: the
        micro-batches that they are of are counted already.
        """
        gradient_sum = self._window.gradient_sum
        if isinstance(gradient_sum, SumOnArrival):
            gradient_sum.adds_at_once = True
        try:
            yield
        finally:
            if isinstance(gradient_sum, SumOnArrival):
                gradient_sum.adds_at_once = False
        gradient_sum.add_micro_batch(self._window.update)
        self._window.update.is_broken = False
        self._window.watch.reset()

    def update_part(self, number: int, belongs: Callable[[Tensor], bool]) -> None:
        """Update the parameters that `belongs` is true of, whose sum is complete, and
        free it; the window stays open for the others.
        """
        others = Versions(each for each in self._parameters() if not belongs(each))
        numbers = self._group_numbers()
        self._updated_parts.append(number)
        self._window.close_part(belongs)
        if others.moved() or self._group_numbers() != numbers:
            raise UsageError(
                "optimizer: expected an inner optimizer that moves only parameters with"
                " a gradient; got one that moves other parameters, or counts steps in"
                ' its groups. Leave on_overflow="ignore" out, so that it makes one step'
                " per window, and load the last checkpoint."
            )

    def _group_numbers(self) -> list[object]:
        """Return the numbers of all groups, such as a count of steps."""
        return [
            (name, rate_mark(value))
            for group in self._window.masters.inner.param_groups
            for name, value in group.items()
            if isinstance(value, int | float | Tensor)
        ]
