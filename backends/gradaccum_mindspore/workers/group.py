"""The end of a window over all workers: first a few numbers, then the sums, added up once.

Workers may hold different numbers of micro-batches, or none. A worker that runs out of data calls ``flush`` from Python. It then takes part
in the windows of the others, with nothing, until they flush too: so all make the same updates.

The others may end their windows in compiled code while this worker flushes from Python. NumPy may round a norm as MindSpore's operators do
not, and two workers would drift apart. So the numbers say where compiled code is at the end of this window, and then the rest of the end
runs as compiled code here too.

Each worker puts its learning rates in places of its own among the numbers, so each sees all. Compiled code that finds different ones
cannot raise: all workers skip the window as an overflow, and Python raises afterwards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from gradaccum.kit import State, at_rest, joined, missing_worker_error, require_same_rates, torn_window_error, update_due_error
from gradaccum_mindspore.notes import NUMBERS
from gradaccum_mindspore.pynative_sums import ARRAYS
from gradaccum_mindspore.state import OF_ALL, OWN, STEPS, TORN, Storage
from gradaccum_mindspore.sums import hidden_parameter
from gradaccum_mindspore.types import Optimizer
from gradaccum_mindspore.workers.exchange import NoAnswerError, added_up, compiled_added_up
from gradaccum_mindspore.workers.reduction import buckets

_MORE_TIME = "Give slow workers more time: MS_CPU_COMM_OP_TIMEOUT=600, in seconds."

SHARES = 5
"""Where what a window knows begins in the numbers that the workers add up."""


class Joined(NamedTuple):
    """A window after its workers were added up."""

    state: State
    """With the weight and the overflow flag of all."""
    is_open: bool
    """One of them holds a micro-batch."""
    all_flush: bool
    in_compiled_code: bool
    """One of them ends it in compiled code."""


class WorkerGroup(nn.Cell):  # type: ignore[misc]
    """All workers, as the window of one of them sees them.

    Args:
        storage: the window's Parameters.
        inner: the optimizer that the window's update is made by.
    """

    def __init__(self, storage: Storage, inner: Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.rank, self.workers = storage.place
        object.__setattr__(self, "inner", inner)  # A Cell would list it as its own.
        object.__setattr__(self, "rates", tuple(rates_of(inner)))
        self.own_places = Tensor(np.eye(self.workers)[self.rank][:, None], storage.float_dtype)
        self.buckets = nn.CellList(buckets(storage.sums, self.workers), auto_prefix=False)
        self.float_dtype = storage.float_dtype
        self.own, self.torn = (Tensor([held, *storage.place], ms.int32) for held in (OWN, TORN))
        self.last: Joined | None = None
        # A Cell would list it as its own, and a constant would be no branch.
        object.__setattr__(self, "always", hidden_parameter(Tensor(True), f"gradaccum.note{next(NUMBERS)}.always"))
        object.__setattr__(self, "drifted", hidden_parameter(Tensor(False), f"gradaccum.note{next(NUMBERS)}.drifted"))
        """Compiled code found different learning rates."""
        self.zero, self.one = (Tensor(number, self.float_dtype) for number in (0.0, 1.0))
        self.infinite = Tensor(float("inf"), self.float_dtype)
        self.true, self.false = Tensor(True), Tensor(False)

    def join(self, state: State, flushing: bool) -> Joined:
        """Add up the window of all workers, from Python; collective. The window of a joined one whose update raised is not added again.

        Raises:
            UsageError: an earlier reduction failed in the middle; a worker did not come before the engine's timeout; or workers have
                different learning rates, and the sums are as they were.
        """
        if self.storage.held() == OF_ALL:
            return Joined(state, True, True, False) if self.last is None else self.last._replace(state=state)
        self.require_own_sum("flush()")
        try:
            numbers = [state.weight, state.overflow, state.micro_step, flushing, 0.0, *self.storage.knowledge.shares(state)]
            rates = np.array([float(rate) for rate in rates_of(self.inner)], ARRAYS[self.float_dtype])
            placed = np.zeros((self.workers, len(rates)), rates.dtype)
            placed[self.rank] = rates
            added = added_up(np.concatenate((np.array(numbers, rates.dtype), placed.reshape(-1)))).tolist()
            weight, overflows, micro_batches, flushes, compiled, *shares = added[: len(numbers)]
            alike = sum(row == rates.tolist() for row in np.reshape(added[len(numbers) :], placed.shape).tolist())
            if micro_batches and not compiled:
                require_same_rates(rates.tolist(), [alike], self.workers, self.rank)
            elif micro_batches and alike < self.workers:
                ops.assign(self.drifted, self.true)
                weight, overflows = math.inf, 1.0
            if micro_batches:
                self.storage.hold(TORN)
                for bucket in self.buckets:
                    bucket.add_up()
        except NoAnswerError as error:
            raise missing_worker_error(state, self.rank, _MORE_TIME) from error
        whole = at_rest(State(*joined(state, weight, overflows > 0)), float64_weight=self.float_dtype == ms.float64)
        if micro_batches:
            self.storage.push(whole, state)
            self.storage.knowledge.push_joined(whole, shares)
            self.storage.hold(OF_ALL)
        self.last = Joined(whole, micro_batches > 0, flushes == self.workers, compiled > 0)
        return self.last

    def compiled_join(self) -> bool:
        """The same in compiled code: the sums, the weight and the flag become those of all.

        In a branch of its own: where one graph reads a Parameter, writes it and reads it again, MindSpore puts copies in, and its copy of
        float64 is rounded to float32 on the CPU.
        """
        if self.always:
            self.add_up()
        return True

    def add_up(self) -> bool:
        """The branch of `compiled_join`.

        A failure in it leaves the sum marked as torn. A window that is not this worker's own, or that the user's function gave a size below
        1, gets an infinite weight: compiled code cannot raise, and so all workers skip it.
        """
        store = self.storage
        sound = (store.shared.value()[0] == OWN) & (store.terms.value()[STEPS] >= 1)
        weight = ops.where(sound, store.weight.value(), self.infinite)
        flags = ((store.overflow & self.true) | (sound == False), store.micro_step.value(), self.zero, self.one)  # noqa: E712
        shares = store.knowledge.compiled_shares(store.weight.value())
        mine, drifted = ops.stack((weight, *[flag.astype(self.float_dtype) for flag in flags], *shares)), self.false
        if self.rates:
            rates = ops.stack([rate.astype(self.float_dtype) for rate in self.rates])
            numbers = compiled_added_up(ops.concat((mine, (self.own_places * rates).reshape(-1))), self.workers)
            drifted = (numbers[mine.shape[0] :].reshape((self.workers, -1)) != rates).any()
            ops.assign(self.drifted, drifted | self.drifted)
        else:
            numbers = compiled_added_up(mine, self.workers)
        ops.assign(store.shared, self.torn)
        last = numbers
        for bucket in self.buckets:
            last = bucket(last)
        store.knowledge.compiled_push_joined(numbers, SHARES)
        ops.assign(store.weight, ops.where(drifted, self.infinite, numbers[0]))
        ops.assign(store.overflow, (numbers[1] > 0) | drifted)
        return True

    def window_ended(self) -> Tensor:
        """The next window begins, with this worker's own sum; for compiled code."""
        return ops.assign(self.storage.shared, self.own)

    def require_same_rates(self) -> None:
        """Raise `UsageError` once if compiled code has found different learning rates, and skipped windows for that."""
        if self.drifted.item():
            ops.assign(self.drifted, self.false)
            require_same_rates([float(rate) for rate in rates_of(self.inner)], [0.5], self.workers, self.rank)

    def require_own_sum(self, call: str) -> None:
        """The sum is this worker's own.

        Raises:
            UsageError: it is that of all workers, because the update raised; or the reduction failed.
        """
        held = self.storage.held()
        if held == OF_ALL:
            raise update_due_error(call)
        if held == TORN:
            raise torn_window_error(call)


def rates_of(inner: Optimizer) -> list[Any]:
    """The learning rate of each group, a Parameter or a number; none where a schedule of the optimizer's own moves them by its updates."""
    if hasattr(inner, "lrs"):
        groups = zip(inner.param_groups, inner.lrs, strict=True)
        return [group["lr"] if isinstance(group["lr"], float) else rate for group, rate in groups]
    held = getattr(inner, "learning_rate", None)
    return [held] if isinstance(held, Parameter) else list(held) if isinstance(held, ParameterTuple) else []
