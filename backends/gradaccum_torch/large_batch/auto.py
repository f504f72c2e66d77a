"""``micro_batch_size="auto"``: when memory runs out, the window starts over with micro-batches of half the size.

The window itself puts everything back when it raises. What is left to do here is to tell an error of memory from others, to free what the
failed attempt still holds, and to make all workers choose one size. A worker that ran out of memory alone would start over while the others
wait for it in the window's reduction. So all of them vote after each attempt, before anything is delivered.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum.kit import Division, explain, free_frames, too_small_error, unknown_limit_error
from gradaccum_torch.large_batch.batch import LargeBatch
from gradaccum_torch.large_batch.memory_limit import within
from gradaccum_torch.large_batch.vote import ElsewhereShortError, Vote, workers_of_call
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.versions import Versions

T = TypeVar("T")
Attempt = Callable[[int, Callable[[], None]], T]
"""``attempt(size, agreed)`` runs the window in micro-batches of `size` items. It calls ``agreed()`` when its last backward pass has ended,
before it delivers anything. If anything raises, it puts back all that it has moved, and raises that."""

_ANY_SIZE = 2**31 - 1
"""What a worker without items can do with in a vote for the smallest size."""
_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Memory that runs out elsewhere than in a device's caching allocator is told by the text alone."""


def run_divided(
    run: Callable[[Division, Callable[[], None]], T],
    division: Division,
    function: Callable[..., Any],
    large: LargeBatch,
    modules: Iterable[nn.Module],
    optimizer: AccumulatingOptimizer | None,
) -> T:
    """What ``run(division, agreed)`` returns; where `division` leaves the size open, with the largest micro-batch that fits.

    Args:
        run: the window, as `Attempt`.
        division: what the user asks for.
        function: what is called with each micro-batch.
        large: the batch.
        modules: those that `function` is known to use.
        optimizer: whose window is filled, if there is one.

    Raises:
        ArgumentValueError: as `with_largest_size`.
        UsageError: as there; or the function wrote into the batch, and then memory ran out.
    """
    sizes = division.micro_batch_size
    if not isinstance(sizes, AutoMicroBatchSize):
        return run(division, _at_once)

    def attempt(size: int, agreed: Callable[[], None]) -> T:
        if batch.moved():
            raise _written_error()
        return run(division._replace(micro_batch_size=size), agreed)

    assert large.items is not None
    tensors = large.tensors()
    batch = Versions(tensors)
    existing = [*tensors, *(each for module in modules for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)))]
    return with_largest_size(attempt, sizes, key_of(function, tensors), large.items, existing, workers_of_call(optimizer))


def has_nothing_to_share(large: LargeBatch, optimizer: AccumulatingOptimizer | None) -> bool:
    """True if `large` is empty and other workers share the window, who would wait for this one."""
    return large.items == 0 and optimizer is not None and optimizer.whole_window().process_group is not None


def share_nothing(division: Division, optimizer: AccumulatingOptimizer) -> Tensor:
    """Take part in the other workers' call without an item, in their votes too; returns the loss, 0.

    Raises:
        UsageError: not even one item fits on another worker; or another worker raised; or this worker's window is open.
    """
    sizes, agreed, vote = division.micro_batch_size, False, Vote(workers_of_call(optimizer))
    with optimizer.whole_window():
        while isinstance(sizes, AutoMicroBatchSize) and not agreed:
            vote.begin(_ANY_SIZE)
            try:
                vote.fits()
                agreed = True
            except ElsewhereShortError as error:
                if not error.size:
                    raise too_small_error(sizes.memory_limit) from error
    optimizer.flush()
    return torch.zeros(())


def with_largest_size(
    attempt: Attempt[T],
    sizes: AutoMicroBatchSize,
    key: Hashable,
    items: int,
    existing: Sequence[Tensor],
    workers: dist.ProcessGroup | None = None,
) -> T:
    """What `attempt` returns with the largest micro-batch that fits; the size is noted in `sizes`.

    Args:
        attempt: runs the window.
        sizes: remembers what fitted `key`.
        key: what the need of memory depends on; see `key_of`.
        items: in the batch.
        existing: the tensors of the batch and of modules, whose memory is there in any case.
        workers: the process group whose workers choose together; None: this process alone.

    Raises:
        ArgumentValueError: no limit of memory is known.
        UsageError: not even one item fits; or another worker raised.
        BaseException: whatever else `attempt` raises.
    """
    _require_limit(sizes, existing)
    vote, size = Vote(workers), sizes.start(key, items)
    while True:
        vote.begin(size)
        try:
            with within(sizes.memory_limit, existing):
                made = attempt(size, vote.fits)
        except BaseException as error:
            smaller = _after(error, size, sizes, vote)
            if smaller is None:
                raise
            free_frames(error)
        else:
            sizes.remember(key, size)
            return made
        size = smaller
        _free()


def key_of(function: Callable[..., Any], batch: Iterable[Any]) -> Hashable:
    """What a call's need of memory depends on: the loss function's code, and dtype, device and shape of the batch's tensors.

    Lengths are rounded up to powers of two, so that batches of ever other lengths need no search each: a size that fitted a shorter
    sequence is halved where the longer one does not fit, and stays so.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", type(function))
    tensors = (each for each in batch if isinstance(each, Tensor))
    return code, tuple((each.dtype, each.device, tuple(1 << (length - 1).bit_length() for length in each.shape[1:])) for each in tensors)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch may help."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS))


def _after(error: BaseException, size: int, sizes: AutoMicroBatchSize, vote: Vote) -> int | None:
    """The size to go on with after `error`; None: it is to be raised as it is.

    Raises:
        UsageError: no smaller size is left, here or on another worker; or another worker raised.
    """
    if isinstance(error, ElsewhereShortError):
        smaller = error.size
    elif vote.cast or not is_out_of_memory(error):
        vote.raised()
        return None
    else:
        smaller = vote.short(sizes.after_failure(size) if size > 1 else 0)
    try:
        return smaller or sizes.after_failure(1)
    except UsageError as named:
        raise named from error


def _free() -> None:
    """Give the memory of cycles back, and what the device's allocator caches in pieces."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _at_once() -> None:
    """Nobody else is asked where the size is given."""


def _written_error() -> UsageError:
    """The error for a second attempt after the first one has changed the batch."""
    expected = "a function that leaves its batch as it is, so that the window can start over where memory runs out"
    fix = "Write out of place, x = x * 2 for x.mul_(2), or give a number of items; and make the batch anew: it was changed."
    return explain(UsageError, "micro_batch_size", expected=expected, found="a batch that the function wrote into", fix=fix)


def _require_limit(sizes: AutoMicroBatchSize, existing: Sequence[Tensor]) -> None:
    """A CPU's memory is the whole machine's, and the system kills who asks for more of it."""
    if sizes.memory_limit is None and all(each.is_cpu for each in existing):
        raise unknown_limit_error("the CPU")
