"""``micro_batch_size="auto"``: when memory runs out, the window starts over with micro-batches of half the size.

The window restores everything when it raises. This module recognises an out-of-memory error, frees what the failed attempt holds, and makes
all workers choose one size: they vote after each attempt, before anything is delivered. A worker that started over alone would leave the
others waiting in the window's reduction.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum.kit import Division, explain, free_frames, too_small_error, unknown_limit_error
from gradaccum_torch.large_batch.batch import LargeBatch
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.private import base_of, elements, local, version
from gradaccum_torch.sums import Versions

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
    """Return ``run(division, agreed)``; if `division` leaves the size open, with the largest micro-batch that fits."""
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
    """True if `large` is empty and other workers share the window, and would wait for this worker."""
    return large.items == 0 and optimizer is not None and optimizer.whole_window().process_group is not None


def share_nothing(division: Division, optimizer: AccumulatingOptimizer) -> Tensor:
    """Take part in the other workers' call and votes without an item; return the loss, 0."""
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
    """Return what `attempt` returns with the largest micro-batch that fits; note the size in `sizes`."""
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
    """Return what a call's memory depends on: the loss function's code, and dtype, device and shape of the batch's tensors.

    Lengths are rounded up to powers of two, so that not every length needs a search. A size that does not fit a longer sequence is halved,
    and stays so.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", type(function))
    tensors = (each for each in batch if isinstance(each, Tensor))
    return code, tuple((each.dtype, each.device, tuple(1 << (length - 1).bit_length() for length in each.shape[1:])) for each in tensors)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS))


def _after(error: BaseException, size: int, sizes: AutoMicroBatchSize, vote: Vote) -> int | None:
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
    """Free the memory of reference cycles and the device allocator's cache."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _at_once() -> None:
    """Ask no other worker, since the size is given."""


def _written_error() -> UsageError:
    expected = "a function that leaves its batch as it is, so that the window can start over where memory runs out"
    fix = "Write out of place, x = x * 2 for x.mul_(2), or give a number of items; and make the batch anew: it was changed."
    return explain(UsageError, "micro_batch_size", expected=expected, found="a batch that the function wrote into", fix=fix)


def _require_limit(sizes: AutoMicroBatchSize, existing: Sequence[Tensor]) -> None:
    """Raise unless a limit is known: a CPU's memory is the machine's, and the system kills who exceeds it."""
    if sizes.memory_limit is None and all(each.is_cpu for each in existing):
        raise unknown_limit_error("the CPU")


# The vote of the workers of a process group for one size of micro-batch: after each attempt all of them say how it went.
#
# An attempt that succeeded here counts for nothing if another worker ran out of memory: all start over with the smallest size.


_FITS, _SHORT, _RAISED = range(3)


class ElsewhereShortError(Exception):
    """Another worker ran out of memory. The window restores everything, as after an error of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(f"another worker ran out of memory; all go on with micro-batches of {size} items")
        self.size = size


class Vote:
    """The votes of all workers, one for each attempt; a process without workers agrees at once."""

    def __init__(self, workers: dist.ProcessGroup | None) -> None:
        self._workers = workers
        self._size = 0
        self.cast = False
        """This worker has voted on the attempt under way."""

    def begin(self, size: int) -> None:
        self._size, self.cast = size, False

    def fits(self) -> None:
        outcome, size = self._said(_FITS, self._size)
        if outcome == _RAISED:
            raise other_raised_error()
        if outcome == _SHORT:
            raise ElsewhereShortError(size)

    def short(self, smaller: int) -> int:
        """Report that this worker ran out of memory; `smaller` is its next size, 0 if there is none.

        Returns:
            The size that all workers try next; 0 if a worker has none.
        """
        outcome, size = self._said(_SHORT, smaller)
        if outcome == _RAISED:
            raise other_raised_error()
        return size

    def raised(self) -> None:
        if not self.cast:
            try:
                self._said(_RAISED, self._size)
            except RuntimeError:
                return

    def _said(self, outcome: int, size: int) -> tuple[int, int]:
        """Return the worst outcome and the smallest size of all workers; collective."""
        self.cast = True
        if self._workers is None:
            return outcome, size
        said = torch.tensor([outcome, -size], device=_device(self._workers))
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._workers)
        worst, smallest = said.tolist()
        return int(worst), -int(smallest)


def workers_of_call(optimizer: AccumulatingOptimizer | None) -> dist.ProcessGroup | None:
    """Return the group that chooses together: the wrapped optimizer's, else the default process group; None: nobody else."""
    if optimizer is not None and (group := optimizer.whole_window().process_group) is not None:
        return group
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if several else None


def _device(workers: dist.ProcessGroup) -> torch.device:
    """Return the device on which the group reduces: NCCL reduces only tensors of its device."""
    if dist.get_backend(workers) in ("gloo", "mpi") or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(str(torch.accelerator.current_accelerator()), torch.accelerator.current_device_index())


def other_raised_error() -> UsageError:
    return explain(
        UsageError,
        "micro_batch_size",
        expected="every worker's window to run",
        found="a worker that raised another error than of its memory",
        fix="See that worker's own error. Nothing of this window was delivered.",
    )


# A limit in bytes where the device has none to ask for: the memory that autograd keeps is counted, and is refused past the limit.
#
# Counted is what the loss function's graph keeps for its backward pass. Each memory counts once, and those of the batch and of modules do
# not count: they are there whatever the size of a micro-batch. What a recomputed part makes anew in the backward pass is not seen.


def within(limit: int | None, existing: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Limit what autograd keeps to `limit` bytes beside the `existing` tensors; None: no limit.

    The operation that would keep more raises `torch.OutOfMemoryError`, as the device's own allocator does.
    """
    if limit is None:
        return nullcontext()
    ledger = Ledger(limit, existing)
    return torch.autograd.graph.saved_tensors_hooks(ledger.keep, Kept.handed_out)


class Ledger:
    """The memory that autograd keeps now, by the address of its storage."""

    def __init__(self, limit: int, existing: Iterable[Tensor]) -> None:
        self._limit, self._bytes = limit, 0
        self._existing = {_address(tensor) for tensor in existing}
        self._users: dict[int, int] = {}
        self._lock = threading.RLock()
        """A device's graph is freed by a thread of autograd's own; and a release may come in the midst of `keep`."""

    def keep(self, tensor: Tensor) -> Any:
        """Count `tensor`, of any shape and dtype, until the returned object is freed."""
        address = _address(tensor)
        if address in self._existing or _is_of_parameter(tensor):
            return Kept(tensor, None, 0)
        size = _memory(tensor).nbytes()
        with self._lock:
            added = 0 if address in self._users else size
            if self._bytes + added > self._limit:
                raise torch.OutOfMemoryError(f"autograd would keep {self._bytes + added} bytes, and memory_limit is {self._limit}")
            self._bytes += added
            self._users[address] = self._users.get(address, 0) + 1
        return Kept(tensor, self, size)

    def release(self, address: int, size: int) -> None:
        with self._lock:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self._bytes -= size


class Kept:
    """A tensor that autograd keeps, counted as long as it does."""

    def __init__(self, tensor: Tensor, ledger: Ledger | None, size: int) -> None:
        self._tensor, self._ledger, self._size, self._version = tensor, ledger, size, version(tensor)

    def handed_out(self) -> Tensor:
        if version(self._tensor) != self._version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation")
        return self._tensor

    def __del__(self) -> None:
        if self._ledger is not None:
            self._ledger.release(_address(self._tensor), self._size)


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of `tensor`, also of a sharded or sparse one; a sparse one's indices do not count."""
    tensor = local(tensor)
    if tensor.layout is torch.strided:
        return tensor.untyped_storage()
    return (elements(tensor) if tensor.is_sparse else tensor.values()).untyped_storage()


def _address(tensor: Tensor) -> int:
    return _memory(tensor).data_ptr()


def _is_of_parameter(tensor: Tensor) -> bool:
    """True if `tensor` is a trainable leaf or a view of one, such as a layer's transposed weight."""
    base = base_of(tensor)
    base = tensor if base is None else base
    return base.is_leaf and base.requires_grad
