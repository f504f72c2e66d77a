"""The sum of a window in FSDP2's hands, until something asks for it: then it is reduced, sharded, in ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaccum_torch.in_grad import GradStrategy
from gradaccum_torch.masters import Parameters
from gradaccum_torch.workers.deferred import Deferred


class DeferredStrategy(GradStrategy):
    """The sum is what FSDP2 keeps, and ``.grad``. After a checkpoint a part of it is in each."""

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None, deferred: Deferred) -> None:
        self._deferred = deferred
        super().__init__(parameters, accumulate_dtype)
        deferred.watch(self.sentinels.arrivals)

    def require_whole(self) -> None:
        super().require_whole()
        self._deferred.require_whole()

    def take(self) -> bool:
        self._deferred.count()
        return super().take()

    def sums(self) -> list[Tensor | None]:
        self._deferred.reduce()
        self.sentinels.reset()
        return super().sums()

    def load(self, sums: Sequence[Tensor | None]) -> None:
        super().load(sums)
        self._deferred.note()

    def take_back(self, divisor: float, spoiled: bool) -> None:
        super().take_back(divisor, spoiled)
        self._deferred.note()

    def forget_micro_batch(self) -> None:
        super().forget_micro_batch()
        self._deferred.drop()

    def clear(self) -> None:
        super().clear()
        self._deferred.drop()
