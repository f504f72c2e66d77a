"""Errors shared by all backends: one class and one wording for each mistake."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache

from gradaccum.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
)
from gradaccum.state import State


def optimizer_error(expected: str, got: object, fix: str) -> GradAccumError:
    """Return the error for an object that is not an optimizer of the framework.
    `expected` and `fix` are the parts of the message that name the framework's
    optimizers.
    """
    return ArgumentTypeError(
        f"optimizer: expected {expected}; got an object of type {type(got).__name__}."
        f" {fix}"
    )


def wrapped_twice_error(got: object) -> GradAccumError:
    """Return the error for an optimizer that is already wrapped."""
    return ArgumentTypeError(
        "optimizer: expected an optimizer that is not wrapped yet; got a wrapped"
        f" optimizer: {type(got).__name__}. Wrap the optimizer only once. Nested"
        " wrappers multiply their steps, so pass the product as steps= instead."
    )


def accumulate_dtype_error(got: object) -> GradAccumError:
    """Return the error for an ``accumulate_dtype`` that is not a floating dtype."""
    kind = ArgumentValueError if isinstance(got, str) else ArgumentTypeError
    return kind(
        "accumulate_dtype: expected a floating-point dtype or the name of such a dtype;"
        f" got {got!r} ({type(got).__name__}). Write accumulate_dtype='float32'."
    )


def half_made_error() -> UsageError:
    """Return the error for a window that an exception has left incomplete. The
    exception interrupted an update, or the addition of a gradient to the sum.
    """
    return UsageError(
        "optimizer: expected no half-finished update or gradient sum; got an earlier"
        " call that was interrupted by an exception, so the parameters, the optimizer's"
        " state or the gradient sum may be only partly updated. Load the last"
        " checkpoint, or call discard() to drop the window and continue with the partly"
        " updated values."
    )


def missing_worker_error(state: State, rank: int) -> UsageError:
    """Return the error for a collective operation that failed at a window's end."""
    return UsageError(
        f"the end of a window on rank {rank}: expected every worker to end its window"
        " at the same point, either with its last micro-batch or by calling flush();"
        " got a reduction that failed or timed out. This worker had accumulated"
        f" {state.micro_step} micro-batches for update {state.optimizer_step + 1}."
        " When a worker has no more data, call flush() on that worker. flush() takes"
        " part in the other workers' windows until all workers have called flush()."
    )


def update_due_error(call: str) -> UsageError:
    """Return the error for a `call` that needs this worker's own gradient sum. That sum
    no longer exists, because the sums of all workers were added up before the update
    failed.
    """
    return UsageError(
        f"{call}: expected a window whose gradients are not reduced yet; got a window"
        " whose update failed after the reduction. Call flush() on every worker to"
        " retry the update, or discard() on every worker to drop it."
    )


def shared_until_weight_error(steps: object) -> UsageError:
    """Return the error for ``steps=until_weight(...)`` with several workers. This is
    not supported, because each worker knows only its own weight.
    """
    return UsageError(
        "steps: expected a number of micro-batches or None, because several workers"
        f" share each window and must end it together; got {steps!r}"
        f" ({type(steps).__name__}). Write steps=None, iterate over"
        " gradaccum.windows(loader, until_weight(...), reduce=...), and call flush()"
        " after each window."
    )


def unwrapped_optimizer_error(optimizer: object) -> ArgumentTypeError:
    """Return the error for a scheduler whose `optimizer` is not wrapped."""
    return ArgumentTypeError(
        "scheduler: expected a scheduler that was created for a wrapped optimizer; got"
        f" a scheduler that was created for {type(optimizer).__name__}. Wrap the"
        " optimizer first: opt = gradaccum.wrap(optimizer, steps=4); scheduler ="
        " gradaccum.wrap(StepLR(opt, 10))."
    )


DIVIDED_LOSS = (
    "the loss is divided by {steps}, but gradaccum already divides by the window's"
    " {steps} micro-batches. If `loss / {steps}` is left over from the old loop, each"
    " update is {steps} times too small: delete the division. If {steps} only happens to"
    " be a factor of your loss, ignore this warning."
)
"""The warning text for a loss that the user has divided by the length of a window."""

RATE_MOVED = (
    "gradaccum: a learning rate changed inside a window, most likely because a"
    " scheduler steps after each micro-batch. Create the scheduler for the wrapped"
    " optimizer, and write scheduler = gradaccum.wrap(scheduler), so that it steps once"
    " per update. Set the length of the schedule to opt.updates_in(loader)."
)
"""The text of the `GradAccumWarning` for a scheduler that is not wrapped."""


@lru_cache(maxsize=8)
def rate_bits(*rates: float) -> bytes:
    """Return a fingerprint of an optimizer's learning rates. Its 32 bits are stored as
    separate numbers, so that their sums over the workers are exact.
    """
    # Adding 0.0 turns -0.0 into 0.0. The rates 0.0 and -0.0 must give the same bits,
    # because the cache treats them as the same key.
    mark = zlib.crc32(struct.pack(f"<{len(rates)}d", *(rate + 0.0 for rate in rates)))
    return bytes(mark >> bit & 1 for bit in range(32))


def require_same_rates(
    rates: Sequence[float], added: Sequence[float], workers: int, rank: int
) -> None:
    """Raise unless all workers close a window of the same optimizer, with the same
    learning rates.

    `rates` are the learning rates of this worker's parameter groups, `rank` is this
    worker's rank, and `added` contains the `rate_bits`, each summed over all workers.

    Raises:
        UsageError: two workers have different rates, have their parameters in different
            orders, or close windows of different optimizers. Every worker raises this
            error.
    """
    if not {0, workers}.issuperset(added):
        raise UsageError(
            f"learning rates on rank {rank}: expected the same rates, parameters and"
            f" optimizer on every worker; got {list(rates)} on this worker, but"
            " another worker has different rates, another optimizer's window or, with"
            " fully_shard, a different number of micro-batches. Write"
            " gradaccum.wrap(scheduler), or step the scheduler in a function passed to"
            " add_listener(), because a single flush() may close several windows. If"
            " two optimizers share a process group, run the same number of"
            " micro-batches on every worker, or give each optimizer its own group. Add"
            " parameters in the same order on every worker. With fully_shard, call"
            " discard() on every worker or on none."
        )
