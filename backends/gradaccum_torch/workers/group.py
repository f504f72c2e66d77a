"""The end of a window over all workers: its numbers and small sums in one reduction, its large sums in one each.

A parameter may have a gradient on some workers only. So the numbers tell each worker which sums exist anywhere, and a worker without a sum
adds zeros. The small sums that travel with the numbers are guessed to be those of the last window; after a wrong guess they are sent once
more. So what is added up, and in which layout, depends on this window alone, and a resumed run has the same bits.

A parameter that is sharded over the same workers, such as the head of a large classifier, has the gradient of all items on each of them.
Its sum is left as it is, and its norm is that of all shards.

No backward pass is known to be the last, so the reduction begins after it. A worker that runs out of data calls ``flush``, and then takes
part in the windows of the others, with nothing, until they flush too: all make the same updates.
"""

from __future__ import annotations

import itertools
import math
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError, kit
from gradaccum_torch.private import (
    foreach_copy_,
    is_sharded,
    leave_reduction_out,
    mesh_of,
    module_averaging,
    reduced_by,
    registered_comm_hooks,
    send_buffers,
    units_holding,
    were_sharded,
)
from gradaccum_torch.window.watch import delivering_zeros
from gradaccum_torch.workers.interface import Held, Joined, Sums, Workers, learning_rates, require_no_join

_REGROUP = "If a worker is lost, call opt.regroup(process_group) with those that are left, and then opt.flush()."


@final
class WorkerGroup(Workers):
    """The workers of one process group, as the window of one of them sees them."""

    def __init__(self, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer, module: DistributedDataParallel | None = None) -> None:
        self.group: dist.ProcessGroup = group
        self._optimizer, self._module = optimizer, module
        self._flushing = self._all_flush = False
        self.several, self._device = True, next(each.device for group in optimizer.param_groups for each in group["params"])
        self.place = self._rank, self._workers = dist.get_rank(group), dist.get_world_size(group)
        self._riders: dict[int | None, list[int]] = {}
        """By part, the positions of the sums that rode with the numbers in the last window: the same on all workers, as each end is
        collective."""
        self._hold("own")

    @property
    def joined(self) -> bool:
        return self._held == "of all"

    def join(
        self, fields: kit.State, sums: Sums, zeros: Callable[[int], Tensor], numbers: Sequence[float], part: int | None = None
    ) -> Joined:
        if self.joined:
            return Joined(fields, sums, numbers)
        if self._module is not None:
            require_no_join(self._module)
        if any(each.grad is not None and each.grad.requires_grad for group in self._optimizer.param_groups for each in group["params"]):
            self.require_no_graph()
        self.require_own_sum("the end of a window")
        try:
            added, whole = self._added_up(fields, sums, zeros, numbers, part)
        except UsageError:  # Raised on every worker, before any sum has changed.
            raise
        except RuntimeError as error:
            if self._held != "torn":
                self._hold("kept")
            raise kit.missing_worker_error(fields, self._rank, _REGROUP) from error
        self._all_flush = added.flushes == self._workers
        self._hold("of all" if added.micro_batches else "own")
        return Joined(kit.joined(fields, added.weight, added.overflow), whole, added.others)

    def flush(self, close: Callable[[], None], between: Callable[[], None], is_open: bool) -> None:
        self._flushing = True
        try:
            close()
            while not self._all_flush:
                between()
                close()
        finally:
            self._flushing = False

    def window_ended(self) -> None:
        self._hold("own")

    def require_own_sum(self, call: str) -> None:
        if self.joined:
            raise kit.update_due_error(call)
        if self._held == "torn":
            raise kit.torn_window_error(call)
        if self._held == "kept" and call != "state_dict()":
            expected, found = "a whole group of workers", "one whose reduction failed; this worker's part of the window is whole"
            raise kit.explain(UsageError, call, expected=expected, found=found, fix=f"{_REGROUP} Or call opt.discard() on every worker.")

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        whole, sharded = ([each for each in parameters if is_sharded(each) is split] for split in (False, True))
        if self._module is not None:
            require_parameters(self._module, list(self._module.parameters()), whole)
            require_none_ignored(self._module, whole)
        require_same_workers(self.group, sharded)

    def taking_part(self) -> AbstractContextManager[None] | None:
        own = [each for group in self._optimizer.param_groups for each in group["params"]]
        return None if self._module is not None or module_averaging(own) is None else delivering_zeros(own)

    def leave(self) -> Held:
        if self.joined:
            raise kit.update_due_error("regroup()")
        return self._held if self.stages is None else super().leave()

    @torch.no_grad()
    def catch_up(self, closed: int, has_own: bool, state: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Send, or take over, what the base class says and the parameters.

        A worker whose reduction failed is a part of the window that others closed.
        """
        everyone = [(0, False)] * self._workers
        dist.all_gather_object(everyone, (closed, has_own), group=self.group)
        counts = [count for count, _ in everyone]
        most, first = max(counts), counts.index(max(counts))
        if min(counts) == most:
            return None
        if (self._module is not None and first) or any(own and count < most for count, own in everyone):
            raise _behind_error(counts, self._module is not None)
        source, sent = dist.get_global_rank(self.group, first), [state() if first == self._rank else {}]
        dist.broadcast_object_list(sent, source, group=self.group)
        for parameter in (each for group in self._optimizer.param_groups for each in group["params"]):
            dist.broadcast(parameter, source, group=self.group)
        return sent[0] if closed < most else None

    def _hold(self, held: Held) -> None:
        self._held, self.not_own = held, held != "own"

    @torch.no_grad()
    def _added_up(
        self, fields: kit.State, sums: Sums, zeros: Callable[[int], Tensor], others: Sequence[float], part: int | None
    ) -> tuple[Numbers, Sums]:
        rates = learning_rates(self._optimizer)
        sparse = [index for index, total in enumerate(sums) if total is not None and total.is_sparse]
        sums = [None if index in sparse else total for index, total in enumerate(sums)]
        counts = len(sparse), *kit.rate_bits(rates)
        present = [total is not None for total in sums]
        own = encode(fields, self._flushing, present, others, counts)
        whole, guess = sums, [index for index in self._riders.get(part, ()) if index < len(sums)]
        while True:
            whole = _filled(whole, guess, zeros)
            bucket = FirstBucket(own, [total for index in guess if (total := whole[index]) is not None], self._device, self.group)
            numbers = decode(bucket.numbers(), len(others), len(counts))
            if numbers.counts[0]:
                raise _sparse_error()
            if numbers.micro_batches:
                kit.require_same_rates(rates, numbers.counts[1:], self._workers, self._rank)
            whole = _filled(whole, [index for index, there in enumerate(numbers.present) if there], zeros, others=False)
            if (found := riders(whole, self._device)) == guess:
                break
            guess = self._riders[part] = found
        rode, rest = set(guess), enumerate(whole)
        left = [total for index, total in rest if total is not None and index not in rode and not is_sharded(total)]
        if not (apart := sum(total.nbytes for total in left) <= APART_BYTES):
            self._hold("torn")
        unpack = all_reduce(left, self.group, apart)
        if numbers.micro_batches and self._module is not None and part is None:
            send_buffers(self._module)
        bucket.unpack()
        unpack()
        return numbers, whole


def _filled(sums: Sums, positions: Sequence[int], zeros: Callable[[int], Tensor], others: bool = True) -> list[Tensor | None]:
    """Return `sums` with an empty one at each of `positions` without one; without `others` none elsewhere."""
    filled: list[Tensor | None] = list(sums) if others else [None] * len(sums)
    for index in positions:
        total = sums[index]
        filled[index] = zeros(index) if total is None else total
    return filled


def _behind_error(closed: Sequence[int], has_module: bool) -> UsageError:
    expected = "workers that have closed as many windows, or were lost at the end of the next one, or are new and have no open window"
    if has_module:
        expected += "; and beside a module a first worker that is ahead, as DistributedDataParallel sends its parameters"
    fix = "Call opt.discard() on the worker that is behind. With a process group in the place of the module any worker may be first."
    return kit.explain(UsageError, "regroup()", expected=expected, found=f"windows closed, by rank: {list(closed)}", fix=fix)


def _sparse_error() -> UsageError:
    fix = "Build the layer with dense gradients: torch.nn.Embedding(..., sparse=False)."
    found = "a sparse one on some worker"
    return kit.explain(UsageError, ".grad", expected="dense gradients beside module= and process_group=", found=found, fix=fix)


# The module that several workers train together: checked, and its own reduction left out.
#
# `torch.nn.parallel.DistributedDataParallel` averages gradients in every backward pass unless it is told to wait. Here the window's sum is
# reduced instead, so it waits for good. It still sends the model when it is built. Its buffers are sent at the end of a window, where all
# workers meet.


def group_of(module: object, optimizer: torch.optim.Optimizer, options: kit.Options) -> WorkerGroup:
    """Return the workers that train `module` together; collective."""
    parallel = _require_parallel(module)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    workers = WorkerGroup(parallel.process_group, optimizer, parallel)
    workers.require_parameters(parameters)
    if registered_comm_hooks(parallel):
        raise comm_hook_error()
    require_same_options(options, parallel.process_group)
    leave_reduction_out(parallel, comm_hook_error)
    send_buffers(parallel)
    return workers


def group_alone(group: object, optimizer: torch.optim.Optimizer, options: kit.Options) -> WorkerGroup:
    """Return the workers of a process group that train copies of a model without a module; collective."""
    require_group(group, "process_group")
    assert isinstance(group, dist.ProcessGroup)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    workers = WorkerGroup(group, optimizer)
    workers.require_parameters(parameters)
    require_same_options(options, group, parameters=f"{len(parameters)} of {sum(map(Tensor.numel, parameters))} elements")
    return workers


def comm_hook_error() -> UsageError:
    fix = "Leave register_comm_hook out: the window's sum is reduced by all_reduce."
    found = "a registered hook, which would never be called"
    return kit.explain(UsageError, "module", expected="a module without a communication hook", found=found, fix=fix)


def _require_parallel(module: object) -> DistributedDataParallel:
    # Fabric's module holds the parallel one.
    held = [each for each in module.modules() if isinstance(each, DistributedDataParallel)] if isinstance(module, torch.nn.Module) else []
    if len(held) == 1 and isinstance(module, torch.nn.Module) and len([*module.parameters()]) == len([*held[0].parameters()]):
        module = held[0]
    if not isinstance(module, DistributedDataParallel):
        found = f"an object of type {type(module).__name__}"
        raise kit.explain(ArgumentTypeError, "module", expected="a DistributedDataParallel or fully_shard module", found=found, fix=FIX)
    if any(map(is_sharded, reduced_by(module))):
        fix = "Leave module= out: their gradients are reduced in each backward pass."
        raise kit.explain(ArgumentTypeError, "module", expected="a module whose parameters are whole", found="sharded parameters", fix=fix)
    if were_sharded(module.parameters()):
        found = "parts of tensor-parallel parameters, of which norm and overflow would be this part's own"
        fix = "Give the model fully_shard on a mesh of two dimensions in the place of DistributedDataParallel."
        raise kit.explain(ArgumentValueError, "module", expected="a module whose parameters are whole", found=found, fix=fix)
    return module


def require_same_options(options: kit.Options, *groups: dist.ProcessGroup, **others: str) -> None:
    """Raise unless all workers gave the same options; collective, and on every worker."""
    # Two workers' functions and scalers are different objects.
    steps = options.steps if kit.is_known(options.steps) else "a function"
    everyone = [(dist.get_rank(), str(dict(options._asdict(), steps=steps, scaler=type(options.scaler), **others)))]
    for group in groups:
        gathered: list[list[tuple[int, str]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = sorted(itertools.chain(*gathered))
    for rank, other in everyone:
        if other != everyone[0][1]:
            expected, found = f"the same options on every worker: {everyone[0][1]}", f"{other} on rank {rank}"
            raise kit.explain(ArgumentValueError, "options", expected=expected, found=found, fix="Give every worker the same options.")


def require_group(group: Any, argument: str = "group") -> tuple[int, int]:
    """Raise unless this process is in the process group `group`; return its rank and the number of processes."""
    if not dist.is_available() or not dist.is_initialized():
        fix = "Call torch.distributed.init_process_group() first; leave the call or the argument out where there is one process."
        raise kit.explain(UsageError, argument, expected="an initialised torch.distributed", found="none in this process", fix=fix)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        fix = "Call it only on the processes that hold classes."
        raise kit.explain(UsageError, argument, expected="a group that this process is in", found="a group of other processes", fix=fix)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        fix = "Pass what torch.distributed.new_group or mesh.get_group() returned."
        raise kit.explain(ArgumentTypeError, argument, expected="a torch.distributed.ProcessGroup or None", got=group, fix=fix)
    return dist.get_rank(group), dist.get_world_size(group)


# Checks of what several workers give: parameters, process groups, and the arguments of a call that they make together.
#
# A check of one worker's own arguments raises on that worker; the others wait for it until the engine's timeout. Labels may differ between
# workers, so the check of labels is part of the communication and raises on all of them.


FIX = "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model)), or module=fully_shard(model)."


def require_parameters(module: torch.nn.Module, own: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    known = set(map(id, own))
    strangers = sum(id(parameter) not in known for parameter in parameters)
    if strangers:
        expected, found = "the module whose parameters the optimizer has", f"a {type(module).__name__} without {strangers} of them"
        raise kit.explain(ArgumentValueError, "module", expected=expected, found=found, fix=FIX)


def require_none_ignored(module: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
    reduced = set(map(id, reduced_by(module)))
    ignored = sum(id(parameter) not in reduced for parameter in parameters)
    if ignored:
        expected, found = "a module that reduces the optimizer's parameters", f"one that was told to ignore {ignored} of them"
        fix = "Give them an optimizer of their own, or make each a part of a DTensor: DTensor.from_local(expert, mesh, [Shard(0)])."
        raise kit.explain(ArgumentValueError, "module", expected=expected, found=found, fix=fix)


def require_same_workers(group: dist.ProcessGroup, sharded: Sequence[Tensor]) -> None:
    """Raise unless each of `sharded` is split over exactly the workers of `group`: each has seen the items of all."""
    if units_holding(sharded):
        fix = "Give the parameters of fully_shard an optimizer of their own, or put all under fully_shard."
        found = "parameters of fully_shard, which averages their gradients by itself"
        raise kit.explain(ArgumentValueError, "module", expected="sharded parameters with their whole gradients", found=found, fix=fix)
    workers = sorted(dist.get_process_group_ranks(group))
    for parameter in sharded:
        ranks = sorted(mesh_of(parameter).mesh.flatten().tolist())
        if ranks != workers:
            expected, found = f"sharded parameters over the ranks {workers} of the module", f"one over the ranks {ranks}"
            raise kit.explain(ArgumentValueError, "module", expected=expected, found=found, fix="Give it an optimizer of its own.")


# One sum over all workers for many tensors.
#
# Large tensors are reduced one by one. Small ones travel together in buckets, which have the size of those of
# `torch.nn.parallel.DistributedDataParallel` (``bucket_cap_mb``). The first bucket takes numbers with it, because a collective of their own
# takes longer than all else that the end of a small model's window does.
#
# A worker may be lost meanwhile. So sums of up to `APART_BYTES` are written when all have arrived; a larger model has no second copy of its
# gradients: large tensors are reduced in place, and while one bucket is on its way the next is packed.


BUCKET_BYTES = 25 * 2**20
LARGE_BYTES = 4 * 2**20
"""From here on a collective of its own costs less than packing and unpacking (measured with gloo, two processes)."""
APART_BYTES = 2**30
"""Up to here sums are reduced from copies, so that a failed reduction leaves each worker its own. Activations, which took more, are gone by
then."""
IN_FLIGHT = 2
"""Buckets packed at a time, beyond `APART_BYTES`: they take at most this much memory beside the tensors."""
_EXACT = (torch.float32, torch.float64)


def riders(sums: Sums, device: torch.device) -> list[int]:
    """Return the positions of the sums that travel in the first bucket: small ones of one dtype that holds counts exactly."""
    whole = [(index, total) for index, total in enumerate(sums) if total is not None and not is_sharded(total)]
    small = [(index, total) for index, total in whole if total.nbytes < LARGE_BYTES]
    exact = [(index, total) for index, total in small if total.dtype in _EXACT and total.device == device]
    alike = [(index, total) for index, total in exact if total.dtype == exact[0][1].dtype]
    ends = itertools.accumulate(total.nbytes for _, total in alike)
    return [index for (index, _), end in zip(alike, ends, strict=True) if end <= BUCKET_BYTES]


class FirstBucket:
    """Numbers and tensors on their way together. The tensors keep their values until `unpack`."""

    def __init__(self, numbers: Sequence[float], tensors: list[Tensor], device: torch.device, group: dist.ProcessGroup) -> None:
        # An array, as torch reads a list of Python numbers four times as slowly.
        head = torch.frombuffer(array("f", numbers), dtype=torch.float32).to(device, tensors[0].dtype if tensors else torch.float32)
        self._tensors, self._count = tensors, len(numbers)
        self._packed = torch.cat([head, *(tensor.reshape(-1) for tensor in tensors)]) if tensors else head
        dist.all_reduce(self._packed, group=group)

    def numbers(self) -> list[int]:
        """Return the numbers of all workers; waits for the device."""
        added: list[int] = self._packed[: self._count].long().tolist()
        return added

    def unpack(self) -> None:
        _unpack(self._packed[self._count :], self._tensors)


@torch.no_grad()
def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup, apart: bool) -> Callable[[], None]:
    """Add up each tensor over the workers of `group`, and return a function that writes the sums into the tensors.

    All have the same shapes and dtypes in one order. Until that call they keep their values if the sums are `apart`.
    """
    # By the size alone, which is the same on every worker, as a layout may not be.
    large = [_Reduction([tensor], group, apart) for tensor in tensors if tensor.nbytes >= LARGE_BYTES]
    flying: deque[_Reduction] = deque()
    for bucket in buckets([tensor for tensor in tensors if tensor.nbytes < LARGE_BYTES]):
        if len(flying) == IN_FLIGHT and not apart:
            flying.popleft().wait().unpack()
        flying.append(_Reduction(bucket, group, apart))
    arrived = [reduction.wait() for reduction in (*flying, *large)]
    return lambda: deque(map(_Reduction.unpack, arrived), maxlen=0).clear()


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        fits = bucket and size + tensor.nbytes <= BUCKET_BYTES and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not fits:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


class _Reduction:
    """Tensors on their way: one in place if it is contiguous and not `apart`, else packed into one."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, apart: bool) -> None:
        self._tensors = tensors
        alone = len(tensors) == 1 and tensors[0].is_contiguous() and not apart
        self._packed = None if alone else torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._work = dist.all_reduce(tensors[0] if self._packed is None else self._packed, group=group, async_op=True)

    def wait(self) -> _Reduction:
        assert self._work is not None
        self._work.wait()
        return self

    def unpack(self) -> None:
        if self._packed is not None:
            _unpack(self._packed, self._tensors)


def _unpack(packed: Tensor, tensors: list[Tensor]) -> None:
    if tensors:
        parts = torch.split(packed, [tensor.numel() for tensor in tensors])
        foreach_copy_(tensors, [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)])


# The few numbers that a window's end adds up beside the sums, as elements that ride in the first bucket of sums.
#
# Each is a count, or an integer whose bytes are elements of their own. So all additions are exact in float32, in any order, for up to
# 65,793 workers, and a bucket of either dtype brings the same numbers to every worker. How many elements there are does not depend on
# the number of workers.


_UNIT = 2**1074
"""Every finite float64 is an integer divided by this."""
_BYTES = 268
"""Such an integer has 2,098 bits and a sign, the sum over the workers 17 more; and four divide it."""
_HALF: int = 256**_BYTES // 2
_LARGEST = 2**2098 - 2**2044
"""From here on the sum is rounded to inf."""
_PARTS = 3 + _BYTES
"""The elements of a weight or a loss."""


class Numbers(NamedTuple):
    """The numbers of all workers together in the window that ends."""

    weight: float
    overflow: bool
    micro_batches: int
    flushes: int
    """The workers that have run out of micro-batches."""
    present: list[bool]
    """By position: some worker has a sum there."""
    others: list[float]
    """The sums of the other numbers that were given."""
    counts: list[int] = []  # noqa: RUF012
    """The sums of the counts that were given."""


def encode(
    fields: kit.State, flushing: bool, present: Iterable[bool], others: Sequence[float] = (), counts: Sequence[float] = ()
) -> list[float]:
    parts = itertools.chain(*map(_parts, (fields.weight, *others)))
    return [*parts, fields.overflow, fields.micro_step, flushing, *counts, *present]


def decode(added: Sequence[int], others: int = 0, counts: int = 0) -> Numbers:
    split = _PARTS * (1 + others)
    weight, *sums = (_number(added[first : first + _PARTS]) for first in range(0, split, _PARTS))
    overflows, micro_batches, flushes, *rest = added[split:]
    return Numbers(weight, overflows > 0, micro_batches, flushes, [count > 0 for count in rest[counts:]], sums, rest[:counts])


def _parts(number: float) -> list[float]:
    """Return elements to add up: 1 for NaN, inf or -inf, and the bytes of the number as an integer."""
    above, below = number.as_integer_ratio() if math.isfinite(number) else (0, 1)
    integer = (above * (_UNIT // below)).to_bytes(_BYTES, "little", signed=True)
    return [math.isnan(number), number == math.inf, number == -math.inf, *integer]


def _number(added: Sequence[int]) -> float:
    """Return the sum of the numbers whose `_parts` were added up, rounded once."""
    nans, above, below, *elements = added
    if nans or above or below:
        return math.nan if nans or (above and below) else math.inf if above else -math.inf
    words = (struct.pack(f"<{_BYTES // 4}I", *elements[first::4]) for first in range(4))
    total = sum(int.from_bytes(each, "little") << 8 * first for first, each in enumerate(words))
    integer: int = (total + _HALF) % (2 * _HALF) - _HALF
    return integer / _UNIT if abs(integer) < _LARGEST else math.inf if integer > 0 else -math.inf
