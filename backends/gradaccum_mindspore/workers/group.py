"""The window of several workers: what they agree on before, the end that they make
together, and what they send each other.

Workers that share windows must start with equal options and equal parameters: they
exchange gradients alone. A parameter that the user marked as ``layerwise_parallel`` is
each worker's own: its sum is not sent. After the sums, each worker sends the norm of
its own ones, an inf if they are not finite, so that all have one norm and one decision.

The end adds up a few numbers, then the sums, once. A worker that runs out of data calls
``flush`` from Python, and takes part in the windows of the others, with nothing, until
they flush too. The others may end theirs in compiled code meanwhile, which may round
norms otherwise than NumPy: if the numbers say so, all run the rest of the end as
compiled code. Each worker's learning rates have places of their own among the numbers.
Compiled code that finds different ones cannot raise: all workers skip the window as an
overflow, and Python raises afterwards.

Small sums travel packed together, a large one alone. One message leaves when the one
before has arrived: the CPU's kernels match messages by order. These kernels add up
float32 and float16 only, and gather float64 rounded to float32. So half-precision sums
travel as float32, and a float64 number as a sum of three of float32, which is exact; a
number beyond float32's range arrives as an inf.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from itertools import count, cycle
from math import prod
from typing import Any, NamedTuple
from weakref import finalize

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.ops import Primitive, constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError, kit
from gradaccum.kit import Options, Schedule, State, explain
from gradaccum_mindspore.gradient_sum import (
    ARRAYS,
    Array,
    Gradients,
    Sums,
    array_of,
    map_over,
    measure,
    working_dtype,
    write,
)
from gradaccum_mindspore.master_weights import Optimizer
from gradaccum_mindspore.state import ALL_WORKERS, NOBODY, STEPS, THIS_WORKER, Storage
from gradaccum_mindspore.update import Update
from gradaccum_mindspore.window.compiled import CompiledWindow, note
from gradaccum_mindspore.window.pynative import PyNativeWindow
from gradaccum_mindspore.workers.gather import gather_exactly

ALL_REDUCE, ALL_GATHER = ops.AllReduce, ops.AllGather


class NoAnswerError(Exception):
    """The engine gave up waiting for another worker, or lost it."""


def added_up(mine: Array) -> Array:
    """Return the sum over the workers of a vector of float32 or float64, in NumPy;
    `compiled_added_up` sends the same.
    """
    if mine.dtype == np.float32:
        return _answer(ALL_REDUCE, mine)
    with np.errstate(over="ignore", invalid="ignore"):
        high = mine.astype(np.float32)
        rest = np.where(np.isfinite(high), mine - high, 0.0)
        middle = rest.astype(np.float32)
        low = (rest - middle).astype(np.float32)
    gathered = _answer(ALL_GATHER, np.stack((high, middle, low)))
    return _in_turn(gathered.astype(np.float64).reshape(-1, 3, mine.size))


def _in_turn(parts: Array) -> Array:
    """Add in the order of compiled code."""
    each = parts[:, 0] + parts[:, 1] + parts[:, 2]
    total: Array = each[0]
    for other in each[1:]:
        total = total + other
    return total


def compiled_added_up(mine: Tensor, workers: int) -> Tensor:
    if mine.dtype == ms.float32:
        return ALL_REDUCE()(mine)
    each = gather_exactly(ALL_GATHER(), mine, workers)
    total = each[0]
    for worker in range(1, workers):
        total = total + each[worker]
    return total


def gather_texts(text: str) -> list[str]:
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    lengths = _answer(ALL_GATHER, np.array([len(codes)], np.int32))
    rows = _answer(
        ALL_GATHER, np.pad(codes, (0, int(lengths.max()) - len(codes)))
    ).reshape(len(lengths), -1)
    return [
        bytes(row[:length].astype(np.uint8)).decode()
        for row, length in zip(rows, lengths, strict=True)
    ]


def _answer(operator: type[Primitive], values: Array) -> Array:
    try:
        array: Array = operator()(
            Tensor.from_numpy(np.ascontiguousarray(values))
        ).asnumpy()
    except RuntimeError as error:
        raise NoAnswerError from error
    return array


INIT = "Call mindspore.communication.init() first, in a program that msrun started."
OWN_MODES = ("stand_alone", "data_parallel")
"""The parallel modes in which MindSpore's compiler does not reduce gradients by itself.
"""


def shares_windows(data_parallel: object) -> bool:
    """Return the option ``data_parallel``, checked."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    if data_parallel is None:
        unknown = mode == "data_parallel" and not GlobalComm.INITED
        if unknown or _workers_here() > 1:
            expected = "True or False where there are several workers"
            fix = (
                "Write gradaccum.wrap(optimizer, steps=4, data_parallel=True) for"
                " windows over all workers; False if this worker's gradients need no"
                " other's, or are reduced before they come in."
            )
            raise explain(
                UsageError, "data_parallel", expected=expected, got=None, fix=fix
            )
        return False
    if not isinstance(data_parallel, bool):
        raise explain(
            ArgumentTypeError,
            "data_parallel",
            expected="True, False or None",
            got=data_parallel,
            fix="Write data_parallel=True.",
        )
    if data_parallel and not GlobalComm.INITED:
        raise explain(
            UsageError,
            "data_parallel",
            expected="communication that is initialised",
            found="none in this process",
            fix=INIT,
        )
    if data_parallel and mode not in OWN_MODES:
        expected, fix = (
            f"False in the parallel mode {mode}",
            (
                "MindSpore reduces the gradients in every micro-batch there: leave it"
                " False."
            ),
        )
        raise explain(UsageError, "data_parallel", expected=expected, got=True, fix=fix)
    return data_parallel


def place() -> tuple[int, int]:
    return int(get_rank()), int(get_group_size())


def is_sharded(parameter: Parameter) -> bool:
    """True if the user marked the Parameter as ``layerwise_parallel``: each worker's
    own.
    """
    return bool(parameter.layerwise_parallel) and not getattr(
        parameter, "shares_windows", 0
    )


def require_same_everywhere(
    parameters: Sequence[Parameter], options: Options, name: str
) -> tuple[int, ...]:
    """Raise unless the workers that share an optimizer's windows wrap the same; return
    the positions of the sharded parameters. Collective, in one order.

    Raises:
        ArgumentValueError: on every worker: a worker's differ.
    """
    # Two workers' functions and scalers are different objects.
    steps = "a function" if callable(options.steps) else options.steps
    mine = dict(
        options._asdict(),
        steps=steps,
        scaler=type(options.scaler).__name__,
        accumulate_dtype=str(options.accumulate_dtype),
    )
    sharded = tuple(
        position
        for position, parameter in enumerate(parameters)
        if is_sharded(parameter)
    )
    text = json.dumps(
        [str(dict(mine, name=name)), *map(_spec, parameters), *map(_values, parameters)]
    )
    try:
        texts = gather_texts(text)
    except NoAnswerError as error:
        expected, found = (
            "every worker to wrap its optimizer too",
            "an exchange that failed or timed out",
        )
        fix = "Wrap on every worker, in the same order."
        raise explain(
            UsageError, "gradaccum.wrap", expected=expected, found=found, fix=fix
        ) from error
    everyone = [json.loads(text) for text in texts]
    _require_equal(
        [each[:1] for each in everyone],
        "options",
        "Give every worker the same options.",
    )
    fix = "Build the same model with the same optimizer on every worker."
    _require_equal(
        [each[1 : len(each) // 2 + 1] for each in everyone], "parameters", fix
    )
    fix = (
        "Call mindspore.set_seed(1) before the model is built, or load one checkpoint"
        " on every worker."
    )
    _require_equal([each[len(each) // 2 + 1 :] for each in everyone], "parameters", fix)
    if sharded:
        _require_shardable(options, whole=len(parameters) - len(sharded))
    return sharded


def _require_shardable(options: Options, whole: int) -> None:
    """Raise unless windows can have sharded parameters, whose loss is one of the items
    of all workers.
    """
    beside, fix = (
        "beside parameters marked as layerwise_parallel",
        'Sum the loss, and write reduction="sum_per_item".',
    )
    if options.reduction == "mean":
        raise explain(
            ArgumentValueError,
            "reduction",
            expected=f'"sum_per_item" or "sum" {beside}',
            got="mean",
            fix=fix,
        )
    if options.on_overflow == "drop_micro_batch":
        fix = "Leave it out: one worker alone sees what a shard's gradient holds."
        raise explain(
            ArgumentValueError,
            "on_overflow",
            expected=f"the default {beside}",
            found="another",
            fix=fix,
        )
    if not whole:
        fix = (
            "Write data_parallel=False, where no worker shares a parameter with"
            " another."
        )
        raise explain(
            ArgumentValueError,
            "data_parallel",
            expected=f"a parameter of all workers {beside}",
            found="none",
            fix=fix,
        )


MARKS = count(1)


def mark(optimizer: nn.Cell, parameters: Sequence[Parameter]) -> None:
    """Mark the parameters that workers share as ``layerwise_parallel``, which
    MindSpore's own reducer leaves alone, for as long as `optimizer` lives.
    """
    owner = next(MARKS)
    shared = [parameter for parameter in parameters if not is_sharded(parameter)]
    for parameter in shared:
        parameter.layerwise_parallel = True
        parameter.shares_windows = owner
    finalize(optimizer, unmark, shared, owner).atexit = False


def unmark(parameters: Sequence[Parameter], owner: int | None = None) -> None:
    """Undo `mark`, or the mark of `owner` alone."""
    for parameter in parameters:
        marked = getattr(parameter, "shares_windows", 0)
        if marked and owner in (None, marked):
            parameter.layerwise_parallel = False
            parameter.shares_windows = 0


def _require_equal(everyone: Sequence[Sequence[str]], argument: str, fix: str) -> None:
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            first = next(
                (
                    pair
                    for pair in zip(everyone[0], other, strict=False)
                    if pair[0] != pair[1]
                ),
                (len(everyone[0]), len(other)),
            )
            expected, found = (
                f"the same on every worker: {first[0]}",
                f"{first[1]} on rank {rank}",
            )
            raise explain(
                ArgumentValueError, argument, expected=expected, found=found, fix=fix
            )


def _spec(parameter: Parameter) -> str:
    shape = (
        "sharded, as layerwise_parallel says"
        if is_sharded(parameter)
        else f"of shape {tuple(parameter.shape)}"
    )
    return f"{parameter.name!r}, {parameter.dtype} {shape}"


def _values(parameter: Parameter) -> str:
    if is_sharded(parameter):
        return ""
    wide = parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter
    return (
        f"{parameter.name!r} with the checksum"
        f" {zlib.crc32(wide.asnumpy().tobytes()):08x}"
    )


def _workers_here() -> int:
    return (
        int(get_group_size())
        if GlobalComm.INITED
        else int(os.environ.get("MS_WORKER_NUM", "1"))
    )


BUCKET_ELEMENTS = 25 * 2**18
"""25 MiB of float32, the size of the buckets of
`torch.nn.parallel.DistributedDataParallel`.
"""
LARGE_ELEMENTS = 2**18


class Bucket(nn.Cell):  # type: ignore[misc]
    """Sums of one working dtype that travel as one vector."""

    def __init__(self, sums: Sequence[Parameter], workers: int) -> None:
        super().__init__(auto_prefix=False)
        # A Cell would list them as its own.
        object.__setattr__(self, "sums", tuple(sums))
        self.workers = workers
        sizes = [prod(total.shape) for total in sums]
        self.starts = tuple(sum(sizes[:index]) for index in range(len(sizes)))
        self.ends = tuple(
            start + size for start, size in zip(self.starts, sizes, strict=True)
        )

    def total(self) -> Array:
        arrays = [_array(each_sum).reshape(-1) for each_sum in self.sums]
        return added_up(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def unpack(self, total: Array) -> None:
        for each_sum, start, end in zip(self.sums, self.starts, self.ends, strict=True):
            write(
                each_sum,
                Tensor.from_numpy(total[start:end].reshape(each_sum.shape)).astype(
                    each_sum.dtype
                ),
            )

    def construct(self, after: Tensor) -> Tensor:
        """Return the vector of totals, once `after` is computed."""
        packed = ops.depend(ops.concat(map_over(_flat, self.sums)), after)
        total = compiled_added_up(packed, self.workers)
        map_over(ops.partial(_unpack, total), self.sums, self.starts, self.ends)
        return total


def buckets(sums: Sums, workers: int) -> list[Bucket]:
    """Return `sums` in buckets: neighbours of one working dtype, a large one alone."""
    made: list[Bucket] = []
    small: list[Parameter] = []
    for dtype in (ms.float32, ms.float64):
        for total in (total for total in sums if working_dtype(total.dtype) == dtype):
            if total.size >= LARGE_ELEMENTS:
                made.append(Bucket([total], workers))
                continue
            if sum(other.size for other in small) + total.size > BUCKET_ELEMENTS:
                made.append(Bucket(small, workers))
                small = []
            small.append(total)
        if small:
            made.append(Bucket(small, workers))
            small = []
    return made


def _array(total: Parameter) -> Array:
    array = array_of(total)
    wide: Array = (
        total.astype(ms.float32).asnumpy()
        if array is None
        else array.astype(ARRAYS[working_dtype(total.dtype)], copy=False)
    )
    return wide


def _flat(total: Parameter) -> Tensor:
    return total.astype(working_dtype(total.dtype)).reshape(-1)


def _unpack(packed: Tensor, total: Parameter, start: int, end: int) -> bool:
    write(total, packed[start:end].reshape(total.shape).astype(total.dtype))
    return True


_MORE_TIME = "Give slow workers more time: MS_CPU_COMM_OP_TIMEOUT=600, in seconds."

OPTIMIZER, SQUARE = 5, 6
"""The places of the optimizer's number and its square in the numbers that the workers
add up: they tell whether all workers end a window of one optimizer.
"""
LOSS = 7
"""The place of the loss in these numbers."""
OPTIMIZERS = cycle(range(1, 33))
"""Numbers the optimizers that share windows: all workers wrap in one order. So few that
the squares of thousands of workers add up exactly in float32.
"""


class Joined(NamedTuple):
    """A window after its workers were added up."""

    state: State
    """With the weight and the overflow flag of all."""
    is_open: bool
    """One of the workers holds a micro-batch."""
    all_flush: bool
    in_compiled_code: bool
    """One of the workers ends it there."""


class WorkerGroup(nn.Cell):  # type: ignore[misc]
    """All workers, as the window of one of them sees them."""

    def __init__(self, storage: Storage, inner: Optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.rank, self.workers = storage.place
        self.number = next(OPTIMIZERS)
        object.__setattr__(self, "inner", inner)  # A Cell would list it as its own.
        object.__setattr__(self, "rates", tuple(rates_of(inner)))
        self.own_places = Tensor(
            np.eye(self.workers)[self.rank][:, None], storage.float_dtype
        )
        self.buckets = nn.CellList(
            buckets(storage.shared_sums, self.workers), auto_prefix=False
        )
        self.tellers = self.workers if storage.sharded else 1
        """Workers that tell one and the same loss: that of all items, where some
        parameters are sharded.
        """
        self.norms: list[float] | None = None
        """Each worker's norm of its sharded sums, in the window that was joined last.
        """
        self.float_dtype = storage.float_dtype
        self.own, self.torn = (
            Tensor([held, *storage.place], ms.int32) for held in (THIS_WORKER, NOBODY)
        )
        self.last: Joined | None = None
        # A Cell would list it as its own, and a constant would be no branch.
        object.__setattr__(
            self,
            "always",
            note("always", Tensor(True)),
        )
        object.__setattr__(
            self,
            "drifted",
            note("drifted", Tensor(False)),
        )
        """Compiled code found different learning rates, or a window of another
        optimizer.
        """
        object.__setattr__(
            self,
            "crossed",
            note("crossed", Tensor(False)),
        )
        """Compiled code found a window of another optimizer."""
        self.zero, self.one = (
            Tensor(number, self.float_dtype) for number in (0.0, 1.0)
        )
        self.infinite = Tensor(float("inf"), self.float_dtype)
        self.number_tensor, self.square_tensor = (
            Tensor(float(number), self.float_dtype)
            for number in (self.number, self.number**2)
        )
        self.mine = Tensor(np.arange(self.workers) == self.rank)
        self.true, self.false = Tensor(True), Tensor(False)

    def join(self, state: State, flushing: bool) -> Joined:
        """Add up the window of all workers, from Python; collective. One whose update
        raised is not added again.
        """
        if self.storage.sum_owner() == ALL_WORKERS:
            return (
                Joined(state, True, True, False)
                if self.last is None
                else self.last._replace(state=state)
            )
        self.require_own_sum("flush()")
        try:
            numbers = [
                state.weight,
                state.overflow,
                state.micro_step,
                flushing,
                0.0,
                self.number,
                self.number**2,
                self.storage.window_loss.total(state) / self.tellers,
            ]
            rates = np.array(
                [float(rate) for rate in rates_of(self.inner)], ARRAYS[self.float_dtype]
            )
            placed = np.zeros((self.workers, len(rates)), rates.dtype)
            placed[self.rank] = rates
            added = added_up(
                np.concatenate((np.array(numbers, rates.dtype), placed.reshape(-1)))
            ).tolist()
            weight, overflows, micro_batches, flushes, compiled = added[:OPTIMIZER]
            loss = added[LOSS]
            crossed = added[OPTIMIZER] ** 2 != self.workers * added[SQUARE]
            alike = sum(
                row == rates.tolist()
                for row in np.reshape(added[len(numbers) :], placed.shape).tolist()
            )
            if micro_batches and not compiled:
                self.require_same_optimizer(crossed)
                kit.require_same_rates(rates.tolist(), [alike], self.workers, self.rank)
            elif micro_batches and (crossed or alike < self.workers):
                ops.assign(self.drifted, self.true)
                ops.assign(self.crossed, Tensor(crossed))
                weight, overflows = math.inf, 1.0
            for bucket in self.buckets if micro_batches else ():
                total = bucket.total()
                # If the first one fails, all sums are this worker's still.
                self.storage.set_sum_owner(NOBODY)
                bucket.unpack(total)
        except NoAnswerError as error:
            raise kit.missing_worker_error(state, self.rank, _MORE_TIME) from error
        whole = kit.at_rest(
            State(*kit.joined(state, weight, overflows > 0)),
            float64_weight=self.float_dtype == ms.float64,
        )
        if micro_batches:
            self.storage.push(whole, state)
            window_loss = self.storage.window_loss
            window_loss.write((loss, whole.weight, window_loss.value))
            self.storage.set_sum_owner(ALL_WORKERS)
        self.norms = None
        self.last = Joined(
            whole, micro_batches > 0, flushes == self.workers, compiled > 0
        )
        return self.last

    def compiled_all_reduce(self) -> bool:
        """Make the sums, the weight and the flag those of all workers, in compiled
        code.

        In a branch of its own: where one graph reads a Parameter again after a write,
        MindSpore copies it, float64 rounded to float32.
        """
        if self.always:
            self.add_up()
        return True

    def add_up(self) -> bool:
        """Run the branch of `compiled_all_reduce`.

        A failure in it leaves the sum marked as torn. Compiled code cannot raise: a
        window that is not this worker's own, or of a size below 1, gets an infinite
        weight, and all workers skip it.
        """
        store = self.storage
        sound = (store.owner.value()[0] == THIS_WORKER) & (
            store.terms.value()[STEPS] >= 1
        )
        weight = ops.where(sound, store.weight.value(), self.infinite)
        flags = (
            (store.overflow & self.true) | (sound == False),  # noqa: E712
            store.micro_step.value(),
            self.zero,
            self.one,
            self.number_tensor,
            self.square_tensor,
        )
        loss = store.window_loss.compiled_total(store.weight.value())
        if self.tellers > 1:
            loss = loss / self.tellers
        mine = ops.stack(
            (weight, *[flag.astype(self.float_dtype) for flag in flags], loss)
        )
        if self.rates:
            rates = ops.stack([rate.astype(self.float_dtype) for rate in self.rates])
            numbers = compiled_added_up(
                ops.concat((mine, (self.own_places * rates).reshape(-1))), self.workers
            )
            drifted = (
                numbers[mine.shape[0] :].reshape((self.workers, -1)) != rates
            ).any()
        else:
            numbers = compiled_added_up(mine, self.workers)
            drifted = self.false
        crossed = ops.square(numbers[OPTIMIZER]) != self.workers * numbers[SQUARE]
        drifted = drifted | crossed
        ops.assign(self.drifted, drifted | self.drifted)
        ops.assign(self.crossed, crossed | self.crossed)
        ops.assign(store.owner, self.torn)
        last = numbers
        for bucket in self.buckets:
            last = bucket(last)
        joined_loss = store.window_loss.compiled_with_total(numbers[LOSS], numbers[0])
        ops.assign(store.window_loss.loss, joined_loss)
        ops.assign(store.weight, ops.where(drifted, self.infinite, numbers[0]))
        ops.assign(store.overflow, (numbers[1] > 0) | drifted)
        return True

    def norm_of_all(self, whole: float, own: float, state: State) -> float:
        """Return the norm over all workers: `whole` is equal on all, `own` is of this
        one's sharded sums. Collective, once in a window.
        """
        if self.norms is None:
            placed = np.zeros(self.workers, ARRAYS[self.float_dtype])
            placed[self.rank] = own
            try:
                self.norms = added_up(placed).tolist()
            except NoAnswerError as error:
                raise kit.missing_worker_error(state, self.rank, _MORE_TIME) from error
        return math.hypot(whole, *self.norms)

    def compiled_global_norm(self, whole: Tensor, own: Tensor) -> Tensor:
        """Return `norm_of_all` in compiled code, after everything that `whole` needs:
        all workers exchange in one order.
        """
        norms = compiled_added_up(
            ops.depend(ops.where(self.mine, own, self.zero), whole), self.workers
        )
        norms = ops.concat((norms, whole.reshape(1)))
        largest = norms.max()
        divisor = ops.where((largest > 0) & ops.isfinite(largest), largest, self.one)
        return divisor * ops.sqrt(ops.square(norms / divisor).sum())

    def window_ended(self) -> Tensor:
        return ops.assign(self.storage.owner, self.own)

    def require_same_optimizer(self, crossed: bool) -> None:
        """Raise unless all workers have ended a window of this optimizer."""
        if crossed:
            expected = "its window to end on every worker at once"
            found = "another optimizer's window, which ended on another worker"
            fix = (
                "Give each worker as many micro-batches of each optimizer. One with"
                " weight=0 adds nothing."
            )
            raise explain(
                UsageError,
                f"optimizer of {self.storage.specs[0][0]!r} on rank {self.rank}",
                expected=expected,
                found=found,
                fix=fix,
            )

    def require_same_rates(self) -> None:
        """Raise unless compiled code found equal learning rates, and windows of this
        optimizer; once, as it has skipped windows for that.
        """
        if self.drifted.item():
            crossed = self.crossed.item()
            ops.assign(self.drifted, self.false)
            ops.assign(self.crossed, self.false)
            self.require_same_optimizer(crossed)
            kit.require_same_rates(
                [float(rate) for rate in rates_of(self.inner)],
                [0.5],
                self.workers,
                self.rank,
            )

    def require_own_sum(self, call: str) -> None:
        held = self.storage.sum_owner()
        if held == ALL_WORKERS:
            raise kit.update_due_error(call)
        if held == NOBODY:
            raise kit.torn_window_error(call)


def rates_of(inner: Optimizer) -> list[Any]:
    """Return the learning rate of each group; none if a schedule of the optimizer's own
    moves them by its updates.
    """
    if hasattr(inner, "lrs"):
        groups = zip(inner.param_groups, inner.lrs, strict=True)
        return [
            group["lr"] if isinstance(group["lr"], float) else rate
            for group, rate in groups
        ]
    held = getattr(inner, "learning_rate", None)
    return (
        [held]
        if isinstance(held, Parameter)
        else list(held)
        if isinstance(held, ParameterTuple)
        else []
    )


class CompiledEnd(nn.Cell):  # type: ignore[misc]
    """The end of a window whose workers are added up, as compiled code."""

    def __init__(self, window: CompiledWindow, update: Update) -> None:
        super().__init__(auto_prefix=False)
        self.window, self.update = window, update

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
        self.compiled_window, self.workers = compiled_window, workers
        self.flushing = False
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
        self.flushing = False
        self.end(state, update)

    def end(self, state: State, update: Update) -> Joined:
        """End the window of all workers, in this one's part."""
        joined = self.workers.join(state, self.flushing)
        if joined.is_open and joined.in_compiled_code:
            self.compiled(update)()
        elif joined.is_open:
            super().close(joined.state, update)
        return joined

    def compiled(self, update: Update) -> Callable[[], bool]:
        if self.compiled_end is None:
            cell = CompiledEnd(self.compiled_window, update)
            self.compiled_end = (
                cell
                if ms.get_context("mode") == ms.GRAPH_MODE
                else ms.jit(cell.construct)
            )
        return self.compiled_end

    def measure(self, ending: State, options: Options) -> tuple[float, bool]:
        """Return the norm over all workers, and whether all sums are finite on all of
        them; collective if some are sharded.
        """
        if not self.storage.sharded:
            return super().measure(ending, options)
        (whole, finite), (own, sound) = (
            measure(each, self.storage.float_dtype)
            for each in (self.storage.shared_sums, self.storage.sharded_sums)
        )
        sound = sound and self.fits(ending, options, math.hypot(whole, own))
        norm = self.workers.norm_of_all(whole, own if sound else math.inf, ending)
        return norm, finite and math.isfinite(norm)

    def flush(self, update: Update, denominator: float | None = None) -> bool:
        """End windows until all workers flush; returns whether one of them held a
        micro-batch.

        If the update of a window that all workers ended raised, this makes it, and
        takes part in no other window.
        """
        closed = self.storage.sum_owner() == ALL_WORKERS
        if closed:
            joined = self.end(self.storage.pull(), update)
            if not self.flushing or joined.all_flush:
                self.flushing = False
                return True
        self.flushing = True
        all_flush = False
        while not all_flush:
            joined = self.end(self.storage.pull(), update)
            closed, all_flush = closed or joined.is_open, joined.all_flush
            if joined.is_open and not all_flush:
                self.storage.between_windows()
        self.flushing = False
        if not closed:
            self.storage.push_event()
        self.workers.require_same_rates()
        return closed

    def clear(self) -> None:
        super().clear()
        self.storage.set_sum_owner(THIS_WORKER)


@constexpr  # type: ignore[untyped-decorator]
def refuse_compiled_flush() -> None:
    """Raise `UsageError`: compiled code cannot wait until all workers flush, and takes
    no denominator.
    """
    expected = (
        "a call from Python with a denominator, or where workers share their windows,"
        " as it ends windows until all have called it"
    )
    raise explain(
        UsageError,
        "flush()",
        expected=expected,
        found="one in compiled code",
        fix="Call optimizer.flush() after the compiled step.",
    )
