"""Chooses where the sum of a window lives, by the parameters' dtypes as the window begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Options, explain, largest_number
from gradaccum_torch.buffers import DroppingStrategy, MovingStrategy
from gradaccum_torch.in_grad import GradStrategy
from gradaccum_torch.masters import Parameters
from gradaccum_torch.separate import SeparateDroppingStrategy, SeparateStrategy
from gradaccum_torch.strategy import Strategy
from gradaccum_torch.sums import sum_dtype
from gradaccum_torch.tensors import DTYPE, REQUIRES_GRAD
from gradaccum_torch.workers.deferred import Deferred
from gradaccum_torch.workers.in_fsdp import DeferredStrategy


class Plan:
    """The parameters as they are when it is made, and what follows for the sum.

    Args:
        parameters: those that are summed over.
        options: those of `gradaccum.wrap`, with ``accumulate_dtype`` as a torch dtype or None.
        deferred: keeps the sum, if not None.
    """

    def __init__(self, parameters: Parameters, options: Options, deferred: Deferred | None) -> None:
        self._parameters, self._accumulate_dtype, self._deferred = parameters, options.accumulate_dtype, deferred
        seen = parameters.positions()
        self._seen, self._dtypes = _seen(seen), list(map(DTYPE, seen))
        self.sum_dtypes = [sum_dtype(parameter, options.accumulate_dtype) for parameter in seen]
        """The dtype of each parameter's sum."""
        self.float64_weight = torch.float64 in self.sum_dtypes
        self.largest = largest_number(float64_weight=self.float64_weight)
        """The largest finite number of the dtype in which the sums are divided."""
        self._kind = _kind(self._dtypes, self.sum_dtypes, options)
        if deferred is not None:
            self._kind = _require_deferrable(self._kind)

    def holds(self) -> bool:
        """Nothing has changed since: ``model.to(dtype)``, freezing and code that replaces parameters in the groups call nothing here."""
        return _seen(self._parameters.positions()) == self._seen

    def holds_dtypes(self) -> bool:
        """No parameter was cast since."""
        return list(map(DTYPE, self._parameters.positions())) == self._dtypes

    def zeros(self, position: int) -> Tensor:
        """An empty sum of the parameter at `position`."""
        return torch.zeros_like(self._parameters.positions()[position], dtype=self.sum_dtypes[position])

    def strategy(self) -> Strategy:
        """A new one of the kind that suits the parameters."""
        if self._deferred is not None:
            return DeferredStrategy(self._parameters, self._accumulate_dtype, self._deferred)
        return self._kind(self._parameters, self._accumulate_dtype)

    def carried_over(self, old: Strategy) -> Strategy:
        """`old` itself where it suits the parameters, else a new one to which its sum has moved."""
        if type(old) is self._kind:
            old.groups_changed()
            return old
        arrived, outside, _ = old.sentinels.flags()
        sums, new = old.release(), self.strategy()
        new.load([None if total is None else total.to(dtype) for total, dtype in zip(sums, self.sum_dtypes, strict=True)])
        new.sentinels.reset(arrived, outside)
        return new


def _seen(parameters: Sequence[Tensor]) -> tuple[list[int], list[torch.dtype], list[bool]]:
    return list(map(id, parameters)), list(map(DTYPE, parameters)), list(map(REQUIRES_GRAD, parameters))


def _kind(dtypes: Sequence[torch.dtype], sum_dtypes: Sequence[torch.dtype], options: Options) -> type[Strategy]:
    """The sum is in ``.grad`` unless it is to be apart, micro-batches can be dropped or some sum has another dtype than its parameter."""
    if options.separate_sums:
        return SeparateDroppingStrategy if options.on_overflow == "drop_micro_batch" else SeparateStrategy
    if options.on_overflow == "drop_micro_batch":
        return DroppingStrategy
    return GradStrategy if sum_dtypes == dtypes else MovingStrategy


def _require_deferrable(kind: type[Strategy]) -> type[Strategy]:
    """The parameters have the dtype of their sums, as when they were wrapped.

    Raises:
        UsageError: they were cast.
    """
    if kind is not GradStrategy:
        fix = "Wrap the optimizer after the cast."
        expected, found = "parameters in the dtype of their sums beside gradient_sync=", "parameters that were cast"
        raise explain(UsageError, "model.to(dtype)", expected=expected, found=found, fix=fix)
    return DeferredStrategy
