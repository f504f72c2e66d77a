"""Micro-batches of automatic size: with ``micro_batch_size="auto"`` the call starts over with half the size when memory runs out.

The call itself puts back what it has moved when it raises: statistics, an optimizer's window, the counters of random numbers. What is left
to do here is to tell an error of memory from others, to free what the failed attempt still holds before memory is asked for again, and to
let a second attempt draw what the first one drew. MindSpore's errors of memory have no class of their own: their texts are known.
Workers need no vote. Nothing is exchanged before the end of a window, so one worker may halve alone while the others wait for it there.

A CPU's memory is the machine's, and the system kills who exceeds it: so there is no automatic size on a CPU, and nobody keeps a
``memory_limit=``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import mindspore as ms

from gradaccum import ArgumentValueError, AutoMicroBatchSize, GradAccumError, UsageError
from gradaccum.kit import Division, explain, free_frames, leaves_of
from gradaccum_mindspore.large_batch.batch import Batch, SplitOptions, items_of
from gradaccum_mindspore.large_batch.replay import Replay

Run: TypeAlias = Callable[[Batch, Division], Any]
"""A whole call with a given division; if it raises, it puts back what it has moved, and raises that."""

_TEXTS = ("allocate memory failed", "std::bad_alloc", "out of memory", "memory isn't enough", "memory not enough", "malloc memory failed")
"""In small letters. The first is what PyNative mode says on a CPU, the second what compiled code says there; the others are of devices."""


def fitted(run: Run, fn: object, sizes: AutoMicroBatchSize, batch: Batch, options: SplitOptions) -> Any:
    """Return `run` with the largest micro-batch that fits; the size is noted in `sizes`."""
    require_device(sizes)
    key, size = key_of(fn, batch), sizes.start(key_of(fn, batch), items_of(batch, options.axes))
    with _same_draws(fn) as begin:
        while True:
            begin()
            try:
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


def _smaller(sizes: AutoMicroBatchSize, size: int, error: BaseException) -> int:
    try:
        return sizes.after_failure(size)
    except UsageError as named:
        raise named from error


def require_device(sizes: AutoMicroBatchSize) -> None:
    """Raise unless a device's allocator has the limit."""
    if sizes.memory_limit is not None or ms.get_context("device_target") == "CPU":
        fix = "On a CPU write a number of items. On a device leave memory_limit out: mindspore.runtime.set_memory limits it."
        found = "a CPU" if sizes.memory_limit is None else f"memory_limit={sizes.memory_limit}"
        raise explain(ArgumentValueError, "micro_batch_size", expected="a device that says when its memory runs out", found=found, fix=fix)
