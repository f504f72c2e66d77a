"""The end of a window over all workers: its numbers and small sums in one reduction,
its large sums in one each.

The numbers tell each worker which sums exist anywhere, and a worker without a sum adds
zeros. The small sums that travel with the numbers are guessed to be those of the last
window, and sent once more after a wrong guess, so that a resumed run has the same bits.

A parameter that is sharded over the same workers has the gradient of all items on each.
Its sum is left as it is, and its norm is that of all shards.

No backward pass is known to be the last, so the reduction begins after it. A worker
that runs out of data calls ``flush``, and takes part in the windows of the others until
they flush too.
"""

from __future__ import annotations

import math
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import is_not, mul
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumWarning,
    UsageError,
    kit,
)
from gradaccum_torch.private import names
from gradaccum_torch.private.fsdp import units_holding
from gradaccum_torch.sums.arithmetic import DTYPE, IS_SPARSE
from gradaccum_torch.workers.interface import (
    Held,
    Joined,
    Sums,
    Workers,
    learning_rates,
    require_no_join,
)

_CLOSE = 1e-3
"""The relative difference of norms up to which gradients may be copies: kernels round.
"""
_DISCARD = "The window cannot be closed: call opt.discard() on every worker."
_REGROUP = (
    "If a worker is lost, call opt.regroup(process_group) with those that are left, and"
    " then opt.flush()."
)


@final
class WorkerGroup(Workers):
    """The workers of one process group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        optimizer: torch.optim.Optimizer,
        module: DistributedDataParallel | None = None,
    ) -> None:
        self.group: dist.ProcessGroup = group
        self._optimizer, self._module = optimizer, module
        self._flushing = self._all_flush = False
        self.several, self._device = (
            True,
            next(
                each.device
                for group in optimizer.param_groups
                for each in group["params"]
            ),
        )
        self.place = self._rank, self._workers = (
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        self._rode: dict[int | None, tuple[list[int], tuple[list[bool], int]]] = {}
        """By part, the positions of the sums that rode with the numbers in the last
        window; which sums there were, and how many elements rode. They are the same on
        all workers, as each end is collective.
        """
        self._number = _OPTIMIZERS.get(group.group_name, 0)
        """How many optimizers of this group were wrapped before this one."""
        _OPTIMIZERS[group.group_name] = self._number + 1
        self._mark = 0
        """A fingerprint of this optimizer and its parameters, the same on each worker.
        """
        self.parameters_changed()

    def take_part(self) -> None:
        """Keep the module from reducing by itself for as long as this object lives."""
        if self._module is not None:
            reduce_again = names.leave_reduction_out(self._module, comm_hook_error)
            weakref.finalize(self, reduce_again).atexit = False
            names.send_buffers(self._module)
            _SHARED_BY[self._optimizer] = weakref.ref(self._module)
            guard_shared_modules()

    @property
    def joined(self) -> bool:
        return self.held == "of all"

    def join(
        self,
        fields: kit.State,
        sums: Sums,
        zeros: Callable[[int], Tensor],
        numbers: Sequence[float],
        part: int | None = None,
    ) -> Joined:
        if self.joined:
            return Joined(fields, sums, numbers)
        if self._module is not None:
            require_no_join(self._module)
        if any(
            each.grad is not None and each.grad.requires_grad
            for group in self._optimizer.param_groups
            for each in group["params"]
        ):
            self.require_no_graph()
        self.require_own_sum("the end of a window")
        if self._workers == 1:
            self._all_flush = self._flushing
            self.hold("of all" if fields.micro_step else "own")
            return Joined(fields, sums, numbers)
        try:
            added, whole, packed = self._added_up(fields, sums, zeros, numbers, part)
        except UsageError:  # Raised on every worker, before any sum has changed.
            raise
        except RuntimeError as error:
            if self.held != "torn":
                self.hold("kept")
            raise kit.missing_worker_error(fields, self._rank, _REGROUP) from error
        self._all_flush = added.flushes == self._workers
        self.hold("of all" if added.is_open else "own")
        return Joined(
            kit.joined(fields, added.weight, added.overflow),
            whole,
            added.others,
            packed,
        )

    def flush(
        self, close: Callable[[], None], between: Callable[[], None], is_open: bool
    ) -> None:
        self._flushing = True
        try:
            close()
            while not self._all_flush:
                between()
                close()
        finally:
            self._flushing = False

    def require_own_sum(self, call: str) -> None:
        if self.joined:
            raise kit.update_due_error(call)
        if self.held == "torn":
            raise kit.torn_window_error(call)
        if self.held == "kept" and call != "state_dict()":
            expected, found = (
                "a whole group of workers",
                "one whose reduction failed; this worker's part of the window is whole",
            )
            raise kit.explain(
                UsageError,
                call,
                expected=expected,
                found=found,
                fix=f"{_REGROUP} Or call opt.discard() on every worker.",
            )

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:
        whole, sharded = (
            [each for each in parameters if names.is_sharded(each) is split]
            for split in (False, True)
        )
        if self._module is not None:
            require_parameters(self._module, list(self._module.parameters()), whole)
            require_none_ignored(self._module, whole)
        require_same_workers(self.group, sharded)

    def require_same_parameters(self) -> None:
        """Raise unless all workers have the same parameters in one order, and the same
        settings for them; collective.
        """
        lines = self._descriptions(with_settings=True)
        gathered: list[list[str]] = [[]] * self._workers
        dist.all_gather_object(gathered, lines, group=self.group)
        for rank, other in enumerate(gathered):
            if other != gathered[0]:
                raise _order_error(gathered[0], other, rank)

    @torch.no_grad()
    def has_equal_copies(self) -> bool:
        """True if the parameters are equal on all workers, as far as their sums tell;
        collective.
        """
        totals = [
            parameter.detach().double().sum()
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if not names.is_sharded(parameter) and not parameter.is_complex()
        ]
        if not totals:
            return True
        total = torch.stack(totals)
        bounds = torch.cat([total, -total])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.group)
        most, minus_least = bounds.chunk(2)
        difference = most + minus_least
        return not bool((difference > _CLOSE * most.abs().clamp(min=_CLOSE)).any())

    def parameters_changed(self) -> None:
        text = "\n".join([str(self._number), *self._descriptions()])
        self._mark = zlib.crc32(text.encode())

    def _descriptions(self, with_settings: bool = False) -> list[str]:
        """Return a line for each parameter: its name, as far as there is one, its
        shape, its dtype, and the settings of its group beside the learning rate.
        """
        named = {} if self._module is None else dict(self._module.named_parameters())
        names_by_id = {id(parameter): name for name, parameter in named.items()}
        lines = []
        for group in self._optimizer.param_groups:
            settings = {
                name: value
                for name, value in group.items()
                if name != "lr" and isinstance(value, bool | int | float | tuple)
            }
            if not with_settings:
                settings = {}
            given = group.get("param_names", [""] * len(group["params"]))
            for parameter, name in zip(group["params"], given, strict=True):
                name = names_by_id.get(id(parameter), name)
                shape = tuple(parameter.shape)
                lines.append(f"{name} {shape} {parameter.dtype} {settings}")
        return lines

    def leave(self) -> Held:
        if self.joined:
            raise kit.update_due_error("regroup()")
        return self.held if self.stages is None else super().leave()

    @torch.no_grad()
    def catch_up(
        self, closed: int, has_own: bool, state: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Send, or take over, what the base class says and the parameters.

        A worker whose reduction failed is a part of the window that others closed.
        """
        everyone = [(0, False)] * self._workers
        dist.all_gather_object(everyone, (closed, has_own), group=self.group)
        counts = [count for count, _ in everyone]
        most, first = max(counts), counts.index(max(counts))
        if min(counts) == most:
            return None
        if (self._module is not None and first) or any(
            own and count < most for count, own in everyone
        ):
            raise _behind_error(counts, self._module is not None)
        source, sent = (
            dist.get_global_rank(self.group, first),
            [state() if first == self._rank else {}],
        )
        dist.broadcast_object_list(sent, source, group=self.group)
        for parameter in (
            each for group in self._optimizer.param_groups for each in group["params"]
        ):
            dist.broadcast(parameter, source, group=self.group)
        return sent[0] if closed < most else None

    def _added_up(
        self,
        fields: kit.State,
        sums: Sums,
        zeros: Callable[[int], Tensor],
        others: Sequence[float],
        part: int | None,
    ) -> tuple[Numbers, Sums, Tensor | None]:
        rates = [self._mark, *learning_rates(self._optimizer)]
        sparse = any(map(IS_SPARSE, [total for total in sums if total is not None]))
        # The flag makes each worker raise.
        whole: list[Tensor | None] = [None] * len(sums) if sparse else [*sums]
        present, flags = (
            list(map(is_not, whole, repeat(None))),
            (sparse, not is_exact(fields.weight), *kit.rate_bits(*rates)),
        )
        sent = bytearray(encode(fields, self._flushing, present, others, flags))
        own, (rode_before, before) = (
            torch.frombuffer(sent, dtype=torch.uint8),
            self._rode.get(part, ([], ([], 0))),
        )
        guess = [index for index in rode_before if index < len(sums)]
        while True:
            riding = [
                zeros(index) if (total := whole[index]) is None else total
                for index in guess
            ]
            # The numbers last, as kernels are slower on a sum whose memory begins at an
            # odd place.
            own = own.to(self._device, riding[0].dtype if riding else torch.float32)
            bucket = _reduction([*riding, own], self.group, apart=True).wait()
            *rode, added = names.unflattened(bucket.packed, bucket.tensors)
            numbers = decode(added, len(others), len(flags))
            if numbers.flags[0]:
                raise _sparse_error()
            if numbers.flags[1]:
                raise _small_error(fields.weight)
            if numbers.is_open:
                kit.require_same_rates(
                    rates[1:], numbers.flags[2:], self._workers, self._rank
                )
            if (there := list(map(bool, numbers.holders))) != present:
                whole = [
                    zeros(at) if each is None and held else each
                    for at, (each, held) in enumerate(zip(whole, there, strict=True))
                ]
            now = there, bucket.packed.numel()
            if now == before and len(set(map(DTYPE, riding))) == 1:
                break
            self._rode[part] = found, _ = riders(whole, self._device), now
            if found == guess:
                break
            guess = found
        left, rode_at = dict[int, Tensor](), set(guess)
        if not (all_rode := len(guess) == sum(there)):
            self._require_equal_copies(
                [
                    total
                    for total, count in zip(whole, numbers.holders, strict=True)
                    if count == self._workers
                ]
            )
            left = {
                at: each
                for at, each in enumerate(whole)
                if at not in rode_at and each is not None and not names.is_sharded(each)
            }
        if not (apart := sum(total.nbytes for total in left.values()) <= APART_BYTES):
            self.hold("torn")
        reduced = all_reduce(list(left.values()), self.group, apart) if left else list
        if numbers.is_open and self._module is not None and part is None:
            names.send_buffers(self._module)
        if strided := not all(map(Tensor.is_contiguous, riding)):
            rode = in_layout_of(riding, rode)
        for index, total in zip((*guess, *left), (*rode, *reduced()), strict=True):
            whole[index] = total
        return (
            numbers,
            whole,
            None if strided or not all_rode else bucket.packed[: -len(sent)],
        )

    def _require_equal_copies(self, sums: Sums) -> None:
        """Raise, on every worker, unless the copies of each shard have gradients of one
        norm; collective.
        """
        norms: dict[dist.ProcessGroup, list[Tensor]] = {}
        for total in sums:
            for axis, placement in enumerate(getattr(total, "placements", ())):
                if (
                    total is not None
                    and placement.is_replicate()
                    and names.mesh_of(total).size(axis) > 1
                ):
                    norms.setdefault(names.mesh_of(total).get_group(axis), []).append(
                        torch.linalg.vector_norm(names.local(total)).double()
                    )
        if not norms:
            return
        apart = []
        for group, own in norms.items():
            dist.all_reduce(
                most := torch.stack([*own, *(-norm for norm in own)]),
                dist.ReduceOp.MAX,
                group=group,
            )
            apart.append(
                (most[: len(own)] + most[len(own) :] > _CLOSE * most[: len(own)])
                .any()
                .double()
            )
        dist.all_reduce(worst := torch.stack(apart).sum(), group=self.group)
        if worst:
            expected, found = (
                "equal gradients on the workers that hold copies of a shard",
                "norms that differ",
            )
            fix = (
                "Write weight.to_local(grad_placements=[Partial(), ...]), which adds up"
                " gradients of different items. "
            )
            raise kit.explain(
                UsageError,
                "grad_placements",
                expected=expected,
                found=found,
                fix=f"{fix}{_DISCARD}",
            )


_OPTIMIZERS: dict[str, int] = {}
"""How many optimizers were wrapped for the workers of a process group, by its name."""
_SHARED_BY: WeakKeyDictionary[
    torch.optim.Optimizer, weakref.ref[DistributedDataParallel]
] = WeakKeyDictionary()
"""The module whose gradients are reduced for an optimizer, at its windows' ends."""


_CHECKED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers that have no parameter of a module which waits for another one."""
_GUARD: list[RemovableHandle] = []


def guard_shared_modules() -> None:
    """Refuse steps of optimizers whose gradients a waiting module no longer reduces."""
    _CHECKED.clear()
    if not _GUARD:
        _GUARD.append(register_optimizer_step_pre_hook(_refuse_unreduced))


def _refuse_unreduced(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if optimizer not in _CHECKED:
        require_reduced(optimizer)
        _CHECKED.add(optimizer)


names.untraced(_refuse_unreduced)


def require_reduced(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the gradients of its parameters are reduced, where a module that
    trains them waits with its own reduction.
    """
    unreduced = _ids_of(optimizer)
    waiting = [each.parameters() for each in names.waiting_modules()]
    unreduced &= set(map(id, chain(*waiting)))
    for other, reference in _SHARED_BY.items():
        if reference() is not None:
            unreduced -= _ids_of(other)
    if unreduced:
        kind = type(optimizer).__name__
        expected = "module= for each optimizer of one DistributedDataParallel"
        found = f"{kind} without it, for {len(unreduced)} of the parameters"
        fix = f"Write gradaccum.wrap({kind}(...), steps=..., module=parallel)."
        raise kit.explain(UsageError, "module", expected=expected, found=found, fix=fix)


def _ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def _order_error(
    first: Sequence[str], other: Sequence[str], rank: int
) -> ArgumentValueError:
    longest = max(len(first), len(other))
    lines = [*first, *["nothing"] * (longest - len(first))]
    others = [*other, *["nothing"] * (longest - len(other))]
    position = next(at for at in range(longest) if lines[at] != others[at])
    found = (
        f"parameter {position}: {lines[position]} on rank 0,"
        f" {others[position]} on rank {rank}"
    )
    return kit.explain(
        ArgumentValueError,
        "optimizer",
        expected="the same parameters in the same order on every worker",
        found=found,
        fix="Build its groups from lists; a set has another order in each process.",
    )


def _behind_error(closed: Sequence[int], has_module: bool) -> UsageError:
    expected = (
        "workers that have closed as many windows, or were lost at the end of the next"
        " one, or are new and have no open window"
    )
    if has_module:
        expected += (
            "; and beside a module a first worker that is ahead, as"
            " DistributedDataParallel sends its parameters"
        )
    fix = (
        "Call opt.discard() on the worker that is behind. With a process group in the"
        " place of the module any worker may be first."
    )
    return kit.explain(
        UsageError,
        "regroup()",
        expected=expected,
        found=f"windows closed, by rank: {list(closed)}",
        fix=fix,
    )


def _sparse_error() -> UsageError:
    fix = "Build the layer with dense gradients: torch.nn.Embedding(..., sparse=False)."
    found = "a sparse one on some worker"
    return kit.explain(
        UsageError,
        ".grad",
        expected="dense gradients beside module= and process_group=",
        found=found,
        fix=fix,
    )


def _small_error(own: float) -> UsageError:
    found, fix = (
        f"a smaller one on some worker; {own:g} here",
        "Count items as 1 each, or multiply all weights by one power of two.",
    )
    return kit.explain(
        UsageError,
        "weight",
        expected="0, or a weight of a window from 2**-132 on",
        found=found,
        fix=f"{fix} {_DISCARD}",
    )


# The module that several workers train together: checked, and its own reduction left
# out.
#
# `torch.nn.parallel.DistributedDataParallel` averages gradients in every backward pass
# unless it is told to wait. Here the window's sum is reduced instead, so it waits for
# good. It still sends the model when it is built. Its buffers are sent at the end of a
# window, where all workers meet.


def group_of(
    module: object, optimizer: torch.optim.Optimizer, options: kit.Options
) -> WorkerGroup:
    parallel = _require_parallel(module)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    workers = WorkerGroup(parallel.process_group, optimizer, parallel)
    workers.require_parameters(parameters)
    if names.registered_comm_hooks(parallel):
        raise comm_hook_error()
    names.require_static_graph_flag(parallel)
    require_same_options(options, parallel.process_group)
    workers.require_same_parameters()
    return workers


def group_alone(
    group: object, optimizer: torch.optim.Optimizer, options: kit.Options
) -> WorkerGroup:
    """Return the workers of a process group that train copies without a module;
    collective.
    """
    require_group(group, "process_group")
    assert isinstance(group, dist.ProcessGroup)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    workers = WorkerGroup(group, optimizer)
    workers.require_parameters(parameters)
    require_same_options(options, group)
    workers.require_same_parameters()
    return workers


def warn_of_unequal_copies(workers: WorkerGroup) -> None:
    if not workers.has_equal_copies():
        text = (
            "gradaccum: the workers of process_group= hold different parameters, and"
            " equal updates leave them different. Send the parameters of one worker to"
            " all, by torch.distributed.broadcast, or load one checkpoint on all,"
            " before the first step."
        )
        warnings.warn(text, GradAccumWarning, stacklevel=5)


def comm_hook_error() -> UsageError:
    fix = "Leave register_comm_hook out: the window's sum is reduced by all_reduce."
    found = "a registered hook, which would never be called"
    return kit.explain(
        UsageError,
        "module",
        expected="a module without a communication hook",
        found=found,
        fix=fix,
    )


def _require_parallel(module: object) -> DistributedDataParallel:
    # Fabric's module holds the parallel one.
    held = (
        [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
        if isinstance(module, torch.nn.Module)
        else []
    )
    if (
        len(held) == 1
        and isinstance(module, torch.nn.Module)
        and len([*module.parameters()]) == len([*held[0].parameters()])
    ):
        module = held[0]
    if not isinstance(module, DistributedDataParallel):
        found = f"an object of type {type(module).__name__}"
        raise kit.explain(
            ArgumentTypeError,
            "module",
            expected="a DistributedDataParallel or fully_shard module",
            found=found,
            fix=FIX,
        )
    if any(map(names.is_sharded, names.reduced_by(module))):
        fix = "Leave module= out: their gradients are reduced in each backward pass."
        raise kit.explain(
            ArgumentTypeError,
            "module",
            expected="a module whose parameters are whole",
            found="sharded parameters",
            fix=fix,
        )
    if names.were_sharded(module.parameters()):
        found = (
            "parts of tensor-parallel parameters, of which norm and overflow would be"
            " this part's own"
        )
        fix = (
            "Give the model fully_shard on a mesh of two dimensions in the place of"
            " DistributedDataParallel."
        )
        raise kit.explain(
            ArgumentValueError,
            "module",
            expected="a module whose parameters are whole",
            found=found,
            fix=fix,
        )
    return module


def require_same_options(
    options: kit.Options, *groups: dist.ProcessGroup, **others: str
) -> None:
    """Raise unless all workers gave the same options; collective, and on every
    worker.
    """
    # Two workers' functions and scalers are different objects.
    steps = options.steps if kit.is_known(options.steps) else "a function"
    everyone = [
        (
            dist.get_rank(),
            str(
                dict(
                    options._asdict(),
                    steps=steps,
                    scaler=type(options.scaler),
                    **others,
                )
            ),
        )
    ]
    for group in groups:
        gathered: list[list[tuple[int, str]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = sorted(chain(*gathered))
    for rank, other in everyone:
        if other != everyone[0][1]:
            expected, found = (
                f"the same options on every worker: {everyone[0][1]}",
                f"{other} on rank {rank}",
            )
            raise kit.explain(
                ArgumentValueError,
                "options",
                expected=expected,
                found=found,
                fix="Give every worker the same options.",
            )


def require_group(group: Any, argument: str = "group") -> tuple[int, int]:
    """Raise unless this process is in the process group `group`; return its rank and
    the number of processes.
    """
    if not dist.is_available() or not dist.is_initialized():
        fix = (
            "Call torch.distributed.init_process_group() first; leave the call or the"
            " argument out where there is one process."
        )
        raise kit.explain(
            UsageError,
            argument,
            expected="an initialised torch.distributed",
            found="none in this process",
            fix=fix,
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        fix = "Call it only on the processes that hold classes."
        raise kit.explain(
            UsageError,
            argument,
            expected="a group that this process is in",
            found="a group of other processes",
            fix=fix,
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        fix = "Pass what torch.distributed.new_group or mesh.get_group() returned."
        raise kit.explain(
            ArgumentTypeError,
            argument,
            expected="a torch.distributed.ProcessGroup or None",
            got=group,
            fix=fix,
        )
    return dist.get_rank(group), dist.get_world_size(group)


# Checks of what several workers give: parameters, process groups, and the arguments of
# a call that they make together.
#
# A check of one worker's own arguments raises on that worker; the others wait for it
# until the engine's timeout. Labels may differ between workers, so the check of labels
# is part of the communication and raises on all of them.


FIX = (
    "Write gradaccum.wrap(optimizer, steps=4, module=DistributedDataParallel(model)),"
    " or module=fully_shard(model)."
)


def require_parameters(
    module: torch.nn.Module, own: Sequence[Tensor], parameters: Sequence[Tensor]
) -> None:
    known = set(map(id, own))
    strangers = sum(id(parameter) not in known for parameter in parameters)
    if strangers:
        expected, found = (
            "the module whose parameters the optimizer has",
            f"a {type(module).__name__} without {strangers} of them",
        )
        raise kit.explain(
            ArgumentValueError, "module", expected=expected, found=found, fix=FIX
        )


def require_none_ignored(
    module: DistributedDataParallel, parameters: Sequence[Tensor]
) -> None:
    reduced = set(map(id, names.reduced_by(module)))
    ignored = sum(id(parameter) not in reduced for parameter in parameters)
    if ignored:
        expected, found = (
            "a module that reduces the optimizer's parameters",
            f"one that was told to ignore {ignored} of them",
        )
        fix = (
            "Give them an optimizer of their own, or make each a part of a DTensor:"
            " DTensor.from_local(expert, mesh, [Shard(0)])."
        )
        raise kit.explain(
            ArgumentValueError, "module", expected=expected, found=found, fix=fix
        )


def require_same_workers(group: dist.ProcessGroup, sharded: Sequence[Tensor]) -> None:
    """Raise unless each of `sharded` is split over exactly the workers of `group`."""
    if units_holding(sharded):
        fix = (
            "Give the parameters of fully_shard an optimizer of their own, or put all"
            " under fully_shard."
        )
        found = "parameters of fully_shard, which averages their gradients by itself"
        raise kit.explain(
            ArgumentValueError,
            "module",
            expected="sharded parameters with their whole gradients",
            found=found,
            fix=fix,
        )
    workers = sorted(dist.get_process_group_ranks(group))
    for parameter in sharded:
        ranks = sorted(names.mesh_of(parameter).mesh.flatten().tolist())
        if ranks != workers:
            expected, found = (
                f"sharded parameters over the ranks {workers} of the module",
                f"one over the ranks {ranks}",
            )
            raise kit.explain(
                ArgumentValueError,
                "module",
                expected=expected,
                found=found,
                fix="Give it an optimizer of its own.",
            )


# One sum over all workers for many tensors.
#
# Large tensors are reduced one by one. Small ones travel together in buckets, which
# have the size of those of `torch.nn.parallel.DistributedDataParallel`
# (``bucket_cap_mb``). The first bucket takes numbers with it, because a collective of
# their own takes longer than all else that the end of a small model's window does.
#
# A worker may be lost meanwhile. So up to `APART_BYTES` copies are reduced, and take
# the place of the sums when all have arrived; a larger model has no second copy of its
# gradients: large tensors are reduced in place, and while one bucket is on its way the
# next is packed.


BUCKET_BYTES = 25 * 2**20
LARGE_BYTES = 4 * 2**20
"""From here on a collective of its own costs less than packing and unpacking (measured
with gloo, two processes).
"""
APART_BYTES = 2**30
"""Up to here sums are reduced from copies, so that a failed reduction leaves each
worker its own. Activations, which took more, are gone by then.
"""
IN_FLIGHT = 2
"""Buckets packed at a time, beyond `APART_BYTES`: they take at most this much memory
beside the tensors.
"""
_EXACT = (torch.float32, torch.float64)


def riders(sums: Sums, device: torch.device) -> list[int]:
    """Return the positions of the small sums in the first bucket, of one dtype that
    holds counts exactly.
    """
    found: list[int] = []
    size, dtype = 0, None
    for index, total in enumerate(sums):
        if (
            total is None
            or (nbytes := total.nbytes) >= LARGE_BYTES
            or total.device != device
        ):
            continue
        if (total.dtype is dtype or (dtype is None and total.dtype in _EXACT)) and (
            type(total) is Tensor or not names.is_sharded(total)
        ):
            dtype, size = total.dtype, size + nbytes
            if size <= BUCKET_BYTES:
                found.append(index)
    return found


def all_reduce(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, apart: bool
) -> Callable[[], list[Tensor]]:
    """Add up each tensor over the workers of `group`, and return a function that
    returns the sums.

    All have the same shapes and dtypes in one order. Until that call they keep their
    values if `apart`.
    """
    flying: deque[_Reduction] = deque()
    ended: list[_Reduction] = []
    # By the size alone, which is the same on every worker, as a layout may not be.
    small = [tensor for tensor in tensors if tensor.nbytes < LARGE_BYTES]
    for bucket in (
        *([tensor] for tensor in tensors if tensor.nbytes >= LARGE_BYTES),
        *buckets(small),
    ):
        if len(flying) == IN_FLIGHT and not apart:
            ended.append(flying.popleft().wait())
        flying.append(_reduction(bucket, group, apart))
    ended += [reduction.wait() for reduction in flying]

    def sums() -> list[Tensor]:
        found = {
            id(tensor): total
            for each in ended
            for tensor, total in zip(each.tensors, each.sums(), strict=True)
        }
        return [found[id(tensor)] for tensor in tensors]

    return sums


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        fits = (
            bucket
            and size + tensor.nbytes <= BUCKET_BYTES
            and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        )
        if bucket and not fits:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


class _Reduction(NamedTuple):
    """Tensors on their way: packed into one, or one in place."""

    tensors: Sequence[Tensor]
    packed: Tensor
    work: Any
    """It may hold the packed one."""
    apart: bool

    def wait(self) -> _Reduction:
        self.work.wait()
        return self if self.apart else self._replace(packed=self.sums()[0], work=None)

    def sums(self) -> Sequence[Tensor]:
        """Return the sums, parts of `packed` if they are apart."""
        if self.packed is self.tensors[0]:
            return self.tensors
        parts = names.unflattened(self.packed.view(-1), self.tensors)
        return in_layout_of(self.tensors, parts, apart=self.apart)


def in_layout_of(
    tensors: Sequence[Tensor], parts: Sequence[Tensor], apart: bool = True
) -> list[Tensor]:
    """Return `parts`, each of a strided tensor copied into that tensor, to keep the
    layout; all of them unless `apart`.
    """
    return [
        part if apart and each.is_contiguous() else each.copy_(part)
        for part, each in zip(parts, tensors, strict=True)
    ]


def _reduction(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, apart: bool
) -> _Reduction:
    if len(tensors) > 1:
        packed = names.flattened(tensors)
    else:
        packed = (
            tensors[0].clone(memory_format=torch.contiguous_format)
            if apart
            else tensors[0].contiguous()
        )
    return _Reduction(
        tensors, packed, dist.all_reduce(packed, group=group, async_op=True), apart
    )


# The few numbers that a window's end adds up beside the sums, as elements that ride in
# the first bucket of sums.
#
# Each is a count, or an integer whose bytes are elements of their own. So all additions
# are exact in float32, in any order, for up to 65,793 workers, and a bucket of either
# dtype brings the same numbers to every worker. How many elements there are does not
# depend on the number of workers.


_BELOW = 184
"""Bits behind the point: a float32 has no smaller ones, nor a float64 from 2^-132 on.
"""
_LARGEST = 2.0**135
"""From here on a number is taken for inf, as every float32 is below. Added to each
number, it makes all of them positive.
"""
_PLACES = [2.0 ** (place - _BELOW) for place in range(0, 136 + _BELOW, 8)]
"""What an element of a number counts, the lowest byte first."""


class Numbers(NamedTuple):
    """The numbers of all workers in the window that ends; a count is a whole float."""

    weight: float
    overflow: bool
    is_open: bool
    """Some worker has a micro-batch."""
    flushes: float
    """The workers that have run out of micro-batches."""
    holders: list[float]
    """By position: the workers that have a sum there."""
    others: list[float]
    """The sums of the other numbers that were given."""
    flags: Sequence[float]
    """The number of workers for which each of the flags that were given is true."""


def encode(
    fields: kit.State,
    flushing: bool,
    present: Iterable[bool],
    others: Sequence[float] = (),
    flags: Iterable[int] = (),
) -> bytes:
    """Return one worker's numbers as bytes to add up: integers, what cannot be one, how
    many workers there are, and the rest.
    """
    numbers = fields.weight, *others
    marks = [
        mark
        for each in numbers
        for mark in (each != each, each >= _LARGEST, each <= -_LARGEST)
    ]
    return b"".join(
        (
            *map(_integer, numbers),
            bytes(
                (
                    *marks,
                    1,
                    fields.overflow,
                    fields.micro_step > 0,
                    flushing,
                    *flags,
                    *present,
                )
            ),
        )
    )


def decode(added: Tensor, others: int = 0, flags: int = 0) -> Numbers:
    """Return the numbers of all workers from their added elements, shape
    ``(elements,)``; waits for the device.
    """
    count, size, elements = 1 + others, len(_PLACES), added.tolist()
    marks = elements[count * size :]
    workers, overflows, micro_batches, flushes, *rest = marks[3 * count :]
    sums = [
        _number(
            elements[at * size : (at + 1) * size], workers, *marks[3 * at : 3 * at + 3]
        )
        for at in range(count)
    ]
    return Numbers(
        sums[0],
        overflows > 0,
        micro_batches > 0,
        flushes,
        rest[flags:],
        sums[1:],
        rest[:flags],
    )


def is_exact(weight: float) -> bool:
    """True if the workers can add `weight` up: a float64 may have bits that are too
    small.
    """
    return weight >= 1 or math.ldexp(weight, _BELOW).is_integer()


def _integer(number: float) -> bytes:
    whole = int(math.ldexp(number, _BELOW)) if -_LARGEST < number < _LARGEST else 0
    return (whole + (1 << 135 + _BELOW)).to_bytes(len(_PLACES), "little")


def _number(
    elements: Sequence[float], workers: float, nans: float, above: float, below: float
) -> float:
    """Return the sum, rounded once, of numbers whose integers have these added bytes,
    and of which so many are NaN, inf and -inf.
    """
    if nans or (above and below):
        return math.nan
    return (
        math.inf
        if above
        else (
            -math.inf
            if below
            else math.fsum((-_LARGEST * workers, *map(mul, elements, _PLACES)))
        )
    )
