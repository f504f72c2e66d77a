"""The window of several workers: the end that they make together.

The end adds up a few numbers, then the sums, once. A worker that runs out of data calls
``flush`` from Python, and takes part in the windows of the others, with nothing, until
they flush too. The others may end theirs in compiled code meanwhile, which may round
norms otherwise than NumPy: if the numbers say so, all run the rest of the end as
compiled code. Each worker's learning rates have places of their own among the numbers.
Compiled code that finds different ones cannot raise: all workers skip the window as an
overflow, and Python raises afterwards.

The sum of a sharded parameter is not sent. After the sums, each worker sends the norm
of its own shards, an inf if they are not finite, so that all have one norm and one
decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import UsageError, kit
from gradaccum.kit import Options, Schedule, State, explain
from gradaccum_mindspore.gradient_sum import ARRAYS, Gradients, measure
from gradaccum_mindspore.master_weights import Optimizer
from gradaccum_mindspore.state import (
    ALL_WORKERS,
    NOBODY,
    STEPS,
    THIS_WORKER,
    Storage,
    write_numbers,
)
from gradaccum_mindspore.update import Update
from gradaccum_mindspore.window.compiled import CompiledWindow, note
from gradaccum_mindspore.window.pynative import PyNativeWindow
from gradaccum_mindspore.workers.collectives import (
    NoAnswerError,
    buckets,
    compiled_sum_over_workers,
    sum_over_workers,
)

OPTIMIZERS = cycle(range(1, 33))
"""Numbers the optimizers that share windows: all workers wrap in one order. So few that
the squares of thousands of workers add up exactly in float32.
"""


class Numbers(NamedTuple):
    """The numbers that are added up over the workers before the sums. The learning
    rates follow them.
    """

    weight: float
    overflows: float
    micro_batches: float
    flushes: float
    compiled_ends: float
    optimizer: float
    optimizer_squared: float
    """With `optimizer` it shows whether all workers end a window of one optimizer."""
    loss: float

    def is_mixed(self, workers: int) -> bool:
        """True if a worker has ended a window of another optimizer."""
        return self.optimizer**2 != workers * self.optimizer_squared


OPTIMIZER = Numbers._fields.index("optimizer")
OPTIMIZER_SQUARED = Numbers._fields.index("optimizer_squared")
LOSS = Numbers._fields.index("loss")


class ReducedWindow(NamedTuple):
    """A window after its workers were added up."""

    state: State
    """With the weight and the overflow flag of all."""
    is_open: bool
    """One of the workers holds a micro-batch."""
    all_flush: bool
    is_compiled: bool
    """One of the workers ends it in compiled code."""


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
        self.loss_holders = self.workers if storage.sharded else 1
        """Workers that have one and the same loss: that of all items, where some
        parameters are sharded.
        """
        self.sharded_norms: list[float] | None = None
        """Each worker's norm of its sharded sums, in the window that was reduced last.
        """
        self.last_window: ReducedWindow | None = None
        self.number = next(OPTIMIZERS)
        # A Cell would list these as its own.
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "rates", tuple(rates_of(inner)))
        # A constant would be no branch.
        object.__setattr__(self, "always", note("always", Tensor(True)))
        # Compiled code found a window of another optimizer, or different rates.
        object.__setattr__(self, "was_mixed", note("was_mixed", Tensor(False)))
        object.__setattr__(self, "had_drifted", note("had_drifted", Tensor(False)))
        self.is_this_worker = Tensor(np.arange(self.workers) == self.rank)
        places = np.eye(self.workers)[self.rank][:, None]
        self.rate_places = Tensor(places, self.float_dtype)
        self.this_worker = Tensor([THIS_WORKER, *storage.place], ms.int32)
        self.nobody = Tensor([NOBODY, *storage.place], ms.int32)
        self.optimizer_number = Tensor(self.number, self.float_dtype)
        self.optimizer_square = Tensor(self.number**2, self.float_dtype)
        self.zero = Tensor(0.0, self.float_dtype)
        self.one = Tensor(1.0, self.float_dtype)
        self.infinity = Tensor(float("inf"), self.float_dtype)
        self.true = Tensor(True)
        self.false = Tensor(False)

    # From Python.

    def all_reduce(self, state: State, is_flushing: bool) -> ReducedWindow:
        """Make this the window of all workers; collective. One whose update raised is
        not added up again.
        """
        if self.storage.sum_owner() == ALL_WORKERS:
            if self.last_window is None:
                return ReducedWindow(state, True, True, False)
            return self.last_window._replace(state=state)
        self.require_own_sum("flush()")
        try:
            numbers, same_rates = self.reduced_numbers(state, is_flushing)
            weight = numbers.weight
            has_overflow = numbers.overflows > 0
            is_open = numbers.micro_batches > 0
            if is_open:
                is_mixed = numbers.is_mixed(self.workers)
                if not numbers.compiled_ends:
                    self.require_same_optimizer(is_mixed)
                    self.require_rates(same_rates)
                elif is_mixed or same_rates < self.workers:
                    # As compiled code does, which cannot raise.
                    write_numbers(self.had_drifted, True)
                    write_numbers(self.was_mixed, is_mixed)
                    weight = math.inf
                    has_overflow = True
                for bucket in self.buckets:
                    total = bucket.total()
                    # If the first one fails, all sums are this worker's still.
                    self.storage.set_sum_owner(NOBODY)
                    bucket.unpack(total)
        except NoAnswerError as error:
            raise self.missing_worker_error(state) from error
        global_state = self.storage.at_rest(kit.joined(state, weight, has_overflow))
        if is_open:
            self.storage.push(global_state, state)
            window_loss = self.storage.window_loss
            window_loss.write((numbers.loss, global_state.weight, window_loss.value))
            self.storage.set_sum_owner(ALL_WORKERS)
        self.sharded_norms = None
        self.last_window = ReducedWindow(
            global_state,
            is_open,
            all_flush=numbers.flushes == self.workers,
            is_compiled=numbers.compiled_ends > 0,
        )
        return self.last_window

    def reduced_numbers(self, state: State, is_flushing: bool) -> tuple[Numbers, int]:
        """Return the numbers of all workers, and how many of them have the learning
        rates of this one.
        """
        numbers = Numbers(
            state.weight,
            state.overflow,
            state.micro_step,
            is_flushing,
            0.0,
            self.number,
            self.number**2,
            self.storage.window_loss.total(state) / self.loss_holders,
        )
        dtype = ARRAYS[self.float_dtype]
        rates = np.array(self.current_rates(), dtype)
        all_rates = np.zeros((self.workers, len(rates)), dtype)
        all_rates[self.rank] = rates
        totals = sum_over_workers(
            np.concatenate((np.array(numbers, dtype), all_rates.reshape(-1)))
        )
        all_rates = totals[len(numbers) :].reshape(all_rates.shape)
        same_rates = int((all_rates == rates).all(axis=1).sum())
        return Numbers(*totals[: len(numbers)].tolist()), same_rates

    def global_norm(
        self, shared_norm: float, sharded_norm: float, state: State
    ) -> float:
        """Return the norm over all workers, of the sums that are equal on all and of
        this worker's shards. Collective, once in a window.
        """
        if self.sharded_norms is None:
            norms = np.zeros(self.workers, ARRAYS[self.float_dtype])
            norms[self.rank] = sharded_norm
            try:
                self.sharded_norms = sum_over_workers(norms).tolist()
            except NoAnswerError as error:
                raise self.missing_worker_error(state) from error
        return math.hypot(shared_norm, *self.sharded_norms)

    # In compiled code.

    def compiled_all_reduce(self) -> bool:
        """Make the sums, the weight and the flag those of all workers.

        In a branch of its own: where one graph reads a Parameter again after a write,
        MindSpore copies it, float64 rounded to float32.
        """
        if self.always:
            self.add_up()
        return True

    def add_up(self) -> bool:
        """Run the branch of `compiled_all_reduce`.

        A failure in it leaves a sum that belongs to nobody. Compiled code cannot raise:
        a window that is not this worker's own, or of a size below 1, gets an infinite
        weight, and all workers skip it.
        """
        storage = self.storage
        is_own = storage.owner.value()[0] == THIS_WORKER
        is_sound = is_own & (storage.terms.value()[STEPS] >= 1)
        weight = ops.where(is_sound, storage.weight.value(), self.infinity)
        overflow = (storage.overflow & self.true) | (is_sound == False)  # noqa: E712
        loss = storage.window_loss.compiled_total(storage.weight.value())
        if self.loss_holders > 1:
            loss = loss / self.loss_holders
        numbers = ops.stack(
            (
                weight,
                overflow.astype(self.float_dtype),
                storage.micro_step.value().astype(self.float_dtype),
                self.zero,
                self.one,
                self.optimizer_number,
                self.optimizer_square,
                loss,
            )
        )
        has_drifted = self.false
        if self.rates:
            rates = ops.stack([rate.astype(self.float_dtype) for rate in self.rates])
            all_rates = (self.rate_places * rates).reshape(-1)
            totals = compiled_sum_over_workers(
                ops.concat((numbers, all_rates)), self.workers
            )
            all_rates = totals[numbers.shape[0] :].reshape((self.workers, -1))
            has_drifted = (all_rates != rates).any()
        else:
            totals = compiled_sum_over_workers(numbers, self.workers)
        square = self.workers * totals[OPTIMIZER_SQUARED]
        is_mixed = ops.square(totals[OPTIMIZER]) != square
        has_drifted = has_drifted | is_mixed
        ops.assign(self.had_drifted, has_drifted | self.had_drifted)
        ops.assign(self.was_mixed, is_mixed | self.was_mixed)
        ops.assign(storage.owner, self.nobody)
        last = totals
        for bucket in self.buckets:
            last = bucket(last)
        losses = storage.window_loss.compiled_with_total(totals[LOSS], totals[0])
        ops.assign(storage.window_loss.loss, losses)
        ops.assign(storage.weight, ops.where(has_drifted, self.infinity, totals[0]))
        ops.assign(storage.overflow, (totals[1] > 0) | has_drifted)
        return True

    def compiled_global_norm(self, shared_norm: Tensor, sharded_norm: Tensor) -> Tensor:
        """Return `global_norm`, after everything that `shared_norm` needs: all workers
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

    def window_ended(self) -> Tensor:
        """Begin the next window, with this worker's own sum."""
        return ops.assign(self.storage.owner, self.this_worker)

    # Refusals.

    def require_own_sum(self, call: str) -> None:
        """Raise unless the open window's sum belongs to this worker."""
        owner = self.storage.sum_owner()
        if owner == ALL_WORKERS:
            raise kit.update_due_error(call)
        if owner == NOBODY:
            raise kit.torn_window_error(call)

    def require_same_optimizer(self, is_mixed: bool) -> None:
        """Raise unless all workers have ended a window of this optimizer."""
        if is_mixed:
            name = self.storage.specs[0][0]
            raise explain(
                UsageError,
                f"optimizer of {name!r} on rank {self.rank}",
                expected="its window to end on every worker at once",
                found="another optimizer's window, which ended on another worker",
                fix="Give each worker as many micro-batches of each optimizer. One with"
                " weight=0 adds nothing.",
            )

    def require_rates(self, same_rates: float) -> None:
        rates = self.current_rates()
        kit.require_same_rates(rates, [same_rates], self.workers, self.rank)

    def require_same_rates(self) -> None:
        """Raise unless compiled code found equal learning rates, and windows of this
        optimizer; once, as it has skipped windows for that.
        """
        if self.had_drifted.item():
            was_mixed = self.was_mixed.item()
            write_numbers(self.had_drifted, False)
            write_numbers(self.was_mixed, False)
            self.require_same_optimizer(was_mixed)
            self.require_rates(0.5)

    def current_rates(self) -> list[float]:
        return [float(rate) for rate in rates_of(self.inner)]

    def missing_worker_error(self, state: State) -> UsageError:
        more_time = (
            "Give slow workers more time: MS_CPU_COMM_OP_TIMEOUT=600, in seconds."
        )
        return kit.missing_worker_error(state, self.rank, more_time)


def rates_of(inner: Optimizer) -> list[Any]:
    """Return the learning rate of each group; none if a schedule of the optimizer's own
    moves them by its updates.
    """
    if hasattr(inner, "lrs"):
        rates = []
        for group, rate in zip(inner.param_groups, inner.lrs, strict=True):
            rates.append(group["lr"] if isinstance(group["lr"], float) else rate)
        return rates
    rate = getattr(inner, "learning_rate", None)
    if isinstance(rate, Parameter):
        return [rate]
    return list(rate) if isinstance(rate, ParameterTuple) else []


class CompiledEnd(nn.Cell):  # type: ignore[misc]
    """The end of a window whose workers are added up, as compiled code."""

    def __init__(self, window: CompiledWindow, update: Update) -> None:
        super().__init__(auto_prefix=False)
        self.window = window
        self.update = update

    def construct(self) -> bool:
        return self.window.close_reduced(self.update, False)


class SharedWindow(PyNativeWindow):
    """As `PyNativeWindow`; the end of a window and `flush` are collective."""

    def __init__(
        self,
        storage: Storage,
        options: Options,
        compiled_window: CompiledWindow,
        workers: WorkerGroup,
    ) -> None:
        super().__init__(storage, options)
        self.compiled_window = compiled_window
        self.workers = workers
        self.is_flushing = False
        """A `flush` has begun and not ended, be it because an update raised in it."""
        self.compiled_end: Callable[[], bool] | None = None

    def add(
        self,
        gradients: Gradients,
        weight: float,
        size: Schedule,
        loss: float | None = None,
    ) -> State:
        self.workers.require_own_sum("gradients")
        return super().add(gradients, weight, size, loss)

    def close(
        self, state: State, update: Update, denominator: float | None = None
    ) -> None:
        self.is_flushing = False
        self.end(state, update)

    def end(self, state: State, update: Update) -> ReducedWindow:
        """End the window of all workers, in this one's part."""
        reduced_window = self.workers.all_reduce(state, self.is_flushing)
        if reduced_window.is_open and reduced_window.is_compiled:
            self.run_compiled_end(update)
        elif reduced_window.is_open:
            super().close(reduced_window.state, update)
        return reduced_window

    def run_compiled_end(self, update: Update) -> None:
        if self.compiled_end is None:
            cell = CompiledEnd(self.compiled_window, update)
            is_graph_mode = ms.get_context("mode") == ms.GRAPH_MODE
            self.compiled_end = cell if is_graph_mode else ms.jit(cell.construct)
        self.compiled_end()

    def measure(self, ending: State, options: Options) -> tuple[float, bool]:
        """Return the norm over all workers, and whether all sums are finite on all of
        them; collective if some are sharded.
        """
        storage = self.storage
        if not storage.sharded:
            return super().measure(ending, options)
        shared_norm, is_finite = measure(storage.shared_sums, storage.float_dtype)
        sharded_norm, is_sound = measure(storage.sharded_sums, storage.float_dtype)
        local_norm = math.hypot(shared_norm, sharded_norm)
        if not is_sound or not self.fits(ending, options, local_norm):
            sharded_norm = math.inf
        norm = self.workers.global_norm(shared_norm, sharded_norm, ending)
        return norm, is_finite and math.isfinite(norm)

    def flush(self, update: Update, denominator: float | None = None) -> bool:
        """End windows until all workers flush; returns whether one of them held a
        micro-batch.

        If the update of a window that all workers ended raised, this makes it, and
        takes part in no other window.
        """
        was_open = self.storage.sum_owner() == ALL_WORKERS
        if was_open:
            reduced_window = self.end(self.storage.pull(), update)
            if not self.is_flushing or reduced_window.all_flush:
                self.is_flushing = False
                return True
        self.is_flushing = True
        all_flush = False
        while not all_flush:
            reduced_window = self.end(self.storage.pull(), update)
            all_flush = reduced_window.all_flush
            was_open = was_open or reduced_window.is_open
            if reduced_window.is_open and not all_flush:
                self.storage.between_windows()
        self.is_flushing = False
        if not was_open:
            self.storage.push_event()
        self.workers.require_same_rates()
        return was_open

    def clear(self) -> None:
        super().clear()
        self.storage.set_sum_owner(THIS_WORKER)


@constexpr  # type: ignore[untyped-decorator]
def refuse_compiled_flush() -> None:
    """Raise `UsageError`: compiled code cannot wait until all workers flush, and takes
    no denominator.
    """
    raise explain(
        UsageError,
        "flush()",
        expected="a call from Python with a denominator, or where workers share their"
        " windows, as it ends windows until all have called it",
        found="one in compiled code",
        fix="Call optimizer.flush() after the compiled step.",
    )
