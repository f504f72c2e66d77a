"""``micro_batch_size="auto"``: the call is started over with half the size when MindSpore's memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum.kit import Division
from gradaccum_mindspore.large_batch.batch import Batch, items_of
from gradaccum_mindspore.large_batch.options import SplitOptions

Run = Callable[[Batch, Division], tuple[Any, Any]]
"""A whole call with a given division."""
SIGNS = ("out of memory", "memory not enough", "allocate memory failed", "memory pool not enough")
"""What MindSpore's errors of missing memory say, in small letters; they have no class of their own."""


def fitted(run: Run, sizes: AutoMicroBatchSize, batch: Batch, options: SplitOptions) -> tuple[Any, Any]:
    """`run` with the largest micro-batch that fits.

    Raises:
        UsageError: not even one item fits.
    """
    key = id(run.__self__)  # type: ignore[attr-defined]
    size = sizes.start(key, items_of(batch, options.axes))
    while True:
        done = _attempt(run, batch, Division(None, size, None))
        if not isinstance(done, RuntimeError):
            sizes.remember(key, size)
            return done
        size = _smaller(sizes, size, done)


def _attempt(run: Run, batch: Batch, division: Division) -> tuple[Any, Any] | RuntimeError:
    try:
        return run(batch, division), None
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, UsageError) or not any(sign in str(error).lower() for sign in SIGNS):
            raise
        return RuntimeError(str(error))  # Without the traceback, which holds the micro-batch's memory.


def _smaller(sizes: AutoMicroBatchSize, size: int, failure: RuntimeError) -> int:
    try:
        return sizes.after_failure(size)
    except UsageError as error:
        raise error from failure
