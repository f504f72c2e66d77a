"""Splits a large batch, and implements ``micro_batch_size="auto"``. With this option, a
call that runs out of memory starts over with micro-batches of half the size.

At the end of an attempt, all workers agree on a common size before any gradient is
added to ``.grad``. Without this agreement, a worker could start over alone, and the
other workers would wait for that worker.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum.kit import Division, LargeBatch, MicroBatch, Options, SmallerSizeError
from gradaccum_torch.large_batch.gradients import GradientsInGrad, collecting
from gradaccum_torch.large_batch.replay import Before
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import Versions, processes

T = TypeVar("T")
MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)
"""The messages of out-of-memory errors that do not come from a caching allocator."""


def run_divided(
    run: Callable[[list[MicroBatch], GradientsInGrad], T],
    function: Callable[..., Any],
    large: LargeBatch,
    division: Division,
    options: Options,
    optimizer: AccumulatingOptimizer | None,
    modules: Sequence[nn.Module],
    *,
    notes_calls: bool,
    runs_twice: bool = False,
) -> T:
    """Run all forward and backward passes: call ``run(micro_batches, destination)`` and
    return the result. With an automatic size, call `run` with smaller and smaller
    micro-batches until they fit into memory.

    Args:
        run: a function that runs the micro-batches of `large` and passes their losses
            to `destination`.
        function: the user's function. A micro-batch size that fits is remembered for
            this function.
        large: the batch. If several workers share the window of `optimizer`, the batch
            may be empty. This worker then only takes part in the reduction.
        division: how the batch is split.
        options: the options that determine the weights of the micro-batches.
        optimizer: the wrapped optimizer whose window the call fills and closes, or
            None.
        modules: the modules whose buffers are restored after an error.
        notes_calls: whether the buffers of all modules that are called are restored
            too.
        runs_twice: whether `run` calls the user's function twice for each micro-batch.
    """
    sizes = division.micro_batch_size
    group = None if optimizer is None else optimizer.whole_window().process_group
    tensors = [leaf.value for leaf in large.leaves if isinstance(leaf.value, Tensor)]

    def attempt(division: Division, agreement: AbstractContextManager[None]) -> T:
        with ExitStack() as stack, agreement:
            micro_batches: list[MicroBatch] = []
            if large.items or group is None:
                micro_batches += large.micro_batches(division, options)
            before = Before(
                tensors,
                modules,
                notes_calls=notes_calls,
                copies_host=runs_twice or isinstance(sizes, AutoMicroBatchSize),
            )
            destination = stack.enter_context(
                collecting(optimizer, options, micro_batches, before)
            )
            return run(micro_batches, destination)

    if not isinstance(sizes, AutoMicroBatchSize):
        return attempt(division, nullcontext())
    if group is None and processes() > 1:
        group = dist.group.WORLD
    versions = Versions(tensors)

    def attempt_size(size: int, smaller_size: int) -> T:
        sized_division = division._replace(micro_batch_size=size)
        return attempt(sized_division, agreement(smaller_size, group))

    def before_retry() -> None:
        if versions.moved():
            raise UsageError(
                "micro_batch_size: expected a function that does not modify its batch,"
                " because the call starts over when memory runs out; got a function"
                " that modified its batch in place. Write x = x * 2 instead of"
                " x.mul_(2), or set micro_batch_size to a number of items. Create the"
                " batch again before the next call, because its values have changed."
            )
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    key = key_of(function, tensors)
    return sizes.search(key, large.items or FITS, attempt_size, before_retry)


def key_of(function: Callable[..., Any], batch: Iterable[Tensor]) -> Hashable:
    """Return a key that is equal for calls that need about the same memory per item.
    The key consists of the loss function's code, and of the dtypes, devices and shapes
    of the batch's tensors.

    The first axis of each shape is left out, and the other lengths are rounded up to
    powers of two.
    """
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


# After each attempt, every worker of a process group votes for a micro-batch size, and
# all workers use the smallest of these sizes. If another worker ran out of memory, this
# worker therefore repeats its attempt too, even if its own memory was sufficient.

FITS = 2**31 - 1
"""A worker's vote if the micro-batches fitted into its memory."""
RAISED = -1
"""A worker's vote if it raised an error other than an out-of-memory error. All workers
then raise an error, because the smallest vote decides, and no size is less than 0. The
size 0 means that not even a single item fits into the worker's memory.
"""


@contextmanager
def agreement(smaller_size: int, workers: dist.ProcessGroup | None) -> Iterator[None]:
    """Run one attempt, which is the code inside the ``with`` block. If the attempt runs
    out of memory on any worker, raise `SmallerSizeError` on every worker, with the
    smallest size for which a worker has voted. A worker that ran out of memory votes
    for `smaller_size`.

    If the attempt raises another error on one worker, raise an error on every worker.
    The end of the block is a collective call.
    """
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            raise SmallerSizeError(smallest_vote(smaller_size, workers)) from error
        with suppress(RuntimeError):
            smallest_vote(RAISED, workers)
        raise
    smallest_size = smallest_vote(FITS, workers)
    if smallest_size < FITS:
        raise SmallerSizeError(smallest_size)


def smallest_vote(size: int, workers: dist.ProcessGroup | None) -> int:
    """Vote for `size`, and return the smallest size that any worker has voted for.
    Raise if another worker has raised an error. This is a collective call.
    """
    if workers is None:
        return size
    sizes = [size] * dist.get_world_size(workers)
    dist.all_gather_object(sizes, size, group=workers)
    smallest = min(sizes)
    if smallest == RAISED != size:
        raise UsageError(
            "micro_batch_size: expected every worker to complete its window; got a"
            " worker that raised an error other than out-of-memory. See that worker's"
            " traceback. No worker's .grad was changed."
        )
    return smallest
