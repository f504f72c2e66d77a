"""``micro_batch_size="auto"``: when memory runs out, the window starts over with
micro-batches of half the size.

All workers vote on one size after each attempt, before anything is delivered: one that
started over alone would leave the others waiting.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum import ArgumentValueError, AutoMicroBatchSize, UsageError
from gradaccum.kit import Division, explain, free_frames, too_small_error
from gradaccum_torch.large_batch.batch import LargeBatch
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import Versions

T = TypeVar("T")
_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
"""Memory that runs out elsewhere than in a device's caching allocator is told by the
text alone.
"""


def run_divided(
    run: Callable[[Division, Callable[[], None]], T],
    division: Division,
    function: Callable[..., Any],
    large: LargeBatch,
    modules: Iterable[nn.Module],
    optimizer: AccumulatingOptimizer | None,
) -> T:
    """Return ``run(division, agreed)``; if `division` leaves the size open, with the
    largest micro-batch that fits.

    `run` calls ``agreed()`` after its last backward pass, before it delivers anything;
    if anything raises, it restores everything.
    """
    sizes = division.micro_batch_size
    if not isinstance(sizes, AutoMicroBatchSize):
        return run(division, lambda: None)
    assert large.items is not None
    tensors = large.tensors
    require_device(
        sizes,
        [
            *tensors,
            *(each for module in modules for each in module.parameters(recurse=False)),
        ],
    )
    batch = Versions(tensors)
    key = key_of(function, tensors)
    workers = workers_of_call(optimizer)
    size = sizes.start(key, large.items)
    while True:
        if batch.moved():
            raise _written_error()
        vote = Vote(workers)
        try:
            made = run(division._replace(micro_batch_size=size), vote.fits)
        except BaseException as error:
            size = _smaller(error, size, sizes, vote)
            free_frames(error)
        else:
            sizes.remember(key, size)
            return made
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def has_nothing_to_share(
    large: LargeBatch, optimizer: AccumulatingOptimizer | None
) -> bool:
    """True if `large` is empty and other workers would wait for this one."""
    return (
        large.items == 0
        and optimizer is not None
        and optimizer.whole_window().process_group is not None
    )


def share_nothing(division: Division, optimizer: AccumulatingOptimizer) -> Tensor:
    """Take part in the other workers' call and votes; return the loss, 0."""
    sizes = division.micro_batch_size
    least = 1
    vote = Vote(workers_of_call(optimizer))
    with optimizer.whole_window():
        while isinstance(sizes, AutoMicroBatchSize) and least < FITS:
            least = vote.least(FITS)
            if not least:
                raise too_small_error(sizes.memory_limit)
    optimizer.flush()
    return torch.zeros(())


def key_of(function: Callable[..., Any], batch: Iterable[Any]) -> Hashable:
    """Return what a call's memory depends on: the loss function's code, and dtype,
    device and shape of the batch's tensors.

    Lengths are rounded up to powers of two.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", type(function))
    tensors = (each for each in batch if isinstance(each, Tensor))
    return code, tuple(
        (
            each.dtype,
            each.device,
            tuple(1 << (length - 1).bit_length() for length in each.shape[1:]),
        )
        for each in tensors
    )


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )


def _smaller(
    error: BaseException, size: int, sizes: AutoMicroBatchSize, vote: Vote
) -> int:
    """Return the size that all workers try next, or raise `error` if it is none of
    memory, or no size is left.
    """
    if isinstance(error, ElsewhereShortError):
        smaller = error.size
    elif vote.cast or not is_out_of_memory(error):
        if not vote.cast:
            with suppress(RuntimeError):
                vote.least(RAISED)
        raise error
    else:
        smaller = vote.least(sizes.after_failure(size) if size > 1 else 0)
    if not smaller:
        raise too_small_error(sizes.memory_limit) from error
    return smaller


def _written_error() -> UsageError:
    expected = (
        "a function that leaves its batch as it is, so that the window can start over"
        " where memory runs out"
    )
    fix = (
        "Write out of place, x = x * 2 for x.mul_(2), or give a number of items; and"
        " make the batch anew: it was changed."
    )
    return explain(
        UsageError,
        "micro_batch_size",
        expected=expected,
        found="a batch that the function wrote into",
        fix=fix,
    )


def require_device(sizes: AutoMicroBatchSize, tensors: Iterable[Tensor]) -> None:
    """Raise unless a device's allocator has the limit: where a CPU's memory runs out,
    the system kills.
    """
    if sizes.memory_limit is not None or all(each.is_cpu for each in tensors):
        fix = (
            "On a CPU write a number of items. On a device leave memory_limit out:"
            " torch.cuda.set_per_process_memory_fraction limits it."
        )
        if sizes.memory_limit is None:
            found = "a batch and a model on the CPU"
        else:
            found = f"memory_limit={sizes.memory_limit}"
        raise explain(
            ArgumentValueError,
            "micro_batch_size",
            expected="a device that says when its memory runs out",
            found=found,
            fix=fix,
        )


# The vote of the workers of a process group for one size of micro-batch: after each
# attempt the least number that a worker says holds.
#
# An attempt that succeeded here counts for nothing if another worker ran out of memory:
# all start over with the smallest size.


FITS, RAISED = 2**31 - 1, -1
"""Said in place of the next size: the attempt has fitted, or has raised another error
than of memory. 0: one item does not fit.
"""


class ElsewhereShortError(Exception):
    """Another worker ran out of memory."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"another worker ran out of memory; all go on with micro-batches of {size}"
            " items"
        )
        self.size = size


class Vote:
    """The vote of all workers on one attempt."""

    def __init__(self, workers: dist.ProcessGroup | None) -> None:
        self._workers = workers
        self.cast = False

    def fits(self) -> None:
        if (least := self.least(FITS)) < FITS:
            raise ElsewhereShortError(least)

    def least(self, said: int) -> int:
        """Return the least number that a worker said, or raise if another worker
        raised; collective.
        """
        self.cast = True
        if self._workers is None:
            return said
        number = torch.tensor(said, device=_device(self._workers))
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self._workers)
        least = int(number)
        if least == RAISED != said:
            found = "a worker that raised another error than of its memory"
            fix = "See that worker's own error. Nothing was delivered."
            raise explain(
                UsageError,
                "micro_batch_size",
                expected="every worker's window to run",
                found=found,
                fix=fix,
            )
        return least


def workers_of_call(
    optimizer: AccumulatingOptimizer | None,
) -> dist.ProcessGroup | None:
    """Return the group that chooses together: the optimizer's, else the default one;
    None: nobody else.
    """
    if (
        optimizer is not None
        and (group := optimizer.whole_window().process_group) is not None
    ):
        return group
    several = (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    )
    return dist.group.WORLD if several else None


def _device(workers: dist.ProcessGroup) -> torch.device:
    if (
        dist.get_backend(workers) in ("gloo", "mpi")
        or not torch.accelerator.is_available()
    ):
        return torch.device("cpu")
    return torch.device(
        str(torch.accelerator.current_accelerator()),
        torch.accelerator.current_device_index(),
    )
