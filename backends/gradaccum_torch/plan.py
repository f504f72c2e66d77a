"""The part of a window that decides where its sum lives, by what the parameters are when it begins."""

from __future__ import annotations

from operator import attrgetter

import torch

from gradaccum.kit import Options, State, largest_number
from gradaccum_torch.buffers import strategy_type
from gradaccum_torch.checks import window_size
from gradaccum_torch.masters import Parameters
from gradaccum_torch.strategies import Strategy, sum_dtype

_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")


class Planned:
    """A window whose sum lives where the dtypes of its parameters ask for it."""

    options: Options
    parameters: Parameters
    fields: State
    strategy: Strategy

    @property
    def sum_dtypes(self) -> list[torch.dtype]:
        """The dtype of each parameter's sum."""
        return [sum_dtype(parameter, self.options.accumulate_dtype) for parameter in self.parameters.positions()]

    def groups_changed(self) -> None:
        """Parameters were added, replaced, frozen or cast; if the sum must now live elsewhere, it moves there."""
        self.parameters.groups_changed()
        if type(self.strategy) is strategy_type(self.parameters.positions(), self.options):
            self.strategy.groups_changed()
            self._plan()
        else:
            self._move_sum()

    def use_strategy(self) -> None:
        """Choose where the sum lives by the dtypes of the parameters."""
        chosen = strategy_type(self.parameters.positions(), self.options)
        self.strategy = chosen(self.parameters, self.options.accumulate_dtype)
        self._plan()

    def _plan(self) -> None:
        self._planned = self._seen()
        self._float64_weight = torch.float64 in self.sum_dtypes
        self._largest = largest_number(float64_weight=self._float64_weight)

    def _seen(self) -> tuple[list[int], list[torch.dtype], list[bool]]:
        """What a plan depends on: ``model.to(dtype)``, freezing and code that replaces parameters in the groups call nobody."""
        seen = self.parameters.positions()
        return list(map(id, seen)), list(map(_DTYPE, seen)), list(map(_REQUIRES_GRAD, seen))

    def _move_sum(self) -> None:
        old = self.strategy
        arrived, outside, _ = old.sentinels.flags()
        if not old.sum_in_grad:
            old.take()
        sums = old.sums()
        old.clear()
        self.use_strategy()
        self._expect()
        dtypes = self.sum_dtypes
        self.strategy.load([None if total is None else total.to(dtype) for total, dtype in zip(sums, dtypes, strict=True)])
        self.strategy.sentinels.reset(arrived, outside)

    def _expect(self) -> None:
        """Tell the strategy how long the next window is, as far as that is known: a schedule that raises does so in ``step``."""
        try:
            self.strategy.expect(window_size(self.options, self.fields.optimizer_step))
        except Exception:
            self.strategy.expect(None)
