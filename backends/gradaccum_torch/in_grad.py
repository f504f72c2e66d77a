"""The sum of a window in ``.grad`` itself, which autograd adds into anyway: no second buffer, nothing to do per micro-batch.

It is the default wherever the sum has the gradient's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaccum_torch.masters import Parameters
from gradaccum_torch.strategy import Strategy
from gradaccum_torch.sums import divide, multiply, narrowed
from gradaccum_torch.tensors import GRAD, IS_SPARSE, REQUIRES_GRAD, coalesced
from gradaccum_torch.versions import Versions

_NOTHING = Versions()
"""Nothing was handed over, or nothing of this kind."""


class GradStrategy(Strategy):
    """The sum is ``.grad``."""

    keeps_micro_batch_apart = False

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        super().__init__(parameters, accumulate_dtype)
        self._settled: list[Tensor] = []
        """The parameters that have a gradient as their window ends."""
        self._forget_handed_over()

    def take(self) -> bool:
        self.sentinels.next_micro_batch()
        return True

    def settle(self) -> list[Tensor]:
        parameters = self._settled = [parameter for parameter in self._parameters.unique() if parameter.grad is not None]
        self._parameters.note_gradients(parameters)
        gradients: list[Tensor] = list(map(GRAD, parameters))
        if any(map(IS_SPARSE, gradients)):
            self._coalesce(parameters)
            return list(map(GRAD, parameters))
        return gradients

    def hand_over(self, divisor: float, unclipped: float) -> None:
        self._forget_handed_over()
        masters = self._parameters.has_masters
        if divisor == 1 and not masters:
            return
        parameters = self._settled
        divided = [parameter for parameter in parameters if not self._is_narrowed(parameter)] if masters else parameters
        gradients: list[Tensor] = list(map(GRAD, divided))
        graphs = any(map(REQUIRES_GRAD, gradients))
        if graphs:
            self._divide_graphs(divided, unclipped)
            gradients = list(map(GRAD, divided))
        self._undivided, self._uncast = Versions(gradients), Versions(map(GRAD, parameters)) if masters else _NOTHING
        divide([gradient for gradient in gradients if not gradient.requires_grad] if graphs else gradients, divisor)
        if graphs:
            divide([gradient for gradient in gradients if gradient.requires_grad], divisor / unclipped)
        self._undivided.all_written = True
        if masters:
            self._give_masters(parameters, divisor)

    def take_back(self, divisor: float, spoiled: bool) -> None:
        divided = {id(each): each for each in (*self._undivided.moved(), *self._uncast.moved()) if not each.requires_grad}
        multiply(list(divided.values()), divisor)
        for parameter, gradient in self._graphs.items():
            parameter.grad = gradient
        for parameter in self._parameters.unique():
            master = self._parameters.worked_on(parameter)
            if master is not parameter:
                master.grad = None
        self._forget_handed_over()
        self.sentinels.reset(disturbed=spoiled)

    def sums(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else parameter.grad.detach() for parameter in self._parameters.positions()]

    def load(self, sums: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters.positions(), sums, strict=True):
            parameter.grad = gradient
        self.sentinels.reset()

    def clear(self) -> None:
        self._forget_handed_over()
        super().clear()

    def _is_all_in_grad(self, first: bool, flushing: bool) -> bool:
        return True

    def _coalesce(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else coalesced(parameter.grad)
        # The replaced .grad must not look like tampering if the inner optimizer raises and flush() is called again.
        self.sentinels.reset()

    def _divide_graphs(self, parameters: Sequence[Tensor], divisor: float) -> None:
        """Divide what will be differentiated again (``create_graph=True``) in its graph, so that the second derivative is divided too."""
        with torch.enable_grad():
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.requires_grad:
                    self._graphs[parameter] = parameter.grad
                    parameter.grad = parameter.grad / divisor

    def _give_masters(self, parameters: Sequence[Tensor], divisor: float) -> None:
        for parameter in parameters:
            master, gradient = self._parameters.worked_on(parameter), parameter.grad
            if master is not parameter and gradient is not None:
                gradient = gradient.detach()
                master.grad = narrowed(gradient, divisor, master.dtype) if self._is_narrowed(parameter) else gradient

    def _is_narrowed(self, parameter: Tensor) -> bool:
        """Whether the inner optimizer has a master in its place, which works in another dtype than the sum's."""
        master = self._parameters.worked_on(parameter)
        return master is not parameter and parameter.grad is not None and parameter.grad.dtype != master.dtype

    def _forget_handed_over(self) -> None:
        self._undivided = self._uncast = _NOTHING
        self._graphs: dict[Tensor, Tensor] = {}
        """The undivided sums that have a graph, while the inner optimizer has divided ones."""
