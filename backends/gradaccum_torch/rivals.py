"""Wrapped optimizers that share parameters under ``separate_sums=True``: what one of them took out of ``.grad`` is missed by the others.

Two that take turns, each after a backward pass of its own, do no harm. Two that step after the same pass would be right beside bare
optimizers, which leave ``.grad`` as it is; here the second one would find nothing, and make an update without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.sentinel import Sentinels


class Rivals:
    """What the others took of one wrapped optimizer's gradients."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._sentinels: Sentinels
        self._others: WeakSet[Rivals] = WeakSet()
        self.lost: list[Tensor] = []
        """Its parameters whose gradients another one took last."""

    def meet(self, parameters: Iterable[Tensor], sentinels: Sentinels) -> None:
        """These are its parameters now, and `sentinels` note what autograd delivers to them: find those who share one."""
        self._own, self._sentinels = set(map(id, parameters)), sentinels
        for other in _ALIVE:
            if other is not self and not self._own.isdisjoint(other._own):
                self._others.add(other)
                other._others.add(self)
        _ALIVE.add(self)

    def took(self, filled: Sequence[Tensor]) -> None:
        """It has taken the gradients of these out of ``.grad``."""
        self.lost = []
        for other in self._others:
            if lost := [parameter for parameter in filled if id(parameter) in other._own]:
                other.lost = lost
                other._sentinels.next_micro_batch()

    def require_not_taken(self) -> None:
        """What autograd put into ``.grad`` last is there.

        Raises:
            UsageError: another one took it, and no backward pass came after that.
        """
        if self.lost and not self._sentinels.arrived and any(parameter.grad is None for parameter in self.lost):
            raise explain(
                UsageError,
                "separate_sums",
                expected="a backward pass since the step() of another wrapped optimizer of these parameters, which took their gradients",
                found="two calls of step() after one backward pass",
                fix="Give each optimizer parameters of its own, or call backward() before each step().",
            )


_ALIVE: WeakSet[Rivals] = WeakSet()
