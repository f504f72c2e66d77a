"""The end of a window over all workers: first its few numbers, then its sums, one reduction each.

Workers may hold different numbers of micro-batches, none at all included, and a parameter may have got a gradient on some of them only. So
the first reduction tells each worker which sums there are anywhere; where it has none itself it adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError
from gradaccum.kit import State, explain
from gradaccum_torch.workers.reduction import all_reduce


class Joined(NamedTuple):
    """A window of all workers."""

    fields: State
    """The state of this worker with the weight and the overflow flag of all."""
    micro_batches: int
    """How many micro-batches the window holds, over all workers."""
    all_flushing: bool
    """Every worker came by ``flush``: none has a window to close after this one."""
    sums: list[Tensor | None]
    """By position: the sum over all workers, None where no worker has one."""


class Workers:
    """The workers of one process group.

    Args:
        group: the group that reduces.
        module: the module whose buffers one worker sends to all after an update.
    """

    def __init__(self, group: dist.ProcessGroup, module: DistributedDataParallel) -> None:
        self._group, self._module = group, module

    def join(self, fields: State, sums: Sequence[Tensor | None], empty: Callable[[int], Tensor], *, flushing: bool) -> Joined:
        """The window of all workers. Collective.

        Args:
            fields: this worker's state.
            sums: this worker's, by position; replaced in place by those of all.
            empty: a sum of zeros by position.
            flushing: whether this worker came by ``flush``.

        Raises:
            UsageError: a worker did not come before the process group's timeout.
        """
        try:
            weight, overflows, micro_batches, flushes, *present = self._add_up(fields, sums, flushing)
            whole = [empty(i) if total is None and present[i] else total for i, total in enumerate(sums)]
            all_reduce([total for total in whole if total is not None], self._group)
        except RuntimeError as error:
            raise _alone_error(fields, dist.get_rank(self._group)) from error
        self._module.require_forward_param_sync = True
        return Joined(
            fields._replace(weight=weight, overflow=overflows > 0), int(micro_batches), flushes == dist.get_world_size(self._group), whole
        )

    def _add_up(self, fields: State, sums: Sequence[Tensor | None], flushing: bool) -> list[float]:
        numbers = [fields.weight, fields.overflow, fields.micro_step, flushing, *(total is not None for total in sums)]
        vector = torch.tensor(numbers, dtype=torch.float64, device=self._module.device or "cpu")
        dist.all_reduce(vector, group=self._group)
        added: list[float] = vector.tolist()
        return added


def _alone_error(fields: State, rank: int) -> UsageError:
    return explain(
        UsageError,
        f"the end of a window on rank {rank}",
        expected="every worker of the process group to end its window too, by step() or flush()",
        found=f"none that came in time, or one that failed, after {fields.micro_step} micro-batches of update {fields.optimizer_step + 1} here",
        fix="Call flush() on every worker when its data end: it takes part in the windows of the others until they flush too.",
    )
