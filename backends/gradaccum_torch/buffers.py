"""Sums that cannot live in ``.grad``: of another dtype than the gradient, or of micro-batches that must first prove finite.

`MovingStrategy` empties each ``.grad`` into its buffer as soon as autograd has filled it, so that the gradients and the buffers
never live in full at once. `DroppingStrategy` lets a micro-batch finish in ``.grad``, looks at it whole and adds it or drops it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.checks import Size
from gradaccum_torch.hooks import Hook, can_be_hooked
from gradaccum_torch.masters import Parameters
from gradaccum_torch.norm import is_finite
from gradaccum_torch.strategy import Strategy
from gradaccum_torch.sums import add, divide, fits, gradient_dtype, multiply, narrowed, sum_dtype
from gradaccum_torch.tensors import coalesced
from gradaccum_torch.torch_private import is_sharded, untraced, version

_MOVERS: WeakValueDictionary[int, MovingStrategy] = WeakValueDictionary()
"""The strategy that moves a parameter's gradients, by the parameter's id. The strategy holds the parameter, so no other gets that id."""


class BufferStrategy(Strategy):
    """The sum is in buffers of its own; ``.grad`` holds no more than the micro-batch under way."""

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        self._held: dict[Tensor, Tensor] = {}
        self._undivided: dict[Tensor, int] = {}
        """The version of each sum before it was divided."""
        self._divided = False
        super().__init__(parameters, accumulate_dtype)

    def settle(self) -> list[Tensor]:
        # In the order of the parameters, not of arrival: a resumed window must have the same norm to the last bit.
        self._held = {parameter: coalesced(self._held[parameter]) for parameter in self._parameters.unique() if parameter in self._held}
        self._parameters.note_gradients(self._held)
        return list(self._held.values())

    def fits(self, norm: float, divisor: float) -> bool:
        # No element exceeds the norm. So this seldom needs the largest element.
        return all(
            norm / divisor <= torch.finfo(gradient_dtype(parameter)).max or fits(held, divisor, gradient_dtype(parameter))
            for parameter, held in self._held.items()
            if self._is_narrowed(parameter)
        )

    def _filled(self) -> list[Tensor]:
        """The parameters whose ``.grad`` holds something."""
        return [parameter for parameter in self._parameters.unique() if parameter.grad is not None]

    def hands_over_whole(self) -> bool:
        return not any(map(self._is_narrowed, self._held))

    def hand_over(self, divisor: float, unclipped: float) -> None:
        self._undivided = {parameter: version(held) for parameter, held in self._held.items()}
        self._divided = False
        divide([held for parameter, held in self._held.items() if not self._is_narrowed(parameter)], divisor)
        self._divided = True
        for parameter, held in self._held.items():
            own = self._parameters.worked_on(parameter)
            if self._is_narrowed(parameter):
                # One by one, each frees the sum it came from: the gradients and the sums never live in full at once.
                held = self._held[parameter] = narrowed(held, divisor, gradient_dtype(own))
            own.grad = held

    def take_back(self, divisor: float, spoiled: bool) -> None:
        for parameter, noted in self._undivided.items():
            held, dtype = self._held[parameter], sum_dtype(parameter, self._accumulate_dtype)
            divided = held.dtype != dtype or version(held) != noted or (self._divided and is_sharded(held))
            self._parameters.worked_on(parameter).grad = None
            self._held[parameter] = held = held.to(dtype)
            if divided:
                multiply([held], divisor)
        self._undivided = {}
        self.sentinels.reset(disturbed=spoiled)

    def sums(self) -> list[Tensor | None]:
        return [self._held.get(parameter) for parameter in self._parameters.positions()]

    def load(self, sums: Sequence[Tensor | None]) -> None:
        pairs = zip(self._parameters.positions(), sums, strict=True)
        self._held = {parameter: held for parameter, held in pairs if held is not None}

    def release(self) -> list[Tensor | None]:
        self.take()
        return super().release()

    def pickled(self) -> dict[str, Any]:
        return {**super().pickled(), "sums": self.sums()}

    def unpickle(self, pickled: Mapping[str, Any]) -> None:
        self.load(pickled["sums"])
        super().unpickle(pickled)

    def clear(self) -> None:
        self._held.clear()
        super().clear()

    def _is_all_in_grad(self, first: bool, flushing: bool) -> bool:
        return first and self.keeps_micro_batch_apart and not flushing

    def _absorb(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        held = self._held.get(parameter)
        if held is None:
            self._held[parameter] = gradient.detach().to(sum_dtype(parameter, self._accumulate_dtype))
        elif (total := add(held, gradient)) is not held:
            self._held[parameter] = total
        parameter.grad = None

    def _is_narrowed(self, parameter: Tensor) -> bool:
        """Whether the inner optimizer's dtype for this parameter is another than its sum's."""
        return gradient_dtype(self._parameters.worked_on(parameter)) != sum_dtype(parameter, self._accumulate_dtype)


class MovingStrategy(BufferStrategy):
    """Gradients leave ``.grad`` as autograd produces them.

    Some stay until `take`, so that a clip or an all-reduce finds something to write into, and the write is noticed. These are the small
    gradients, or the last one to arrive if no small one did. In a window of one micro-batch all stay: there ``.grad`` is the window's
    gradient, as in the bare loop.
    """

    keeps_micro_batch_apart = False
    expects = True

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        self._staying: set[int] = set()
        self._last: Tensor | None = None
        """The parameter whose gradient stays, because no small one has come in this micro-batch."""
        self._seen_small = False
        self._replaced = False
        super().__init__(parameters, accumulate_dtype)
        self.sentinels.strict = True

    def expect(self, size: Size) -> None:
        self.keeps_micro_batch_apart = size == 1
        self.sentinels.strict = not self.keeps_micro_batch_apart

    def groups_changed(self) -> None:
        super().groups_changed()
        self._staying = {id(parameter) for group in self._parameters.groups() for parameter in _small(group["params"])}

    def take(self) -> bool:
        if self._replaced:
            raise _replaced_error()
        for parameter in self._parameters.unique():
            if parameter.grad is not None:
                self._absorb(parameter)
                self.sentinels.note(parameter)
        self._last, self._seen_small = None, False
        self.sentinels.next_micro_batch()
        self.sentinels.arrivals.values.forget()
        return True

    def forget_micro_batch(self) -> None:
        self._held.clear()
        self._last, self._seen_small = None, False
        super().forget_micro_batch()

    def _hook_for(self, parameter: Tensor) -> Hook:
        self._replace_other(parameter)
        _MOVERS[id(parameter)] = self
        watched, alive = self.sentinels.of(parameter), weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            watched.arrive(parameter)
            living = alive()
            if living is not None and not living.keeps_micro_batch_apart:
                living._move(parameter)

        untraced(hook)
        return hook

    def _move(self, parameter: Tensor) -> None:
        """Add the gradient that arrived to the sum, or let it stay and add the one that has stayed so far."""
        moving: Tensor | None = parameter
        if id(parameter) in self._staying:
            self._seen_small = True
            moving, self._last = self._last, None
        elif not self._seen_small:
            moving, self._last = self._last, parameter
        if moving is not None and moving is not self._last:
            self._absorb(moving)
            self.sentinels.note(moving)

    def _replace_other(self, parameter: Tensor) -> None:
        """Only one wrapper can take a gradient. The newest does; an older one raises at its next step."""
        other = _MOVERS.get(id(parameter))
        if other is not None and other is not self and parameter in other._hooks:
            other._replaced = True
            other._hooks.remove(parameter)


def _small(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The trainable parameters whose gradients may stay in ``.grad``: the smallest, and more while they fit into a 256th of the memory."""
    trainable = sorted(filter(can_be_hooked, parameters), key=Tensor.numel)
    budget = sum(map(Tensor.numel, trainable)) // 256
    ends = itertools.accumulate(map(Tensor.numel, trainable))
    fitting = [each for each, end in zip(trainable, ends, strict=True) if end <= budget]
    return fitting or trainable[:1]


class DroppingStrategy(BufferStrategy):
    """A micro-batch whose gradient is not finite adds nothing."""

    keeps_micro_batch_apart = True

    def take(self) -> bool:
        filled = self._filled()
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


def _replaced_error() -> UsageError:
    """The error of a wrapper whose parameters were wrapped again."""
    return explain(
        UsageError,
        "optimizer",
        expected="one wrapped optimizer per parameter where the sum has another dtype than the gradient",
        found="parameters that were wrapped again, so that their gradients go to the later wrapper",
        fix="Use the optimizer that gradaccum.wrap returned last, and drop this one.",
    )
