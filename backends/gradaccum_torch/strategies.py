"""Where the sum of a window lives.

`GradStrategy`: in ``.grad`` itself, which autograd adds into anyway: no second buffer, nothing to do per micro-batch. It is the
default wherever the sum has the gradient's own dtype. `gradaccum_torch.buffers` has the two others, behind the same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradaccum_torch.accumulator import Measured, coalesced, divide, measure, multiply, narrowed
from gradaccum_torch.parameters import HALF, Parameters
from gradaccum_torch.sentinel import Sentinels


class Strategy(ABC):
    """One window's sum, and the watch over ``.grad``."""

    sum_in_grad: ClassVar[bool]
    """At the end of a window ``.grad`` holds the whole sum."""
    keeps_micro_batch_apart: ClassVar[bool]
    """Until `take`, ``.grad`` holds this micro-batch alone."""
    moves_gradients: ClassVar[bool] = False
    """Gradients leave ``.grad`` as soon as they are there."""
    hands_over_whole: bool = True
    """The inner optimizer gets the sum in a dtype that holds it, divided or not."""

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        # They know the inner optimizer, not the wrapper: a cycle would keep the hooks of a dropped wrapper at work until it is collected.
        self._parameters, self._accumulate_dtype = parameters, accumulate_dtype
        self.sentinels = Sentinels()
        self.sentinels.watch_some(self._groups(), small=self.moves_gradients)
        self.sentinels.reset()

    def parameters(self) -> list[Tensor]:
        """The model's parameters, each once, in the order of the groups."""
        return self._parameters.unique()

    def positions(self) -> list[Tensor]:
        """The model's parameters by the index that a saved state calls them by."""
        return self._parameters.positions()

    def _groups(self) -> list[list[Tensor]]:
        """As they are now: groups can be added, and loading a state replaces them."""
        return [group["params"] for group in self._parameters.groups()]

    def groups_changed(self) -> None:
        """Parameters were added."""
        self.sentinels.watch_some(self._groups(), small=self.moves_gradients)

    @abstractmethod
    def take(self) -> bool:
        """Add the micro-batch that is in ``.grad`` to the sum; False if it was dropped because it is not finite."""

    @abstractmethod
    def measure(self, notes: Sequence[Tensor] = ()) -> Measured:
        """The sum's global 2-norm and whether every element is finite; `notes` are scalars to be read in the same transfer."""

    def fits(self, norm: float, divisor: float) -> bool:
        """Whether the sum, of that norm, divided by `divisor` is finite in the dtype that the inner optimizer works in."""
        return True

    @abstractmethod
    def hand_over(self, divisor: float) -> None:
        """Put the sum divided by `divisor` into ``.grad`` of what the inner optimizer works on."""

    @abstractmethod
    def take_back(self, divisor: float) -> None:
        """Undo `hand_over`."""

    @abstractmethod
    def sums(self) -> list[Tensor | None]:
        """The sum by position, None where nothing is held; the tensors themselves, not copies."""

    @abstractmethod
    def load(self, sums: Sequence[Tensor | None]) -> None:
        """Make these tensors the sum; takes them over."""

    def forget_micro_batch(self) -> None:
        """The user cleared ``.grad``, and nothing but the micro-batch under way was to be lost by that."""
        self.sentinels.reset()

    def clear(self) -> None:
        """Free the sum and whatever is in ``.grad``."""
        self._parameters.free_gradients()
        self.sentinels.reset()


class GradStrategy(Strategy):
    """The sum is ``.grad``."""

    sum_in_grad = True
    keeps_micro_batch_apart = False

    def take(self) -> bool:
        self.sentinels.next_micro_batch(self.parameters)
        return True

    def measure(self, notes: Sequence[Tensor] = ()) -> Measured:
        parameters = self.parameters()
        gradients = self._gradients(parameters)
        if any(gradient.is_sparse for gradient in gradients):
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else coalesced(parameter.grad)
            gradients = self._gradients(parameters)
            # It replaces .grad, which must not look like tampering if the inner optimizer raises and flush() is called again.
            self.sentinels.reset()
        return measure(gradients, notes)

    def hand_over(self, divisor: float) -> None:
        if divisor == 1 and not self._parameters.has_masters:
            return
        divide(self._gradients(self._own_masters()), divisor)
        for parameter in self.parameters():
            master = self._parameters.worked_on(parameter)
            if master is not parameter and parameter.grad is not None:
                master.grad = narrowed(parameter.grad.detach(), divisor, master.dtype)

    def take_back(self, divisor: float) -> None:
        multiply(self._gradients(self._own_masters()), divisor)
        for parameter in self.parameters():
            master = self._parameters.worked_on(parameter)
            if master is not parameter:
                master.grad = None
        self.sentinels.reset()

    def sums(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else parameter.grad.detach() for parameter in self.positions()]

    def load(self, sums: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.positions(), sums, strict=True):
            parameter.grad = gradient
        self.sentinels.reset()

    def _own_masters(self) -> list[Tensor]:
        parameters = self.parameters()
        if not self._parameters.has_masters:
            return parameters
        return [parameter for parameter in parameters if self._parameters.worked_on(parameter) is parameter]

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def sum_dtype(parameter: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the sum: float32 for float16 and bfloat16 unless given, else the gradient's own; complex stays as it is."""
    if parameter.is_complex():
        return parameter.dtype
    if accumulate_dtype is not None:
        return accumulate_dtype
    return torch.float32 if parameter.dtype in HALF else parameter.dtype
