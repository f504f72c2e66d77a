"""Workers as threads of one process that take turns: a seed chooses who runs next, and
who is lost where.

One thread runs at a time. It hands its turn on before and after each collective, so
that a seed is one interleaving and replays it. Where nobody can run, the workers wait
for each other: `Deadlock`. A lost worker may be lost within a collective, which then
has a result on some of the others and fails on the rest, as gloo's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _set_thread_isolation_mode

from conformance_tests.framework_tests.torch_mirror import GroupInPython, registered

BACKEND = "turns"
SECONDS = 60


class Lost(BaseException):
    """Raised in the worker that is lost, where it is lost."""


class Deadlock(Exception):
    """Each worker waits for another one."""


class Turns:
    """The turns of some workers: who runs, who waits for what, and who is lost."""

    def __init__(
        self, workers: int, seed: int, lost: tuple[int, int] | None = None
    ) -> None:
        self.random, self.workers = random.Random(seed), workers
        self.gone: set[int] = set()
        """The workers that are lost, or have come to their end."""
        self.collectives: dict[Any, dict[int, tuple[str, Any]]] = {}
        """By group and number: what each worker brought to a collective."""
        self.failing: dict[Any, set[int]] = {}
        """By group and number: the workers on which a collective fails."""
        self.done: set[int] = set()
        """The workers that have trained on all they have."""
        self.left: set[int] = set()
        """The workers that have left the group of all."""
        self._lost, self._points = lost, [-(10**9)] * workers
        self._go = [threading.Semaphore(0) for _ in range(workers)]
        self._until: list[Callable[[], bool]] = [lambda: True] * workers
        self.stuck = False

    def begin(self) -> None:
        self._go[self.random.randrange(self.workers)].release()

    def run(self, rank: int) -> None:
        """Wait for the first turn."""
        assert self._go[rank].acquire(timeout=SECONDS)

    def count(self, rank: int) -> None:
        """Count the points at which this worker may be lost from here on."""
        self._points[rank] = 0

    def point(self, rank: int) -> bool:
        """Hand the turn on; True if this worker is lost here."""
        self.wait(rank, lambda: True)
        self._points[rank] += 1
        return (rank, self._points[rank]) == self._lost

    def wait(self, rank: int, until: Callable[[], bool]) -> None:
        """Hand the turn on until `until`."""
        self._until[rank] = until
        self._next()
        assert self._go[rank].acquire(timeout=SECONDS)
        if self.stuck:
            raise Deadlock

    def end(self, rank: int) -> None:
        self.gone.add(rank)
        if len(self.gone) < self.workers:
            self._next()

    def _next(self) -> None:
        waiting = [rank for rank in range(self.workers) if rank not in self.gone]
        ready = [rank for rank in waiting if self._until[rank]()]
        self.stuck = self.stuck or not ready
        self._go[self.random.choice(ready or waiting)].release()


class Group(GroupInPython):
    """The collectives that a window makes, between workers that take turns."""

    turns: Turns
    """Of the run that is under way."""

    _number = 0
    _members: tuple[int, ...] = ()
    """The ranks among all workers; ``()``: all."""

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        reduce = {
            dist.ReduceOp.SUM: torch.sum,
            dist.ReduceOp.MAX: torch.amax,
            dist.ReduceOp.MIN: torch.amin,
            dist.ReduceOp.AVG: torch.mean,
        }
        (kind,) = (each for same, each in reduce.items() if op == same)
        everyone = self._met(
            f"allreduce of {tuple(tensor.shape)} {tensor.dtype}",
            tensor.detach().clone(),
        )
        tensor.detach().copy_(kind(torch.stack(everyone), 0))
        return self.done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors
        tensor.detach().copy_(
            self._met("broadcast", tensor.detach().clone())[opts.rootRank]
        )
        return self.done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        everyone = self._met("allgather", inputs[0].detach().clone())
        for output, tensor in zip(outputs[0], everyone, strict=True):
            output.detach().copy_(tensor)
        return self.done(inputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        output.detach().copy_(
            torch.stack(self._met("allgather", tensor.detach().clone())).reshape(
                output.shape
            )
        )
        return self.done([output])

    all_gather_single = _allgather_base

    def _met(self, name: str, brought: Tensor) -> list[Any]:
        """Return what all workers bring to this one's next collective, in the order of
        their ranks.
        """
        turns, members = self.turns, self._members or tuple(range(self._size))
        own, key = members[self._rank], (members, self._number)
        self._number += 1
        met = turns.collectives.setdefault(key, {})
        if turns.point(own):
            raise Lost
        met[own] = name, brought
        if turns.point(own):
            # What this worker has sent may have reached some of the others, and not the
            # rest.
            turns.failing[key] = {
                rank for rank in members if turns.random.random() < 0.5
            }
            raise Lost

        def missing() -> set[int]:
            return turns.gone if self._members else turns.gone | turns.left

        turns.wait(
            own,
            lambda: (
                met.keys() >= set(members)
                or bool(missing() & set(members) - met.keys())
            ),
        )
        if len(met) < self._size or own in turns.failing.get(key, ()):
            raise RuntimeError("Connection closed by peer")
        assert len({each for each, _ in met.values()}) == 1, (
            f"the workers meet at different collectives: {met}"
        )
        return [met[rank][1] for rank in members]

    @classmethod
    def is_left(cls, rank: int) -> bool:
        """Wait for all workers to be done, lost, or out of the group; True if one has
        left it.
        """
        turns = cls.turns
        turns.done.add(rank)
        turns.wait(
            rank,
            lambda: turns.done | turns.left | turns.gone == set(range(turns.workers)),
        )
        return bool(turns.left)

    @classmethod
    def of_those_left(cls, rank: int) -> dist.ProcessGroup | None:
        """Wait for all workers that are not lost; return a group of them, None for one
        alone. A run has one such group.
        """
        turns = cls.turns
        turns.left.add(rank)
        turns.wait(rank, lambda: turns.left | turns.gone == set(range(turns.workers)))
        members = tuple(sorted(turns.left))
        group: Any = (
            dist.new_group(
                list(members), backend=BACKEND, use_local_synchronization=True
            )
            if members[1:]
            else None
        )
        if group is not None:
            group._members = members
        return group  # type: ignore[no-any-return]


def run(
    workers: int,
    seed: int,
    program: Callable[[int, dist.ProcessGroup], Any],
    lost: tuple[int, int] | None = None,
) -> list[Any]:
    """Run `program` as each of `workers`, which take turns by `seed`; return what each
    returns or raises.

    Args:
        workers: their number.
        seed: of the turns; a run with it replays.
        program: called with the rank and the process group of all.
        lost: a worker and the number of the point where it is lost, two in each
            collective since its `count`; None: nobody is.
    """
    # Each thread has process groups of its own.
    from torch.testing._internal.distributed import (
        multi_threaded_pg as threaded,
    )

    if not hasattr(threaded.ThreadLocalWorld, "comms"):
        # torch 2.11 looks for them where a group ends, and forgot them here.
        threaded.ThreadLocalWorld.comms = []
    turns = Group.turns = Turns(workers, seed, lost)
    found: list[Any] = [None] * workers

    def one(rank: int) -> None:
        turns.run(rank)
        try:
            dist.init_process_group(
                registered(Group, BACKEND),
                store=dist.HashStore(),
                rank=rank,
                world_size=workers,
            )
            assert dist.group.WORLD is not None
            found[rank] = program(rank, dist.group.WORLD)
        except BaseException as error:
            found[rank] = error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            turns.end(rank)

    threaded._install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        threads = [
            threading.Thread(target=one, args=(rank,), daemon=True)
            for rank in range(workers)
        ]
        for thread in threads:
            thread.start()
        turns.begin()
        for thread in threads:
            thread.join(SECONDS)
    finally:
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
    assert not any(thread.is_alive() for thread in threads), (
        "a worker did not come to its end"
    )
    return found
