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
    """Return the error for an object that is no optimizer of the framework; `expected`
    and `fix` name the framework's own.
    """
    return ArgumentTypeError(
        f"optimizer: expected {expected}; got an object of type {type(got).__name__}."
        f" {fix}"
    )


def wrapped_twice_error(got: object) -> GradAccumError:
    """Return the error for an optimizer that is wrapped already."""
    return ArgumentTypeError(
        "optimizer: expected one that is not wrapped; got a wrapped one:"
        f" {type(got).__name__}. Wrap it once: steps multiply, so that one wrap with"
        " their product does the same."
    )


def accumulate_dtype_error(got: object) -> GradAccumError:
    """Return the error for an ``accumulate_dtype`` that is no floating dtype."""
    kind = ArgumentValueError if isinstance(got, str) else ArgumentTypeError
    return kind(
        "accumulate_dtype: expected a floating dtype of the framework or its name; got"
        f" {got!r} ({type(got).__name__}). Write accumulate_dtype='float32'."
    )


def half_made_error() -> UsageError:
    """Return the error for going on after an exception in the middle of an update or of
    an addition.
    """
    return UsageError(
        "optimizer: expected an update that was made or was not; got an exception in"
        " the last one, which may have written a part of the parameters, of the"
        " optimizer's state or of the sum. Load the last checkpoint. To go on from what"
        " is there, which holds a part of the update, call discard()."
    )


def missing_worker_error(state: State, rank: int, more_time: str = "") -> UsageError:
    """Return the error for a failed reduction at a window's end; `more_time` says how
    to wait for slow workers.
    """
    fix = (
        "Call flush() on every worker when its data end: it takes part in the windows"
        " of the others until they flush too."
    )
    if more_time:
        fix = f"{fix} {more_time}"
    return UsageError(
        f"the end of a window on rank {rank}: expected every worker to end its window"
        " too, by a micro-batch or by flush(); got a reduction that failed or timed"
        f" out, with {state.micro_step} micro-batches of update"
        f" {state.optimizer_step + 1} here. {fix}"
    )


def update_due_error(call: str) -> UsageError:
    """Return the error for a `call` that needs this worker's own sum after all sums
    were added up and the update raised.
    """
    return UsageError(
        f"{call}: expected to be called before the window's end; got a window that is"
        " added up over all workers, whose update raised. Call flush() on every worker"
        " to make the update that is due, or discard() on every worker."
    )


def shared_until_weight_error(steps: object) -> UsageError:
    """Return the error for windows that end by weight where each worker sees only its
    own weight.
    """
    return UsageError(
        "steps: expected a number of micro-batches, or None, where several workers"
        f" share the window, so that they end it together; got {steps!r}"
        f" ({type(steps).__name__}). Write steps=None, take windows from"
        " gradaccum.windows(loader, until_weight(...), reduce=...), and call flush()"
        " after each."
    )


def moving_weight_error(fix: str) -> ArgumentValueError:
    """Return the error for a callable weight that depends on the parameters: the large
    batch's gradient has no such term.
    """
    return ArgumentValueError(
        "weight: expected a weight that stays as it is where its arguments and"
        " parameters move, as its derivative is left out; got one with a derivative."
        f" {fix}"
    )


RATE_MOVED = (
    "gradaccum: a learning rate moved inside a window; most likely a scheduler steps"
    " with each micro-batch. Build it on the wrapped optimizer and write scheduler ="
    " gradaccum.wrap(scheduler), which moves once per update; opt.updates_in(loader) is"
    " its length."
)
"""The `GradAccumWarning` of a scheduler that is not wrapped."""


@lru_cache(maxsize=8)
def rate_bits(*rates: float) -> bytes:
    """Fingerprint an optimizer's learning rates as 32 numbers, each 0 or 1, whose sum
    over the workers is exact.
    """
    # Not -0.0, which is the same key.
    mark = zlib.crc32(struct.pack(f"<{len(rates)}d", *(rate + 0.0 for rate in rates)))
    return bytes(mark >> bit & 1 for bit in range(32))


def require_same_rates(
    rates: Sequence[float], added: Sequence[float], workers: int, rank: int
) -> None:
    """Raise unless all workers close a window of the same optimizer, with the same
    learning rates.

    `rates` are those of each group on this worker, of rank `rank`; `added` is the sum
    of all workers' `rate_bits`.

    Raises:
        UsageError: two workers have different rates, parameters in another order, or
            are at windows of different optimizers; every worker raises it.
    """
    if not {0, workers}.issuperset(added):
        raise UsageError(
            f"learning rates on rank {rank}: expected the same rates, parameters and"
            f" optimizer on every worker; got {list(rates)} here, and others or another"
            " window elsewhere. Let a listener move the schedule, as one flush() may"
            " close several windows. Give two optimizers of one process group as many"
            " micro-batches on every worker, or a group each. Add parameters in one"
            " order everywhere."
        )
