"""A window that several workers share, and that all of them end at the same time.

The code that ends a window is compiled, even in PyNative mode, so that rounding is the
same on all workers. This code all-reduces a vector of a few numbers, and then
all-reduces the gradient sums once. A worker that runs out of data calls ``flush`` from
Python. From then on it takes part in the windows of the other workers, without adding
micro-batches, until every worker has called ``flush``.

The vector also contains the learning rates of each worker, so that the workers can
compare them. If the learning rates differ and all workers end the window from Python,
each worker raises an error. Compiled code cannot raise errors. So if any worker ends
the window in compiled code, all workers skip the window as if it had overflowed, and
raise the error later, from Python.

The gradient sum of a sharded parameter is not sent. After the all-reduce, each worker
sends the gradient norm of its own shards, or inf if the gradients are not finite. So
all workers get the same global norm and make the same decision about the update.
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
from gradaccum_mindspore.state import STEPS, Storage
from gradaccum_mindspore.update import Update
from gradaccum_mindspore.window.compiled import CompiledWindow, note
from gradaccum_mindspore.window.pynative import PyNativeWindow
from gradaccum_mindspore.workers.collectives import buckets, compiled_sum_over_workers

OPTIMIZERS = cycle(range(1, 33))
"""Numbers from 1 to 32, which identify the optimizers whose windows are shared. All
workers wrap these optimizers in the same order, so an optimizer has the same number on
every worker. At the end of a window, the workers check that they are all ending a
window of the optimizer with the same number (see `OPTIMIZER_SQUARED`).

After 32 the numbers start again at 1, because they must be small: the check adds up the
squares of the workers' numbers in float32. For numbers up to 32, this sum is exact even
with thousands of workers.
"""


# Before the workers all-reduce the gradient sums, they all-reduce a vector of numbers.
# The following constants are indices into this vector. The learning rates come last.
# Before the all-reduce, an entry contains this worker's value. After the all-reduce,
# the entry contains the total over all workers.
WEIGHT = 0
OVERFLOWS = 1
MICRO_BATCHES = 2
FLUSHES = 3
COMPILED_ENDS = 4
"""The entry at this index is 1 if this worker ends the window in compiled code, and 0
if this worker ends the window from Python. The total is the number of workers that end
the window in compiled code.
"""
OPTIMIZER = 5
OPTIMIZER_SQUARED = 6
"""The entry at `OPTIMIZER` is the number of this worker's optimizer (see `OPTIMIZERS`),
and the entry at `OPTIMIZER_SQUARED` is the square of the number.

The totals of these two entries show whether all workers have the same number. They have
the same number if and only if ``total_of_numbers ** 2`` equals
``workers * total_of_squares`` (by the Cauchy-Schwarz inequality).
"""
LOSS = 7
RATES = 8


class WorkerGroup(nn.Cell):  # type: ignore[misc]
    """Exchanges numbers and gradient sums between the workers that share a window."""

    def __init__(self, storage: Storage, inner: Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.rank, self.workers = storage.place
        self.float_dtype = storage.float_dtype
        self.buckets = nn.CellList(
            buckets(storage.shared_sums, self.workers), auto_prefix=False
        )
        self.loss_holders = self.workers if storage.sharded_places else 1
        """The number of workers that compute the loss of the same items. If some
        parameters are sharded, this is the number of all workers, because every worker
        computes the loss of all items. Otherwise, it is 1, because each worker computes
        the loss of its own items.
        """
        # Plain assignments would register these objects as parts of the Cell. `always`
        # is a Parameter, because the compiler would not create a branch for a constant
        # condition.
        object.__setattr__(self, "always", note("always", Tensor(True)))
        # `differs` is true if compiled code found that the workers were closing windows
        # of different optimizers, or that their learning rates differed.
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
        """Replace the gradient sums, the weight, the overflow flag and the loss in
        `storage` with the totals over all workers.

        The code is inside an ``if``, so that MindSpore compiles it into a graph of its
        own. In a single graph, the rest of the program would read these Parameters
        again after this code has written them. MindSpore would then copy the
        Parameters, and round float64 to float32.
        """
        if self.always:
            self.add_up_sums(self.add_up_numbers(self.zero, self.one))
        return True

    def add_up_numbers(self, flushes: Tensor, compiled_ends: Tensor) -> Tensor:
        """Return the totals over all workers of the weight, the overflow flag, the
        counts, the loss and the learning rates, as one vector. The constants `WEIGHT`
        to `RATES` are the indices of these totals.

        If the function that the user passed as ``steps`` has returned a window size
        below 1, the weight is infinite, so that all workers skip the window. Such a
        size is an error, but compiled code cannot raise errors.
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
            (  # In the order of the indices WEIGHT to LOSS.
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
        """True if the workers are closing windows of different optimizers, or if their
        learning rates differ.
        """
        square = self.workers * totals[OPTIMIZER_SQUARED]
        differ = ops.square(totals[OPTIMIZER]) != square
        if self.rates:
            all_rates = totals[RATES:].reshape((self.workers, -1))
            differ = differ | (all_rates != self.current_rates()).any()
        return differ

    def add_up_sums(self, totals: Tensor) -> bool:
        """Replace each gradient sum in ``storage.shared_sums`` with its total over all
        workers. Then write the totals of the weight, the overflow flag and the loss
        into `storage`.

        If the workers' learning rates or optimizers differ (see `workers_differ`),
        write an infinite weight and a true overflow flag instead, so that all workers
        skip the window.

        - `totals`: the vector that `add_up_numbers` returned.
        """
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
        """Return the gradient norm over all workers. `shared_norm` is the norm of the
        gradient sums that are equal on all workers, and `sharded_norm` is the norm of
        this worker's shards. The workers exchange `sharded_norm` only after
        `shared_norm` has been computed, because all workers must send their messages in
        the same order.
        """
        placed_norm = ops.where(self.is_this_worker, sharded_norm, self.zero)
        norms = compiled_sum_over_workers(
            ops.depend(placed_norm, shared_norm), self.workers
        )
        norms = ops.concat((norms, shared_norm.reshape(1)))
        largest = norms.max()
        divisor = ops.where((largest > 0) & ops.isfinite(largest), largest, self.one)
        return divisor * ops.sqrt(ops.square(norms / divisor).sum())

    def require_same_rates(self) -> None:
        """Raise an error if a window was skipped because the workers differed: their
        learning rates were not the same, or they were closing windows of different
        optimizers. A later call does not raise the error again.
        """
        if self.differs.item():
            write_numbers(self.differs, False)
            self.refuse_differences()

    def refuse_differences(self) -> None:
        rates = [float(rate) for rate in self.rates]
        kit.require_same_rates(rates, [0.5], self.workers, self.rank)

    def write_rates(self) -> None:
        """If a learning rate was set to a Python number, write the number into the
        Parameter that compiled code reads.
        """
        if not hasattr(self.inner, "lrs"):
            return
        for group, rate in zip(self.inner.param_groups, self.rates, strict=True):
            if not isinstance(group["lr"], Tensor):
                write_numbers(rate, group["lr"])
                group["lr"] = rate


def rates_of(inner: Optimizer) -> list[Any]:
    """Return the learning rate of each parameter group, or an empty list if the
    optimizer computes its learning rate from its own update counter.
    """
    if hasattr(inner, "lrs"):
        return list(inner.lrs)
    rate = getattr(inner, "learning_rate", None)
    if isinstance(rate, Parameter):
        return [rate]
    return list(rate) if isinstance(rate, ParameterTuple) else []


class AllNumbers(nn.Cell):  # type: ignore[misc]
    """A compiled program that returns two results. The first is the vector of totals
    from `WorkerGroup.add_up_numbers`. The second is true if the workers' learning rates
    or optimizers differ (see `WorkerGroup.workers_differ`).
    """

    def __init__(self, workers: WorkerGroup) -> None:
        super().__init__(auto_prefix=False)
        self.workers = workers

    def construct(self, flushes: Tensor) -> tuple[Tensor, Tensor]:
        totals = self.workers.add_up_numbers(flushes, self.workers.zero)
        return totals, self.workers.workers_differ(totals)


class WindowEnd(nn.Cell):  # type: ignore[misc]
    """A compiled program that ends a window. Its argument `totals` is the vector that
    `WorkerGroup.add_up_numbers` returned: the totals over all workers of the weight,
    the overflow flag, the counts, the loss and the learning rates.
    """

    def __init__(self, window: CompiledWindow, workers: WorkerGroup) -> None:
        super().__init__(auto_prefix=False)
        self.window = window
        self.workers = workers

    def construct(self, totals: Tensor) -> bool:
        # The all-reduce runs in a separate branch, as in
        # `WorkerGroup.compiled_all_reduce`.
        if self.workers.always:
            self.workers.add_up_sums(totals)
        return self.window.close_reduced()


class SharedWindow(PyNativeWindow):
    """A `PyNativeWindow` that several workers share. The end of the window and `flush`
    are collective operations.
    """

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
        """The memory address of each Parameter when the programs were last compiled."""

    def close(self, state: State, denominator: float | None = None) -> None:
        self.end(state, flushes=False)

    def end(self, state: State, flushes: bool) -> list[float]:
        """End the window together with all other workers. Return the vector of totals
        from `WorkerGroup.add_up_numbers` as Python numbers.
        """
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
        """Create the programs that end a window. Create them again if a Parameter has a
        new memory address, for example after ``set_data`` or
        `mindspore.load_param_into_net`. This is necessary because MindSpore 2.10 binds
        a compiled Cell to the memory that the Parameters had when the Cell was
        compiled.
        """
        parameters = self.compiled_window.get_parameters()
        addresses = [parameter.data_ptr() for parameter in parameters]
        if addresses != self.addresses:
            self.addresses = addresses
            self.all_numbers = AllNumbers(self.workers)
            self.window_end = WindowEnd(self.compiled_window, self.workers)

    def flush(self, denominator: float | None) -> bool:
        """End the open window, and then take part in the other workers' windows until
        every worker has called ``flush``. Return whether any of these windows contained
        a micro-batch.
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
    """Return a function that runs the cell as a compiled program, even in PyNative
    mode.
    """
    program: Callable[..., Any] = cell
    if not is_graph_mode():
        if not hasattr(cell, "program"):
            object.__setattr__(cell, "program", ms.jit(cell.construct))
        program = cell.program
    return program


@constexpr  # type: ignore[untyped-decorator]
def refuse_compiled_flush() -> None:
    """Raise `UsageError`, because compiled code cannot wait until every worker has
    called ``flush``.
    """
    raise UsageError(
        "flush(): expected a call from Python if workers share their windows, because"
        " flush() keeps closing windows until every worker has called flush(); got a"
        " call in compiled code. Call optimizer.flush() after the compiled step."
    )
