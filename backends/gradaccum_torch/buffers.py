"""Sums that cannot live in ``.grad``: of another dtype than the gradient, or of micro-batches that must first prove finite.

`MovingStrategy` empties each ``.grad`` into its buffer as soon as autograd has filled it, so that the gradients and the buffers
never live in full at once. `DroppingStrategy` lets a micro-batch finish in ``.grad``, looks at it whole and adds it or drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradaccum import Options, UsageError, explain
from gradaccum_torch.accumulator import Measured, add, coalesced, divide, is_finite, measure, multiply, narrowed, survives
from gradaccum_torch.parameters import Parameters
from gradaccum_torch.sentinel import can_be_hooked, hook_accumulation
from gradaccum_torch.strategies import GradStrategy, Strategy, sum_dtype

_MOVERS: WeakValueDictionary[int, MovingStrategy] = WeakValueDictionary()
"""Who moves a parameter's gradients, by the parameter's id, which cannot be another's while its mover lives and holds it."""


class BufferStrategy(Strategy):
    """The sum is in buffers of its own; ``.grad`` holds no more than the micro-batch under way."""

    sum_in_grad = False

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        super().__init__(parameters, accumulate_dtype)
        self._held: dict[Tensor, Tensor] = {}

    def measure(self, notes: Sequence[Tensor] = ()) -> Measured:
        # In the parameters' order, not in that of arrival: a resumed window must have the same norm to the last bit.
        self._held = {parameter: coalesced(self._held[parameter]) for parameter in self.parameters() if parameter in self._held}
        return measure(list(self._held.values()), notes)

    def fits(self, norm: float, divisor: float) -> bool:
        # No element exceeds the norm, so the elements themselves are seldom looked at.
        return all(
            norm / divisor <= torch.finfo(parameter.dtype).max or survives(held, divisor, parameter.dtype)
            for parameter, held in self._held.items()
            if self._is_narrowed(parameter)
        )

    @property
    def hands_over_whole(self) -> bool:  # type: ignore[override]
        return not any(map(self._is_narrowed, self._held))

    def hand_over(self, divisor: float) -> None:
        divide([held for parameter, held in self._held.items() if not self._is_narrowed(parameter)], divisor)
        for parameter, held in self._held.items():
            own = self._parameters.worked_on(parameter)
            if self._is_narrowed(parameter):
                # One by one, each freeing the sum it came from: the gradients and the sums never live in full at once.
                held = self._held[parameter] = narrowed(held, divisor, own.dtype)
            own.grad = held

    def take_back(self, divisor: float) -> None:
        for parameter, held in self._held.items():
            self._parameters.worked_on(parameter).grad = None
            self._held[parameter] = held.to(sum_dtype(parameter, self._accumulate_dtype))
        multiply(list(self._held.values()), divisor)
        self.sentinels.reset()

    def sums(self) -> list[Tensor | None]:
        return [self._held.get(parameter) for parameter in self.positions()]

    def load(self, sums: Sequence[Tensor | None]) -> None:
        pairs = zip(self.positions(), sums, strict=True)
        self._held = {parameter: held for parameter, held in pairs if held is not None}

    def clear(self) -> None:
        self._held.clear()
        super().clear()

    def _absorb(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        held = self._held.get(parameter)
        if held is None:
            self._held[parameter] = gradient.detach().to(sum_dtype(parameter, self._accumulate_dtype))
        elif (total := add(held, gradient)) is not held:
            self._held[parameter] = total

    def _is_narrowed(self, parameter: Tensor) -> bool:
        """Whether the inner optimizer works in another dtype than the sum's."""
        return self._parameters.worked_on(parameter).dtype != sum_dtype(parameter, self._accumulate_dtype)


class MovingStrategy(BufferStrategy):
    """Gradients leave ``.grad`` as autograd produces them; only the few watched ones stay until `take`."""

    keeps_micro_batch_apart = False
    moves_gradients = True

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        super().__init__(parameters, accumulate_dtype)
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._replaced = False
        self._hook_all()

    def groups_changed(self) -> None:
        super().groups_changed()
        self._hook_all()

    def take(self) -> bool:
        if self._replaced:
            raise _replaced()
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._absorb(parameter)
                self._hook(parameter)
        self.sentinels.reset()
        return True

    def forget_micro_batch(self) -> None:
        self._held.clear()
        super().forget_micro_batch()

    def _hook_all(self) -> None:
        for parameter in self.parameters():
            self._hook(parameter)

    def _hook(self, parameter: Tensor) -> None:
        """Hook a parameter once; one that was frozen until now is found by `take`."""
        if parameter not in self._handles and parameter not in self.sentinels and can_be_hooked(parameter):
            self._replace_other(parameter)
            self._handles[parameter] = hook_accumulation(parameter, self, MovingStrategy._absorb)
            _MOVERS[id(parameter)] = self

    def _replace_other(self, parameter: Tensor) -> None:
        """Two could not both have the gradient: the latest wrapper gets it, and an older one that still lives says so."""
        other = _MOVERS.get(id(parameter))
        if other is not None and parameter in other._handles:
            other._replaced = True
            other._handles.pop(parameter).remove()


class DroppingStrategy(BufferStrategy):
    """A micro-batch that is not finite adds nothing."""

    keeps_micro_batch_apart = True

    def take(self) -> bool:
        filled = [parameter for parameter in self.parameters() if parameter.grad is not None]
        for parameter in filled:
            parameter.grad = None if parameter.grad is None else coalesced(parameter.grad)
        finite = is_finite([parameter.grad for parameter in filled if parameter.grad is not None])
        for parameter in filled:
            if finite:
                self._absorb(parameter)
            else:
                parameter.grad = None
        self.sentinels.reset()
        return finite


def strategy_type(parameters: Sequence[Tensor], options: Options) -> type[Strategy]:
    """Where the sum must live: in ``.grad`` unless micro-batches can be dropped or some sum has another dtype than its gradient."""
    if options.on_overflow == "drop_micro_batch":
        return DroppingStrategy
    moved = any(sum_dtype(parameter, options.accumulate_dtype) != parameter.dtype for parameter in parameters)
    return MovingStrategy if moved else GradStrategy


def _replaced() -> UsageError:
    return explain(
        UsageError,
        "optimizer",
        expected="one wrapped optimizer per parameter where the sum has another dtype than the gradient",
        got="parameters that were wrapped again, so that their gradients go to the later wrapper",
        fix="Use the optimizer that gradaccum.wrap returned last, and drop this one.",
    )
