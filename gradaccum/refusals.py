"""Errors shared by all backends: one mistake has one class and one wording."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from gradaccum.errors import ArgumentTypeError, ArgumentValueError, GradAccumError, UsageError, explain
from gradaccum.state import State


def optimizer_error(expected: str, got: object, fix: str) -> GradAccumError:
    """The error for an object that is no optimizer of the framework; `expected` and `fix` name the framework's own."""
    return explain(ArgumentTypeError, "optimizer", expected=expected, found=f"an object of type {type(got).__name__}", fix=fix)


def wrapped_twice_error(got: object) -> GradAccumError:
    """The error for an optimizer that is wrapped already."""
    fix = "Wrap it once: steps multiply, so that one wrap with their product does the same."
    return explain(
        ArgumentTypeError, "optimizer", expected="one that is not wrapped", found=f"a wrapped one: {type(got).__name__}", fix=fix
    )


def accumulate_dtype_error(got: object) -> GradAccumError:
    """The error for an ``accumulate_dtype`` that is neither a floating dtype nor the name of one."""
    kind = ArgumentValueError if isinstance(got, str) else ArgumentTypeError
    expected, fix = "a floating dtype of the framework or its name", "Write accumulate_dtype='float32'."
    return explain(kind, "accumulate_dtype", expected=expected, got=got, fix=fix)


def half_made_error() -> UsageError:
    """The error for going on after an inner optimizer that raised in the midst of its update."""
    return explain(
        UsageError,
        "optimizer",
        expected="an update that was made or was not",
        found="an inner optimizer that raised when it had written a part of its parameters or of its state",
        fix="Load the last checkpoint. To go on from what is there, which holds a part of the update, call discard().",
    )


def missing_worker_error(state: State, rank: int, more_time: str = "") -> UsageError:
    """The error for a window's end whose reduction over the workers failed: most often one of them did not come.

    Args:
        state: this worker's.
        rank: its place among the workers.
        more_time: how to wait for slow workers, as a sentence.
    """
    here = f"{state.micro_step} micro-batches of update {state.optimizer_step + 1}"
    fix = "Call flush() on every worker when its data end: it takes part in the windows of the others until they flush too."
    return explain(
        UsageError,
        f"the end of a window on rank {rank}",
        expected="every worker to end its window too, by a micro-batch or by flush()",
        found=f"a reduction that failed or timed out, with {here} here",
        fix=f"{fix} {more_time}".rstrip(),
    )


def update_due_error(call: str) -> UsageError:
    """The error for a `call` that needs this worker's own sum, where the update of a window raised that is added up over all workers."""
    fix = "Call flush() on every worker to make the update that is due, or discard() on every worker."
    found = "a window that is added up over all workers, whose update raised"
    return explain(UsageError, call, expected="to be called before the window's end", found=found, fix=fix)


def torn_window_error(call: str) -> UsageError:
    """The error for a `call` on a window whose reduction over the workers failed in the middle."""
    fix = "Load the last checkpoint on every worker, or call discard()."
    return explain(UsageError, call, expected="a whole sum", found="one whose reduction over the workers failed", fix=fix)


def shared_until_weight_error(steps: object) -> UsageError:
    """Windows that several workers share were to end by their weight, of which each worker sees only its own part."""
    return explain(
        UsageError,
        "steps",
        expected="a number of micro-batches, or None, where several workers share the window, so that they end it together",
        got=steps,
        fix="Write steps=None, take windows from gradaccum.windows(loader, until_weight(...), reduce=...), and call flush() after each.",
    )


def moving_weight_error(fix: str) -> ArgumentValueError:
    """The error for a callable weight with a derivative by what is differentiated, which is no part of the large batch's gradients."""
    expected = "a weight that stays as it is where its arguments and parameters move, as its derivative is left out"
    return explain(ArgumentValueError, "weight", expected=expected, found="one with a derivative", fix=fix)


def rate_bits(rates: Sequence[float]) -> list[int]:
    """Fingerprint an optimizer's learning rates: 32 numbers, each 0 or 1, that workers add up beside a window's numbers, exactly."""
    mark = zlib.crc32(struct.pack(f"<{len(rates)}d", *rates))
    return [mark >> bit & 1 for bit in range(32)]


def require_same_rates(rates: Sequence[float], added: Sequence[float], workers: int, rank: int) -> None:
    """Raise unless all workers have the same learning rates, so that one window's update is the same on each.

    Args:
        rates: the learning rate of each group on this worker.
        added: the sum over the workers of the `rate_bits` of each.
        workers: their number.
        rank: the place of this worker among them.

    Raises:
        UsageError: two workers have different rates; every worker of the window raises it.
    """
    if any(count not in (0, workers) for count in added):
        fix = "Let a listener move the schedule: one flush() may close several windows, and a listener hears of each as it closes."
        found = f"{list(rates)} here and other ones on another worker"
        raise explain(UsageError, f"learning rates on rank {rank}", expected="the same on every worker", found=found, fix=fix)
