"""The end of a window over all workers: first a few numbers, then the sums, added up once.

Workers may hold different numbers of micro-batches, or none. A worker that runs out of data calls ``flush`` from Python. It then takes part
in the windows of the others, with nothing, until they flush too: so all make the same updates.

The others may end their windows in compiled code while this worker flushes from Python. NumPy may round a norm as MindSpore's operators do
not, and two workers would drift apart. So the numbers say where compiled code is at the end of this window, and then the rest of the end
runs as compiled code here too.
"""

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gradaccum import UsageError
from gradaccum.kit import State, at_rest, explain, joined
from gradaccum_mindspore.notes import NUMBERS
from gradaccum_mindspore.pynative_sums import ARRAYS
from gradaccum_mindspore.state import OF_ALL, OWN, STEPS, TORN, Storage, hidden_parameter
from gradaccum_mindspore.workers.exchange import NoAnswerError, added_up, compiled_added_up
from gradaccum_mindspore.workers.reduction import buckets


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
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.rank, self.workers = storage.place
        self.buckets = nn.CellList(buckets(storage.sums, self.workers), auto_prefix=False)
        self.float_dtype = storage.float_dtype
        self.own, self.torn = (Tensor([held, *storage.place], ms.int32) for held in (OWN, TORN))
        self.last: Joined | None = None
        # A Cell would list it as its own, and a constant would be no branch.
        object.__setattr__(self, "always", hidden_parameter(Tensor(True), f"gradaccum.note{next(NUMBERS)}.always"))
        self.zero, self.one = (Tensor(number, self.float_dtype) for number in (0.0, 1.0))
        self.infinite = Tensor(float("inf"), self.float_dtype)
        self.true = Tensor(True)

    def join(self, state: State, flushing: bool) -> Joined:
        """Add up the window of all workers, from Python; collective. The window of a joined one whose update raised is not added again.

        Raises:
            UsageError: an earlier reduction failed in the middle; or a worker did not come before the engine's timeout.
        """
        if self.storage.held() == OF_ALL:
            return Joined(state, True, True, False) if self.last is None else self.last._replace(state=state)
        self.require_own_sum("flush()")
        try:
            numbers = [state.weight, state.overflow, state.micro_step, flushing, 0.0]
            weight, overflows, micro_batches, flushes, compiled = added_up(np.array(numbers, ARRAYS[self.float_dtype])).tolist()
            if micro_batches:
                self.storage.hold(TORN)
                for bucket in self.buckets:
                    bucket.add_up()
        except NoAnswerError as error:
            raise alone_error(state, self.rank) from error
        whole = at_rest(State(*joined(state, weight, overflows > 0)), float64_weight=self.float_dtype == ms.float64)
        if micro_batches:
            self.storage.push(whole, state)
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
        flags = (store.overflow & self.true, store.micro_step.value(), self.zero, self.one)
        mine = ops.stack((weight, *[flag.astype(self.float_dtype) for flag in flags]))
        numbers = compiled_added_up(mine, self.workers)
        ops.assign(store.shared, self.torn)
        last = numbers
        for bucket in self.buckets:
            last = bucket(last)
        ops.assign(store.weight, numbers[0])
        ops.assign(store.overflow, numbers[1] > 0)
        return True

    def window_ended(self) -> Tensor:
        """The next window begins, with this worker's own sum; for compiled code."""
        return ops.assign(self.storage.shared, self.own)

    def require_own_sum(self, call: str) -> None:
        """The sum is this worker's own.

        Raises:
            UsageError: it is that of all workers, because the update raised; or the reduction failed.
        """
        held = self.storage.held()
        if held == OF_ALL:
            fix = "Call optimizer.flush() to make the update that is due, or optimizer.discard() on every worker."
            found = "a window that is added up over all workers, whose update raised"
            raise explain(UsageError, call, expected="to be called before the window's end", found=found, fix=fix)
        if held == TORN:
            fix = "Load the last checkpoint on every worker, or call optimizer.discard()."
            raise explain(UsageError, call, expected="a whole sum", found="one whose reduction over the workers failed", fix=fix)


def alone_error(state: State, rank: int) -> UsageError:
    """The error for a reduction that failed: most often a worker did not come."""
    here = f"{state.micro_step} micro-batches of update {state.optimizer_step + 1}"
    return explain(
        UsageError,
        f"the end of a window on rank {rank}",
        expected="every worker to end its window too, by a micro-batch or by flush()",
        found=f"a reduction that failed or timed out, with {here} here",
        fix="Call flush() on every worker when its data end: it takes part in the windows of the others until they flush too. Give slow "
        "workers more time: MS_CPU_COMM_OP_TIMEOUT=600, in seconds.",
    )
