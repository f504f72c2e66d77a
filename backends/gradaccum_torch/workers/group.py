"""The end of a window over all workers: first its few numbers, then its sums, one reduction each.

Workers may hold different numbers of micro-batches, or none, and a parameter may have a gradient on some of them only. So the first
reduction tells each worker which sums exist anywhere, and a worker without one of these adds zeros.

A worker that runs out of data calls ``flush``. It then takes part in the windows of the others, with nothing, until they flush too: so all
make the same updates, however many micro-batches each has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError
from gradaccum.kit import Fields, State, explain, joined
from gradaccum_torch.workers.reduction import all_reduce
from gradaccum_torch.workers.workers import Sums, Workers


@final
class WorkerGroup(Workers):
    """The workers of one process group, as the window of one of them sees them.

    Args:
        group: the group that reduces.
        module: the module whose buffers the first worker sends to all after an update.
    """

    def __init__(self, group: dist.ProcessGroup, module: DistributedDataParallel) -> None:
        self._group, self._module = group, module
        self._flushing = self._all_flush = False
        self.several, self._device = True, next(module.parameters()).device
        self._hold("own")

    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor]) -> tuple[Fields, Sums]:
        if self.joined:
            return fields, sums
        _require_dense(sums)
        try:
            weight, overflows, micro_batches, flushes, *present = self._added_up(fields, sums)
            whole = [zeros(index) if total is None and present[index] else total for index, total in enumerate(sums)]
            all_reduce([total for total in whole if total is not None], self._group)
        except RuntimeError as error:
            self._hold("torn")
            raise alone_error(fields, dist.get_rank(self._group)) from error
        self._all_flush = flushes == dist.get_world_size(self._group)
        self._hold("of all" if micro_batches else "own")
        # The next forward pass sends the buffers, as after a reduction of the module's own.
        self._module.require_forward_param_sync = True
        return joined(fields, weight, overflows > 0), whole

    def flush(self, close: Callable[[], None], is_open: bool) -> None:
        self._flushing = True
        try:
            close()
            while not self._all_flush:
                close()
        finally:
            self._flushing = False

    def window_ended(self) -> None:
        self._hold("own")

    def require_own_sum(self, call: str) -> None:
        if self.joined:
            fix = "Call opt.flush() on every worker to make the update that is due, or opt.discard() on every worker."
            found = "a window that is added up over all workers, whose update raised"
            raise explain(UsageError, call, expected="to be called before the window's end", found=found, fix=fix)
        if self.not_own:
            fix = "Load the last checkpoint on every worker, or call opt.discard()."
            raise explain(UsageError, call, expected="a whole sum", found="one whose reduction over the workers failed", fix=fix)

    def require_no_closure(self) -> None:
        # The inner optimizer reads the gradient of a closure at once, before any worker could add its own.
        fix = "Leave module= out and let the module reduce in every backward pass, which is right with steps=1."
        raise explain(UsageError, "closure", expected="no closure beside module=", found="one", fix=fix)

    def require_no_copy(self) -> None:
        expected = "an optimizer without module=, as a copy has no part in the process group"
        fix = "Save opt.state_dict(), and wrap anew where it is loaded."
        raise explain(UsageError, "copy, pickle", expected=expected, found="one with module=", fix=fix)

    def _hold(self, held: Literal["own", "of all", "torn"]) -> None:
        """The open window's sum is this worker's; or that of all workers, until their update is made; or neither: the reduction failed."""
        self.joined, self.not_own = held == "of all", held != "own"

    def _added_up(self, fields: State, sums: Sums) -> list[float]:
        present = (total is not None for total in sums)
        numbers = [fields.weight, fields.overflow, fields.micro_step, self._flushing, *present]
        vector = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(vector, group=self._group)
        added: list[float] = vector.tolist()
        return added


def _require_dense(sums: Sums) -> None:
    """No sum is sparse: workers hold different rows, which a reduction of dense memory cannot add up.

    Raises:
        UsageError: one is.
    """
    if any(total is not None and total.is_sparse for total in sums):
        fix = "Build the layer with dense gradients: torch.nn.Embedding(..., sparse=False)."
        raise explain(UsageError, ".grad", expected="dense gradients beside module=", found="a sparse one", fix=fix)


def alone_error(fields: State, rank: int) -> UsageError:
    """The error for a window's end to which another worker did not come."""
    here = f"{fields.micro_step} micro-batches of update {fields.optimizer_step + 1}"
    return explain(
        UsageError,
        f"the end of a window on rank {rank}",
        expected="every worker of the process group to end its window too, by step() or flush()",
        found=f"a reduction that failed or timed out, with {here} here",
        fix="Call flush() on every worker when its data end: it takes part in the windows of the others until they flush too.",
    )
