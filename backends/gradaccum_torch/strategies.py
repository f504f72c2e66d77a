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

from gradaccum_torch.hooks import Hook, Hooks, can_be_hooked
from gradaccum_torch.masters import HALF, Parameters
from gradaccum_torch.sentinel import Sentinels
from gradaccum_torch.sums import Measured, coalesced, divide, measure, multiply, narrowed
from gradaccum_torch.versions import Versions


class Strategy(ABC):
    """One window's sum, and the watch over ``.grad``."""

    sum_in_grad: ClassVar[bool]
    """At the end of a window ``.grad`` holds the whole sum."""
    keeps_micro_batch_apart: bool
    """Until `take`, ``.grad`` holds this micro-batch alone, and all of it."""
    hands_over_whole: bool = True
    """The inner optimizer gets the sum in a dtype that holds it, divided or not."""

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        # They know the inner optimizer, not the wrapper: a cycle would keep the hooks of a dropped wrapper at work until it is collected.
        self._parameters, self._accumulate_dtype = parameters, accumulate_dtype
        self._hooks = Hooks()
        self.sentinels = Sentinels()
        self.groups_changed()
        self.sentinels.reset()

    def parameters(self) -> list[Tensor]:
        """The model's parameters, each once, in the order of the groups."""
        return self._parameters.unique()

    def positions(self) -> list[Tensor]:
        """The model's parameters by the index that a saved state calls them by."""
        return self._parameters.positions()

    def expect(self, size: int | None) -> None:  # noqa: B027
        """The next window is of `size` micro-batches, None if the user closes it."""

    def groups_changed(self) -> None:
        """Parameters were added, replaced, frozen or unfrozen."""
        trainable = {id(parameter): parameter for parameter in self.parameters() if can_be_hooked(parameter)}
        self._hooks.keep(trainable)
        self.sentinels.watch(trainable.values())
        for parameter in trainable.values():
            if parameter not in self._hooks:
                self._hooks.add(parameter, self._hook_for(parameter))

    def _hook_for(self, parameter: Tensor) -> Hook:
        return self.sentinels.of(parameter).arrive

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
    def hand_over(self, divisor: float, unclipped: float) -> None:
        """Put the sum divided by `divisor` into ``.grad`` of what the inner optimizer works on.

        Args:
            divisor: of the sum.
            unclipped: the divisor without clipping.
        """

    @abstractmethod
    def take_back(self, divisor: float) -> None:
        """Undo `hand_over`, which may have raised anywhere."""

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

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        super().__init__(parameters, accumulate_dtype)
        self._undivided, self._uncast = Versions(()), Versions(())
        self._graphs: dict[Tensor, Tensor] = {}
        """The undivided sums that have a graph, while the inner optimizer has divided ones."""

    def take(self) -> bool:
        self.sentinels.next_micro_batch()
        return True

    def measure(self, notes: Sequence[Tensor] = ()) -> Measured:
        parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
        self._parameters.note_gradients(parameters)
        gradients = self._gradients(parameters)
        if any(gradient.is_sparse for gradient in gradients):
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else coalesced(parameter.grad)
            gradients = self._gradients(parameters)
            # It replaces .grad, which must not look like tampering if the inner optimizer raises and flush() is called again.
            self.sentinels.reset()
        return measure(gradients, notes)

    def hand_over(self, divisor: float, unclipped: float) -> None:
        self._undivided, self._uncast, self._graphs = Versions(()), Versions(()), {}
        masters = self._parameters.has_masters
        if divisor == 1 and not masters:
            return
        parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
        whole = [parameter for parameter in parameters if not self._is_narrowed(parameter)] if masters else parameters
        self._divide_graphs(whole, unclipped)
        gradients = self._gradients(whole)
        self._undivided, self._uncast = Versions(gradients), Versions(self._gradients(parameters) if masters else ())
        divide([gradient for gradient in gradients if not gradient.requires_grad], divisor)
        divide([gradient for gradient in gradients if gradient.requires_grad], divisor / unclipped)
        self._undivided.all_written = True
        if masters:
            self._give_masters(parameters, divisor)

    def _give_masters(self, parameters: Sequence[Tensor], divisor: float) -> None:
        for parameter, gradient in zip(parameters, self._gradients(parameters), strict=True):
            master = self._parameters.worked_on(parameter)
            if master is not parameter:
                gradient = gradient.detach()
                master.grad = narrowed(gradient, divisor, master.dtype) if self._is_narrowed(parameter) else gradient

    def _is_narrowed(self, parameter: Tensor) -> bool:
        """Whether the inner optimizer has a master in its place, which works in another dtype than the sum's."""
        master = self._parameters.worked_on(parameter)
        return master is not parameter and parameter.grad is not None and parameter.grad.dtype != master.dtype

    def _divide_graphs(self, parameters: Sequence[Tensor], divisor: float) -> None:
        """Divide what will be differentiated again (``create_graph=True``) in its graph, so that the second derivative is divided too."""
        with torch.enable_grad():
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.requires_grad:
                    self._graphs[parameter] = parameter.grad
                    parameter.grad = parameter.grad / divisor

    def take_back(self, divisor: float) -> None:
        divided = {id(each): each for each in (*self._undivided.moved(), *self._uncast.moved()) if not each.requires_grad}
        multiply(list(divided.values()), divisor)
        for parameter, gradient in self._graphs.items():
            parameter.grad = gradient
        for parameter in self.parameters():
            master = self._parameters.worked_on(parameter)
            if master is not parameter:
                master.grad = None
        self._undivided, self._uncast, self._graphs = Versions(()), Versions(()), {}
        self.sentinels.reset()

    def sums(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else parameter.grad.detach() for parameter in self.positions()]

    def load(self, sums: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.positions(), sums, strict=True):
            parameter.grad = gradient
        self.sentinels.reset()

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that autograd gives its gradient: its own, unless the user has set ``parameter.grad_dtype``."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def sum_dtype(parameter: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the sum: float32 for float16 and bfloat16 unless given, else the gradient's own; complex stays as it is."""
    own = gradient_dtype(parameter)
    if own.is_complex:
        return own
    if accumulate_dtype is not None:
        return accumulate_dtype
    return torch.float32 if own in HALF else own
