"""The window of several workers: the end that they make together.

The end is compiled code, also in PyNative, so that all workers round alike. It adds up
a few numbers, then the sums, once. A worker that runs out of data calls ``flush`` from
Python, and takes part in the windows of the others, with nothing, until they flush too.
Each worker's learning rates have places of their own among the numbers. A worker that
ends its window in Python raises if they differ; compiled code cannot raise: all workers
skip the window as an overflow, and Python raises afterwards.

The sum of a sharded parameter is not sent. After the sums, each worker sends the norm
of its own shards, an inf if they are not finite, so that all have one norm and one
decision.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import UsageError, kit
from gradaccum.kit import Options, State
from gradaccum_mindspore.gradient_sum import write_numbers
from gradaccum_mindspore.master_weights import Optimizer
from gradaccum_mindspore.mindspore_private import is_graph_mode
from gradaccum_mindspore.state import (
    STEPS,
    Storage,
)
from gradaccum_mindspore.update import Update
from gradaccum_mindspore.window.compiled import CompiledWindow, note
from gradaccum_mindspore.window.pynative import PyNativeWindow
from gradaccum_mindspore.workers.collectives import (
    buckets,
    compiled_sum_over_workers,
)

OPTIMIZERS = cycle(range(1, 33))
"""Numbers the optimizers that share windows: all workers wrap in one order. So few that
the squares of thousands of workers add up exactly in float32.
"""


# The numbers that are added up over the workers before the sums, by their places. The
# learning rates follow them.
WEIGHT = 0
OVERFLOWS = 1
MICRO_BATCHES = 2
FLUSHES = 3
COMPILED_ENDS = 4
"""Workers whose own compiled code ends the window."""
OPTIMIZER = 5
OPTIMIZER_SQUARED = 6
"""With the number before it, it shows whether all end a window of one optimizer."""
LOSS = 7
RATES = 8


class WorkerGroup(nn.Cell):  # type: ignore[misc]
    """All workers, as the window of one of them sees them."""

    def __init__(self, storage: Storage, inner: Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.rank, self.workers = storage.place
        self.float_dtype = storage.float_dtype
        self.buckets = nn.CellList(
            buckets(storage.shared_sums, self.workers), auto_prefix=False
        )
        self.loss_holders = self.workers if storage.sharded_places else 1
        """Workers that have one and the same loss: that of all items, where some
        parameters are sharded.
        """
        # A Cell would list these as its own. A constant would be no branch.
        object.__setattr__(self, "always", note("always", Tensor(True)))
        # Compiled code found a window of another optimizer, or different rates.
        object.__setattr__(self, "differs", note("differs", Tensor(False)))
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "rates", tuple(rates_of(inner)))
        self.is_this_worker = Tensor(np.arange(self.workers) == self.rank)
        places = np.eye(self.workers)[self.rank][:, None]
        self.rate_places = Tensor(places, self.float_dtype)
        number = next(OPTIMIZERS)
        self.optimizer_number = Tensor(number, self.float_dtype)
        self.optimizer_square = Tensor(number**2, self.float_dtype)
        self.zero = Tensor(0.0, self.float_dtype)
        self.one = Tensor(1.0, self.float_dtype)
        self.infinity = Tensor(float("inf"), self.float_dtype)
        self.true = Tensor(True)

    def compiled_all_reduce(self) -> bool:
        """Make the sums, the weight and the flag those of all workers.

        In a branch of its own: where one graph reads a Parameter again after a write,
        MindSpore copies it, float64 rounded to float32.
        """
        if self.always:
            self.add_up_sums(self.add_up_numbers(self.zero, self.one))
        return True

    def add_up_numbers(self, flushes: Tensor, compiled_ends: Tensor) -> Tensor:
        """Return the numbers of all workers.

        Compiled code cannot raise: a window of a size below 1 gets an infinite weight,
        and all workers skip it.
        """
        storage = self.storage
        is_sound = self.true
        if storage.size_varies:
            is_sound = storage.terms.value()[STEPS] >= 1
        overflow = (storage.overflow & self.true) | (is_sound == False)  # noqa: E712
        loss = storage.window_loss.compiled_total(storage.weight.value())
        if self.loss_holders > 1:
            loss = loss / self.loss_holders
        numbers = ops.stack(
            (  # In the order of the places.
                ops.where(is_sound, storage.weight.value(), self.infinity),
                overflow.astype(self.float_dtype),
                storage.micro_step.value().astype(self.float_dtype),
                flushes,
                compiled_ends,
                self.optimizer_number,
                self.optimizer_square,
                loss,
            )
        )
        if self.rates:
            all_rates = (self.rate_places * self.current_rates()).reshape(-1)
            numbers = ops.concat((numbers, all_rates))
        return compiled_sum_over_workers(numbers, self.workers)

    def current_rates(self) -> Tensor:
        return ops.stack([rate.astype(self.float_dtype) for rate in self.rates])

    def workers_differ(self, totals: Tensor) -> Tensor:
        """True if workers have different learning rates, or end windows of different
        optimizers.
        """
        square = self.workers * totals[OPTIMIZER_SQUARED]
        differ = ops.square(totals[OPTIMIZER]) != square
        if self.rates:
            all_rates = totals[RATES:].reshape((self.workers, -1))
            differ = differ | (all_rates != self.current_rates()).any()
        return differ

    def add_up_sums(self, totals: Tensor) -> bool:
        """Write the sums, the weight, the flag and the loss of all workers."""
        storage = self.storage
        differ = self.workers_differ(totals)
        weight = ops.where(differ, self.infinity, totals[WEIGHT])
        overflow = (totals[OVERFLOWS] > 0) | differ
        losses = storage.window_loss.compiled_with_total(totals[LOSS], totals[WEIGHT])
        ops.assign(self.differs, differ | self.differs)
        last_message = totals
        for bucket in self.buckets:
            last_message = bucket(last_message)
        ops.assign(storage.window_loss.loss, losses)
        ops.assign(storage.weight, weight)
        ops.assign(storage.overflow, overflow)
        return True

    def global_norm(self, shared_norm: Tensor, sharded_norm: Tensor) -> Tensor:
        """Return the norm over all workers, of the sums that are equal on all and of
        this worker's shards, after everything that `shared_norm` needs: all workers
        exchange in one order.
        """
        placed_norm = ops.where(self.is_this_worker, sharded_norm, self.zero)
        norms = compiled_sum_over_workers(
            ops.depend(placed_norm, shared_norm), self.workers
        )
        norms = ops.concat((norms, shared_norm.reshape(1)))
        largest = norms.max()
        divisor = ops.where((largest > 0) & ops.isfinite(largest), largest, self.one)
        return divisor * ops.sqrt(ops.square(norms / divisor).sum())

    # From Python.

    def require_same_rates(self) -> None:
        """Raise unless no window was skipped because workers differ; once."""
        if self.differs.item():
            write_numbers(self.differs, False)
            self.refuse_differences()

    def refuse_differences(self) -> None:
        rates = [float(rate) for rate in self.rates]
        kit.require_same_rates(rates, [0.5], self.workers, self.rank)

    def write_rates(self) -> None:
        """Write learning rates that were set as Python numbers into the Parameters that
        compiled code reads.
        """
        if not hasattr(self.inner, "lrs"):
            return
        for group, rate in zip(self.inner.param_groups, self.rates, strict=True):
            if not isinstance(group["lr"], Tensor):
                write_numbers(rate, group["lr"])
                group["lr"] = rate


def rates_of(inner: Optimizer) -> list[Any]:
    """Return the learning rate of each group; none if a schedule of the optimizer's own
    moves them by its updates.
    """
    if hasattr(inner, "lrs"):
        return list(inner.lrs)
    rate = getattr(inner, "learning_rate", None)
    if isinstance(rate, Parameter):
        return [rate]
    return list(rate) if isinstance(rate, ParameterTuple) else []


class AllNumbers(nn.Cell):  # type: ignore[misc]
    """A program: the numbers of all workers, and whether the workers differ."""

    def __init__(self, workers: WorkerGroup) -> None:
        super().__init__(auto_prefix=False)
        self.workers = workers

    def construct(self, flushes: Tensor) -> tuple[Tensor, Tensor]:
        totals = self.workers.add_up_numbers(flushes, self.workers.zero)
        return totals, self.workers.workers_differ(totals)


class WindowEnd(nn.Cell):  # type: ignore[misc]
    """A program: the end of a window, of which the numbers are known."""

    def __init__(self, window: CompiledWindow, workers: WorkerGroup) -> None:
        super().__init__(auto_prefix=False)
        self.window = window
        self.workers = workers

    def construct(self, totals: Tensor) -> bool:
        # As in `WorkerGroup.compiled_all_reduce`.
        if self.workers.always:
            self.workers.add_up_sums(totals)
        return self.window.close_reduced()


class SharedWindow(PyNativeWindow):
    """As `PyNativeWindow`; the end of a window and `flush` are collective."""

    def __init__(
        self,
        storage: Storage,
        options: Options,
        update: Update,
        compiled_window: CompiledWindow,
        workers: WorkerGroup,
    ) -> None:
        super().__init__(storage, options, update)
        self.workers = workers
        self.compiled_window = compiled_window
        self.addresses: list[int] = []
        """Where each Parameter lay when the programs were made."""

    def close(self, state: State, denominator: float | None = None) -> None:
        self.end(state, flushes=False)

    def end(self, state: State, flushes: bool) -> list[float]:
        """End the window of all workers, in this one's part; return the numbers."""
        self.workers.write_rates()
        self.make_programs()
        flag = Tensor(float(flushes), self.storage.float_dtype)
        totals, differ = compiled(self.all_numbers)(flag)
        numbers: list[float] = totals.tolist()
        if numbers[MICRO_BATCHES] == 0:
            return numbers
        if differ.item() and not numbers[COMPILED_ENDS]:
            self.workers.refuse_differences()
        with self.storage.writing():
            compiled(self.window_end)(totals)
        for extension in self.storage.extensions:
            extension.window_closed(state._replace(weight=numbers[WEIGHT]))
        return numbers

    def make_programs(self) -> None:
        """Make the programs, and make them anew after ``set_data`` and
        `mindspore.load_param_into_net`, which give a Parameter other memory: MindSpore
        2.10 binds a compiled Cell to the memory that it found.
        """
        parameters = self.compiled_window.get_parameters()
        addresses = [parameter.data_ptr() for parameter in parameters]
        if addresses != self.addresses:
            self.addresses = addresses
            self.all_numbers = AllNumbers(self.workers)
            self.window_end = WindowEnd(self.compiled_window, self.workers)

    def flush(self, denominator: float | None = None) -> bool:
        """End windows until all workers flush; returns whether one of them held a
        micro-batch.
        """
        was_open = False
        all_flush = False
        while not all_flush:
            numbers = self.end(self.storage.pull(), flushes=True)
            is_open = numbers[MICRO_BATCHES] > 0
            all_flush = numbers[FLUSHES] == self.workers.workers
            was_open = was_open or is_open
            if is_open and not all_flush:
                self.storage.between_windows()
        if not was_open:
            self.storage.push_event()
        self.workers.require_same_rates()
        return was_open


def compiled(cell: nn.Cell) -> Callable[..., Any]:
    """Return a call of the cell that MindSpore compiles, in PyNative too."""
    program: Callable[..., Any] = cell
    if not is_graph_mode():
        if not hasattr(cell, "program"):
            object.__setattr__(cell, "program", ms.jit(cell.construct))
        program = cell.program
    return program


@constexpr  # type: ignore[untyped-decorator]
def refuse_compiled_flush() -> None:
    """Raise `UsageError`: compiled code cannot wait until all workers flush."""
    raise UsageError(
        "flush(): expected a call from Python where workers share their windows,"
        " because it ends windows until all have called it; got a call in compiled"
        " code. Call optimizer.flush() after the compiled step."
    )
