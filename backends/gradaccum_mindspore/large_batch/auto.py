"""Micro-batches of automatic size: with ``micro_batch_size="auto"`` the call starts over with half the size when memory runs out.

The call itself puts back what it has moved when it raises: statistics, an optimizer's window, the counters of random numbers. What is left
to do here is to tell an error of memory from others, to free what the failed attempt still holds before memory is asked for again, and to
let a second attempt draw what the first one drew. MindSpore's errors of memory have no class of their own: their texts are known.
Workers need no vote. Nothing is exchanged before the end of a window, so one worker may halve alone while the others wait for it there.

A CPU has no limit to ask for. ``memory_limit=`` counts what PyNative mode keeps for the backward pass, each memory once. The batch and the
Parameters are there whatever the size of a micro-batch, so they do not count. What the backward pass itself makes does not count either, a
recomputed segment's activations among it: MindSpore records it as if it were to be differentiated once more. Compiled code keeps its
memory to itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import mindspore as ms
from mindspore import Tensor

from gradaccum import AutoMicroBatchSize, GradAccumError, UsageError
from gradaccum.kit import Division, explain, free_frames, leaves_of, unknown_limit_error
from gradaccum_mindspore.checks import require_mindspore
from gradaccum_mindspore.large_batch.batch import Batch, SplitOptions, items_of
from gradaccum_mindspore.large_batch.replay import DEPTH, Replay, cells_of
from gradaccum_mindspore.recomputation.function import detached


class MemoryLimitError(MemoryError):
    """Autograd would keep more than the limit: a smaller micro-batch may help."""


def within(limit: int | None, existing: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Limit what autograd keeps to `limit` bytes beside the `existing` tensors; None: no limit.

    The operation that would keep more raises `MemoryLimitError`.
    """
    if limit is None:
        return nullcontext()
    ledger = Ledger(limit, existing)
    return ms.saved_tensors_hooks(ledger.keep, Kept.handed_out)  # type: ignore[no-any-return]


class Ledger:
    """The memory that autograd keeps now, by its address."""

    def __init__(self, limit: int, existing: Iterable[Tensor]) -> None:
        self._limit, self._bytes = limit, 0
        self._existing = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in existing]
        self._users: dict[int, int] = {}
        self._backward = False

    def keep(self, tensor: Tensor) -> Kept:
        """Count `tensor`, of any shape and dtype, until what is returned is freed."""
        address, size = tensor.data_ptr(), tensor.nbytes
        if self._backward or any(start <= address < end for start, end in self._existing):
            return Kept(tensor, None, address, 0)
        added = 0 if address in self._users else size
        if self._bytes + added > self._limit:
            raise MemoryLimitError(f"autograd would keep {self._bytes + added} bytes, and memory_limit is {self._limit}")
        self._bytes += added
        self._users[address] = self._users.get(address, 0) + 1
        return Kept(tensor, self, address, size)

    def hand_out(self) -> None:
        self._backward = True

    def release(self, address: int, size: int) -> None:
        """Release one holder of this memory."""
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self._bytes -= size
        self._backward = self._backward and bool(self._users)


class Kept:
    """A tensor that autograd keeps, counted as long as it does. Detached: an output that kept itself would never be freed."""

    def __init__(self, tensor: Tensor, ledger: Ledger | None, address: int, size: int) -> None:
        self._tensor, self._ledger, self._address, self._size = detached(tensor), ledger, address, size

    def handed_out(self) -> Any:
        if self._ledger is not None:
            self._ledger.hand_out()
        return self._tensor

    def __del__(self) -> None:
        if self._ledger is not None:
            self._ledger.release(self._address, self._size)


Run: TypeAlias = Callable[[Batch, Division], Any]
"""A whole call with a given division; if it raises, it puts back what it has moved, and raises that."""

_TEXTS = ("allocate memory failed", "std::bad_alloc", "out of memory", "memory isn't enough", "memory not enough", "malloc memory failed")
"""In small letters. The first is what PyNative mode says on a CPU, the second what compiled code says there; the others are of devices."""


def fitted(run: Run, fn: object, sizes: AutoMicroBatchSize, batch: Batch, options: SplitOptions) -> Any:
    """Return `run` with the largest micro-batch that fits; the size is noted in `sizes`."""
    _require_limit(sizes)
    key, size = key_of(fn, batch), sizes.start(key_of(fn, batch), items_of(batch, options.axes))
    with _same_draws(fn) as begin:
        while True:
            begin()
            try:
                with within(sizes.memory_limit, _existing(fn, batch)):
                    made = run(batch, Division(None, size, None))
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                smaller = _smaller(sizes, size, error)
                free_frames(error)
            else:
                sizes.remember(key, size)
                return made
            size = smaller
            gc.collect()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, GradAccumError):
        return False
    said = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(text in said for text in _TEXTS))


def key_of(fn: object, batch: Batch) -> Hashable:
    """Return what a call's need of memory depends on: the function's code, the mode, and dtype and shape of the batch's arrays.

    Lengths are rounded up to powers of two, so that batches of ever other lengths need no search each.
    """
    code = getattr(fn, "__code__", type(fn))
    arrays: list[Any] = [leaf.value for leaf in leaves_of(batch) if hasattr(leaf.value, "dtype")]
    shapes = tuple((str(each.dtype), tuple(1 << (length - 1).bit_length() for length in each.shape[1:])) for each in arrays)
    return code, ms.get_context("mode"), shapes


def _same_draws(fn: object) -> AbstractContextManager[Callable[[], None]]:
    """Return a context whose function restores the random state before each attempt."""
    if ms.get_context("mode") == ms.GRAPH_MODE:
        return nullcontext(lambda: None)
    return _Draws(fn)


class _Draws:
    """A seed for all attempts, if the user set none, and the generator as it was; the call itself lends operators of the same seeds."""

    def __init__(self, fn: object) -> None:
        self._replay = Replay(fn)

    def __enter__(self) -> Callable[[], None]:
        generator = ms.get_rng_state()
        self._replay.__enter__()

        def begin() -> None:
            ms.set_rng_state(generator)

        return begin

    def __exit__(self, *raised: Any) -> None:
        self._replay.__exit__(*raised)


def _existing(fn: object, batch: Batch) -> Iterator[Tensor]:
    """Return the memory that is there whatever the size of a micro-batch."""
    yield from (leaf.value for leaf in leaves_of(batch) if isinstance(leaf.value, Tensor))
    for cell in cells_of(fn, DEPTH):
        yield from cell.get_parameters()


def _smaller(sizes: AutoMicroBatchSize, size: int, error: BaseException) -> int:
    try:
        return sizes.after_failure(size)
    except UsageError as named:
        raise named from error


def _require_limit(sizes: AutoMicroBatchSize) -> None:
    """Raise unless a limit is known: a CPU's memory is the machine's, and the system kills who exceeds it."""
    if sizes.memory_limit is None and ms.get_context("device_target") == "CPU":
        raise unknown_limit_error("the CPU")
    if sizes.memory_limit is not None and ms.get_context("mode") == ms.GRAPH_MODE:
        fix = "Run in PyNative mode, or write micro_batch_size=8."
        expected = "PyNative mode, whose memory can be counted"
        raise explain(UsageError, "memory_limit", expected=expected, found="graph mode", fix=fix)
    if sizes.memory_limit is not None:
        require_mindspore("2.9", "memory_limit", "write micro_batch_size=8")


__all__ = ["MemoryLimitError", "fitted", "is_out_of_memory", "key_of"]
