"""Implements ``micro_batch_size="auto"``: when memory runs out, the call starts over
with micro-batches of half the size.

After each attempt, all workers agree on a common size before any gradient is added to
``.grad``. If only one worker started over, the other workers would wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum.kit import Division, free_frames, too_small_error
from gradaccum_torch.large_batch.batch import LargeBatch
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import Versions, processes

T = TypeVar("T")
MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
"""Messages of out-of-memory errors that do not come from a caching allocator."""


def run_divided(
    run: Callable[[Division, Callable[[], None]], T],
    division: Division,
    function: Callable[..., Any],
    large: LargeBatch,
    optimizer: AccumulatingOptimizer | None,
) -> T:
    """Return ``run(division, agree)``. If `division` asks for an automatic size, call
    `run` with smaller and smaller micro-batches until they fit into memory.

    `run` must call ``agree()`` after its last backward pass, before it adds any
    gradient to ``.grad``. If anything raises, `run` must restore everything.
    """
    sizes = division.micro_batch_size
    if not isinstance(sizes, AutoMicroBatchSize):
        return run(division, lambda: None)
    versions = Versions(large.tensors)
    key = key_of(function, large.tensors)
    workers = workers_of_call(optimizer)
    size = sizes.start(key, large.items)
    while True:
        vote = Vote(workers)
        try:
            result = run(division._replace(micro_batch_size=size), vote.require_fit)
        except BaseException as error:
            size = smaller_size(error, size, sizes, vote)
            free_frames(error)
        else:
            sizes.remember(key, size)
            return result
        if versions.moved():
            raise UsageError(
                "micro_batch_size: expected a function that does not modify its batch,"
                " because the call starts over when memory runs out; got a batch that"
                " the function wrote into. Write x = x * 2 instead of x.mul_(2), or"
                " set micro_batch_size to a number of items. Create the batch again"
                " before the next call, because it was changed."
            )
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def has_nothing_to_share(large: LargeBatch, optimizer: AccumulatingOptimizer) -> bool:
    """True if this worker's batch is empty, but other workers wait for this worker."""
    return not large.items and optimizer.whole_window().process_group is not None


def share_nothing(division: Division, optimizer: AccumulatingOptimizer) -> Tensor:
    """Take part in the other workers' window although this worker's batch is empty.
    Return the loss 0.
    """
    sizes = division.micro_batch_size
    with optimizer.whole_window():
        vote = Vote(workers_of_call(optimizer))
        while isinstance(sizes, AutoMicroBatchSize):
            size = vote.smallest(FITS)
            if size == FITS:
                break
            if not size:
                raise too_small_error(sizes.memory_limit)
    optimizer.flush()
    return torch.zeros(())


def key_of(function: Callable[..., Any], batch: Iterable[Tensor]) -> Hashable:
    """Return a key for calls that need about the same memory per item. It consists of
    the loss function's code, and the dtypes, devices and shapes of the batch's tensors.

    The lengths in the shapes are rounded up to powers of two.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", type(function))
    tensors = []
    for tensor in batch:
        lengths = tuple(1 << (length - 1).bit_length() for length in tensor.shape[1:])
        tensors.append((tensor.dtype, tensor.device, lengths))
    return code, tuple(tensors)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in MESSAGES
    )


def smaller_size(
    error: BaseException, size: int, sizes: AutoMicroBatchSize, vote: Vote
) -> int:
    """Return the size of micro-batch that all workers try next. Raise `error` if it is
    not an out-of-memory error. Raise another error if no smaller size is left.
    """
    if isinstance(error, OtherWorkerShortError):
        next_size = int(error.args[0])
    elif vote.was_cast:
        raise error
    elif is_out_of_memory(error):
        next_size = vote.smallest(sizes.after_failure(size) if size > 1 else 0)
    else:
        with suppress(RuntimeError):
            vote.smallest(RAISED)
        raise error
    if not next_size:
        raise too_small_error(sizes.memory_limit) from error
    return next_size


# After each attempt, every worker of a process group votes for a size of micro-batch,
# and all workers use the smallest of these sizes. An attempt that fitted on this worker
# is repeated if another worker ran out of memory.

FITS = 2**31 - 1
"""A worker's vote if the micro-batches fitted into its memory."""
RAISED = -1
"""A worker's vote if it raised an error other than out of memory. A vote of 0 means
that a single item does not fit into memory.
"""


class OtherWorkerShortError(Exception):
    """Another worker ran out of memory. The argument is the size of micro-batch that
    all workers try next.
    """


class Vote:
    """The vote of all workers on the size of micro-batch after one attempt."""

    def __init__(self, workers: dist.ProcessGroup | None) -> None:
        self._workers = workers
        self.was_cast = False

    def require_fit(self) -> None:
        size = self.smallest(FITS)
        if size < FITS:
            raise OtherWorkerShortError(size)

    def smallest(self, size: int) -> int:
        """Vote for `size`, and return the smallest size that any worker has voted for.
        Raise if another worker has raised an error. Collective.
        """
        self.was_cast = True
        if self._workers is None:
            return size
        sizes = [size] * dist.get_world_size(self._workers)
        dist.all_gather_object(sizes, size, group=self._workers)
        smallest = min(sizes)
        if smallest == RAISED != size:
            raise UsageError(
                "micro_batch_size: expected every worker to complete its window; got a"
                " worker that raised an error other than out of memory. See that"
                " worker's error. No worker's .grad was changed."
            )
        return smallest


def workers_of_call(
    optimizer: AccumulatingOptimizer | None,
) -> dist.ProcessGroup | None:
    """Return the process group whose workers choose the size together: the optimizer's
    group, or else the default group. Return None if there is a single process.
    """
    if optimizer is not None:
        group = optimizer.whole_window().process_group
        if group is not None:
            return group
    return dist.group.WORLD if processes() > 1 else None
