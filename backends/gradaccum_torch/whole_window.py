"""The interface for functions such as `gradaccum_torch.backward`. In a single call,
such a function processes all micro-batches of a window and closes the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum import UsageError
from gradaccum_torch.arithmetic import is_zero
from gradaccum_torch.extensions import rate_mark
from gradaccum_torch.torch_private.fsdp import units_holding
from gradaccum_torch.torch_private.names import Versions, is_sharded
from gradaccum_torch.window import Window


class WholeWindow:
    """A context manager for a window whose micro-batches are all processed inside one
    ``with`` block.

    If the block raises an error, the window is discarded, and every ``.grad`` is
    restored.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.options = window.options
        self._gradients_before: dict[Tensor, Tensor] = {}
        self._updated_parts: list[int] = []
        """The indices of the layers that have already been updated. These updates
        cannot be undone.
        """

    def __enter__(self) -> None:
        self._window.update.require_usable()
        if self._window.is_under_way():
            raise UsageError(
                "optimizer: expected an optimizer with no open window, because this"
                " call opens its own window; got an optimizer with an open window. Call"
                " opt.flush() or opt.discard() first."
            )
        self._gradients_before = {
            parameter: parameter.grad
            for parameter in self._parameters()
            if parameter.grad is not None
        }
        # Allow zeros, because zero_grad(set_to_none=False) leaves zeros. Autograd adds
        # to the values in ``.grad``, so any other value would become part of the
        # window's sum.
        if not all(map(is_zero, self._gradients_before.values())):
            raise UsageError(
                ".grad: expected no gradients before the call, because the window"
                " contains only this call's batch; got parameters that already have"
                " gradients. Call opt.zero_grad() first."
            )
        self._window.watch.reset()

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        if error is None:
            return
        self._window.discard()
        with torch.no_grad():
            for parameter, gradient in self._gradients_before.items():
                parameter.grad = gradient.zero_()
        self._window.watch.reset()
        if self._updated_parts:
            self._window.update.is_broken = True
            error.add_note(
                f"gradaccum: layers {self._updated_parts} were updated before this"
                " error, and these updates cannot be undone. The last of these layers"
                " may be only partially updated. All other layers were not updated."
                " Load the last checkpoint of the model and of the optimizer."
            )

    @property
    def is_shared(self) -> bool:
        """True if several workers share the window."""
        return self._window.workers.is_shared

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._window.workers.group

    @property
    def parameter_ids(self) -> set[int]:
        return set(map(id, self._parameters()))

    @property
    def has_new_gradient(self) -> bool:
        """True if autograd has added a gradient since the last micro-batch was
        counted.
        """
        return self._window.has_new_gradient

    def loss_scale(self) -> float:
        """Return the current loss scale. This may synchronize with the device."""
        return float(self._window.current_state().loss_scale)

    def gathered_ids(self) -> set[int]:
        """Return the ids of the unsharded parameters that FSDP2 gathered in the last
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

    def begin_weightless(self) -> None:
        """Prepare for a backward pass that starts from gradients which an earlier
        backward pass has computed. The loss was already counted for the earlier pass,
        so the new pass adds no weight to the window. The gradients are already
        multiplied by the loss scale, so they are not multiplied again.
        """
        micro_batch = self._window.micro_batch
        micro_batch.set_weight(0.0)
        micro_batch.is_weighed = True
        micro_batch.has_loss = True
        micro_batch.is_scaled_by_hand = True

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Add the gradients of all backward passes inside the block to the window's
        sum. The micro-batches of these passes must already have been counted.
        """
        gradient_sum = self._window.gradient_sum
        gradient_sum.adds_at_once = True
        try:
            yield
        finally:
            gradient_sum.adds_at_once = False
        gradient_sum.add_micro_batch(self._window.update)
        self._window.update.is_broken = False
        self._window.watch.reset()

    def update_part(self, number: int, belongs: Callable[[Tensor], bool]) -> None:
        """Update the parameters for which ``belongs(parameter)`` is true, and free
        their gradients. The window stays open for all other parameters.

        - `number`: the index of the layer, for error messages.
        """
        others = Versions(each for each in self._parameters() if not belongs(each))
        numbers = self._group_numbers()
        self._updated_parts.append(number)
        self._window.close_part(belongs)
        if others.moved() or self._group_numbers() != numbers:
            raise UsageError(
                "optimizer: expected an inner optimizer that changes neither"
                " parameters without a gradient nor numbers in its parameter groups,"
                " such as a step count; got an inner optimizer that changes one of"
                " these. Load the last checkpoint, and wrap without"
                ' on_overflow="ignore". The inner optimizer then steps once per window'
                " instead of once per layer."
            )

    def _group_numbers(self) -> list[object]:
        """Return the numbers in the parameter groups, such as a step counter."""
        return [
            (name, rate_mark(value))
            for group in self._window.masters.inner.param_groups
            for name, value in group.items()
            if isinstance(value, int | float | Tensor)
        ]
