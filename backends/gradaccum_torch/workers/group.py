"""The end of a window over all workers: its numbers and small sums in one reduction, its large sums in one each.

Workers may hold different numbers of micro-batches, or none, and a parameter may have a gradient on some of them only. So the numbers tell
each worker which sums exist anywhere, and a worker without one of these adds zeros. The small sums that ride with the numbers are guessed
to be those of the last window, which all workers know. After a wrong guess, numbers and small sums are sent once more. So what is added up,
and in which layout, depends on this window alone, and a resumed run has the same bits.

A parameter that is sharded over the same workers, such as the head of a large classifier, has the gradient of all items on each of them.
Its sum is left as it is, and its norm is that of all shards.

`DistributedDataParallel` reduces while the last backward pass still runs. Here no backward pass is known to be the last: the user may call
``backward`` again, or clear its gradients, and a worker may flush instead. On CPUs the overlap gains nothing anyway: the backward pass
keeps the cores busy.

A worker that runs out of data calls ``flush``. It then takes part in the windows of the others, with nothing, until they flush too: so all
make the same updates, however many micro-batches each has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError
from gradaccum.kit import (
    State,
    explain,
    joined,
    missing_worker_error,
    rate_bits,
    require_same_rates,
    torn_window_error,
    update_due_error,
)
from gradaccum_torch.hooks import delivering_zeros
from gradaccum_torch.torch_private import is_sharded, module_averaging, send_buffers
from gradaccum_torch.workers.checks import require_none_ignored, require_parameters, require_same_workers
from gradaccum_torch.workers.numbers import Numbers, decode, encode
from gradaccum_torch.workers.reduction import FirstBucket, all_reduce, riders
from gradaccum_torch.workers.workers import Joined, Sums, Workers, learning_rates, require_no_join


@final
class WorkerGroup(Workers):
    """The workers of one process group, as the window of one of them sees them.

    Args:
        group: the group that reduces.
        optimizer: the optimizer that is wrapped.
        module: the module whose buffers the first worker sends to all at a window's end; None: the workers have no common module.
    """

    def __init__(self, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer, module: DistributedDataParallel | None = None) -> None:
        self.group: dist.ProcessGroup = group
        self._optimizer, self._module = optimizer, module
        self._flushing = self._all_flush = False
        self.several, self._device = True, next(each.device for group in optimizer.param_groups for each in group["params"])
        self.place = self._rank, self._workers = dist.get_rank(group), dist.get_world_size(group)
        self._riders: list[int] = []
        """The positions of the sums that rode with the numbers in the last window: the same on all workers, as each end is collective."""
        self._hold("own")

    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor], numbers: Sequence[float]) -> Joined:
        if self.joined:
            return Joined(fields, sums, numbers)
        if self._module is not None:
            require_no_join(self._module)
        if any(each.grad is not None and each.grad.requires_grad for group in self._optimizer.param_groups for each in group["params"]):
            self.require_no_graph()
        try:
            added, whole = self._added_up(fields, sums, zeros, numbers)
            if added.micro_batches and self._module is not None:
                send_buffers(self._module)
        except UsageError:  # Raised on every worker, before any sum has changed.
            raise
        except RuntimeError as error:
            self._hold("torn")
            raise missing_worker_error(fields, self._rank) from error
        self._all_flush = added.flushes == self._workers
        self._hold("of all" if added.micro_batches else "own")
        return Joined(joined(fields, added.weight, added.overflow), whole, added.others)

    def flush(self, close: Callable[[], None], between: Callable[[], None], is_open: bool) -> None:
        self._flushing = True
        try:
            close()
            while not self._all_flush:
                between()
                close()
        finally:
            self._flushing = False

    def window_ended(self) -> None:
        self._hold("own")

    def require_own_sum(self, call: str) -> None:
        if self.joined:
            raise update_due_error(call)
        if self.not_own:
            raise torn_window_error(call)

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        whole, sharded = ([each for each in parameters if is_sharded(each) is split] for split in (False, True))
        if self._module is not None:
            require_parameters(self._module, list(self._module.parameters()), whole)
            require_none_ignored(self._module, whole)
        require_same_workers(self.group, sharded)

    def taking_part(self) -> AbstractContextManager[None] | None:
        own = [each for group in self._optimizer.param_groups for each in group["params"]]
        return None if self._module is not None or module_averaging(own) is None else delivering_zeros(own)

    def require_no_closure(self) -> None:
        # The inner optimizer reads the gradient of a closure at once, before any worker could add its own.
        fix = "Leave module= out and let the module reduce in every backward pass, which is right with steps=1."
        raise explain(UsageError, "closure", expected="no closure beside module= or process_group=", found="one", fix=fix)

    def require_no_copy(self) -> None:
        expected = "an optimizer without module= and process_group=, as a copy has no part in the process group"
        fix = "Save opt.state_dict(), and wrap anew where it is loaded."
        raise explain(UsageError, "copy, pickle", expected=expected, found="one with several workers", fix=fix)

    def _hold(self, held: Literal["own", "of all", "torn"]) -> None:
        """The open window's sum is this worker's; or that of all workers, until their update is made; or neither: the reduction failed."""
        self.joined, self.not_own = held == "of all", held != "own"

    @torch.no_grad()
    def _added_up(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor], others: Sequence[float]) -> tuple[Numbers, Sums]:
        rates = learning_rates(self._optimizer)
        sparse = [index for index, total in enumerate(sums) if total is not None and total.is_sparse]
        sums = [None if index in sparse else total for index, total in enumerate(sums)]
        counts = len(sparse), *rate_bits(rates)
        present = [total is not None for total in sums]
        own = encode(fields, self._flushing, present, self._rank, self._workers, others, counts)
        whole, guess = sums, [index for index in self._riders if index < len(sums)]
        while True:
            whole = _filled(whole, guess, zeros)
            bucket = FirstBucket(own, [total for index in guess if (total := whole[index]) is not None], self._device, self.group)
            numbers = decode(bucket.numbers(), self._workers, len(others), len(counts))
            if numbers.counts[0]:
                raise _sparse_error()
            if numbers.micro_batches:
                require_same_rates(rates, numbers.counts[1:], self._workers, self._rank)
            whole = _filled(whole, [index for index, there in enumerate(numbers.present) if there], zeros, others=False)
            self._riders = riders(whole, self._device)
            if self._riders == guess:
                break
            guess = self._riders
        bucket.unpack()
        rode, rest = set(guess), enumerate(whole)
        all_reduce([total for index, total in rest if total is not None and index not in rode and not is_sharded(total)], self.group)
        return numbers, whole


def _filled(sums: Sums, positions: Sequence[int], zeros: Callable[[int], Tensor], others: bool = True) -> list[Tensor | None]:
    """`sums` with one at each of `positions`, empty where there was none; without `others` none elsewhere."""
    filled: list[Tensor | None] = list(sums) if others else [None] * len(sums)
    for index in positions:
        total = sums[index]
        filled[index] = zeros(index) if total is None else total
    return filled


def _sparse_error() -> UsageError:
    """The error for sparse sums: workers hold different rows, which a reduction of dense memory cannot add up."""
    fix = "Build the layer with dense gradients: torch.nn.Embedding(..., sparse=False)."
    found = "a sparse one on some worker"
    return explain(UsageError, ".grad", expected="dense gradients beside module= and process_group=", found=found, fix=fix)
