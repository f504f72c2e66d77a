"""What FSDP2 makes of the gradients of an optimizer's parameters: the divisor of each, and what it has not reduced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_torch.fsdp_private import Unit, units_holding
from gradaccum_torch.hooks import delivering_zeros


class Shards:
    """The units of FSDP2 that have an optimizer's parameters; none under tensor parallelism alone.

    Args:
        optimizer: the optimizer.
        units: those that have any of its parameters.

    Raises:
        ArgumentValueError: FSDP2 has some of the trainable parameters only.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
        self.optimizer, self._units = optimizer, units
        self.workers = max((unit.shards * unit.copies for unit in units), default=1)
        """The workers that have different items."""
        self._require_all(self._positions(), units)
        self.note()

    def add(self, parameters: Sequence[Tensor], waiting: bool) -> None:
        """Take the units of new `parameters` on; `waiting`: FSDP2 was told to wait, but the new units were not.

        Raises:
            ArgumentValueError: FSDP2 does not have them all, or a new unit does not wait.
        """
        own = [*self._positions(), *parameters]
        units = units_holding(own)
        self._require_all(own, units)
        if waiting and len(units) > len(self._units):
            fix = "Give the optimizer all parameters before gradaccum.wrap, frozen ones too."
            found = "parameters of a part of the model that reduces each micro-batch"
            raise explain(ArgumentValueError, "param_group", expected="parameters that gradient_sync= waits for", found=found, fix=fix)
        self._units = units
        self.require_averages()
        self.note()

    def require_averages(self) -> None:
        """Raise `UsageError` where the installed torch adds up gradients that FSDP2 averages."""
        if any(unit.is_summed_by_gloo for unit in self._units):
            found = f"torch {torch.__version__}, in which gloo adds up what FSDP2 averages"
            raise explain(UsageError, "optimizer", expected="torch 2.11 or newer for FSDP2 on a CPU", found=found, fix="Install it.")

    def note(self) -> None:
        """A window begins: its gradients have the divisors that are set now."""
        self._noted = [unit.divide_factor for unit in self._units]

    def divisors(self) -> list[float]:
        """By what FSDP2 divides the sum over the workers, for each parameter by position; 1 where it has no part.

        Raises:
            UsageError: it was changed in the open window, or cannot be told.
        """
        if self._noted != [unit.divide_factor for unit in self._units]:
            raise _changed_error()
        known = {id(parameter): _divisor(unit) for unit in self._units for parameter in unit.parameters}
        return [known.get(id(parameter), 1.0) for parameter in self._positions()]

    def require_reduced(self) -> None:
        """FSDP2 has reduced all gradients.

        Raises:
            UsageError: the user told it to wait.
        """
        if any(unit.held() for unit in self._units):
            fix = 'Leave the call out, and write gradaccum.wrap(optimizer, ..., module=fsdp_model, gradient_sync="window") to reduce once '
            fix += "per window. The window cannot be closed: call opt.discard() on every worker."
            expected, found = "gradients that are reduced when the window ends", "gradients that FSDP2 was told not to reduce"
            raise explain(UsageError, "set_requires_gradient_sync, set_requires_all_reduce", expected=expected, found=found, fix=fix)

    def delivering_zeros(self) -> AbstractContextManager[None]:
        """Inside, a backward pass gathers and reduces as on the other workers, and adds nothing."""
        return delivering_zeros(whole for unit in self._units for _, whole in unit.whole_parameters())

    def drop(self) -> None:
        """Forget what FSDP2 has not reduced."""
        for unit in self._units:
            unit.drop()

    def _positions(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _require_all(self, parameters: Sequence[Tensor], units: Sequence[Unit]) -> None:
        if self.workers == 1:
            return
        own = {id(parameter) for unit in units for parameter in unit.parameters}
        others = sum(parameter.requires_grad and id(parameter) not in own for parameter in parameters)
        if others:
            found = f"{others} trainable parameters beside it, whose gradients nobody reduces"
            fix = "Call fully_shard(model) on the whole model too, or freeze them, or give them an optimizer of their own."
            raise explain(ArgumentValueError, "optimizer", expected="parameters that fully_shard has", found=found, fix=fix)


def _divisor(unit: Unit) -> float:
    if unit.reduces_by_hook:
        fix = "Leave set_all_reduce_hook out, and use a mesh of two dimensions."
        raise explain(UsageError, "set_all_reduce_hook", expected="no hook that reduces gradients", found="one", fix=fix)
    factor = unit.divide_factor
    if factor is None:
        return float(unit.shards * unit.copies)
    if unit.shards == 1:  # Where FSDP2 only sums, it is a division of its own, which that mesh has twice.
        found = "one beside a shard dimension of size 1, where torch divides by it twice"
        fix = "Leave set_gradient_divide_factor out."
        raise explain(UsageError, "set_gradient_divide_factor", expected="no factor on this mesh", found=found, fix=fix)
    return float(factor)


def _changed_error() -> UsageError:
    return explain(
        UsageError,
        "set_gradient_divide_factor",
        expected="a call before gradaccum.wrap",
        found="another factor than when the window began",
        fix="Call opt.discard() on every worker: windows after it have the new factor.",
    )
