"""A process group in one process, in which every rank brings what this one brings: 1024
workers without 1023 processes.

A sum is this rank's tensor times the number of ranks, a gathered list is as many
copies, and what is scattered is this rank's part. So a program of W workers runs whole,
and is exact where the workers' items and shards are equal. The group moves real values,
where torch's ``fake`` group moves none, and counts what it would send.

What differs from rank to rank cannot be mirrored: unequal items, a label that only one
worker's classes hold, a tensor whose shards differ.

    with mirror(1024) as calls:
        model = DistributedDataParallel(...)
        ...
    assert [call.name for call in calls] == ["allreduce"]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

BACKEND = "mirror"


class Call(NamedTuple):
    """A collective that this rank took part in."""

    name: str
    """In the words of `torch.distributed.ProcessGroup`."""
    bytes: int
    """What this rank brings."""
    workers: int


CALLS: list[Call] = []


class GroupInPython(dist.ProcessGroup):
    """A process group without collectives."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._name

    def done(self, brought: Sequence[Tensor]) -> Any:
        """Return the work of a collective that has been."""
        future: Future[Any] = Future()
        future.set_result(list(brought))
        return _create_work_from_future(future)


def registered(kind: type[GroupInPython], backend: str) -> str:
    """Make `kind` the process group of `backend`, once; return `backend`."""

    def create(common: Any, _: object) -> GroupInPython:
        return kind(common.group_rank, common.group_size, common.group_id)

    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            backend, create, extended_api=True, devices=["cpu", "cuda"]
        )
    return backend


class Mirror(GroupInPython):
    """Collectives of `size` ranks that all bring what this one brings."""

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        for tensor in tensors:
            if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
                tensor.detach().mul_(self._size)  # In place, for who measures memory.
            else:
                tensor.detach().copy_(self._reduced(tensor, opts))
        return self._done("allreduce", tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._done("broadcast", tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for copies, tensor in zip(outputs, inputs, strict=True):
            for copy in copies:
                copy.detach().copy_(tensor)
        return self._done("allgather", inputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        output.detach().view(self._size, -1).copy_(tensor.clone().view(1, -1))
        return self._done("allgather", [tensor])

    def allgather_into_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        return [
            self._allgather_base(*each) for each in zip(outputs, inputs, strict=True)
        ][-1]

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            output.detach().copy_(self._reduced(parts[self._rank], opts))
        return self._done(
            "reduce_scatter", [part for parts in inputs for part in parts]
        )

    def _reduce_scatter_base(
        self, output: Tensor, tensor: Tensor, opts: Any = None
    ) -> Any:
        output.detach().copy_(
            self._reduced(tensor.reshape(self._size, *output.shape)[self._rank], opts)
        )
        return self._done("reduce_scatter", [tensor])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        return [
            self._reduce_scatter_base(*each, opts)
            for each in zip(outputs, inputs, strict=True)
        ][-1]

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            output.detach().copy_(parts[self._rank])
        return self._done("scatter", outputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", [])

    allreduce_coalesced = allreduce
    all_gather_single, all_gather_single_coalesced = (
        _allgather_base,
        allgather_into_tensor_coalesced,
    )
    reduce_scatter_single, reduce_scatter_single_coalesced = (
        _reduce_scatter_base,
        reduce_scatter_tensor_coalesced,
    )

    def _reduced(self, tensor: Tensor, opts: Any) -> Tensor:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return tensor * self._size
        # A product, or a maximum of bits, of equal tensors is another thing, and no
        # window asks for it.
        assert any(
            op == same
            for same in (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        ), op
        return tensor

    def _done(self, name: str, brought: Sequence[Tensor]) -> Any:
        CALLS.append(Call(name, sum(tensor.nbytes for tensor in brought), self._size))
        return self.done(brought)


@contextmanager
def mirror(workers: int, rank: int = 0) -> Iterator[list[Call]]:
    """Run the block as `rank` of `workers`; the list fills with the block's
    collectives.
    """
    dist.init_process_group(
        registered(Mirror, BACKEND),
        store=dist.HashStore(),
        rank=rank,
        world_size=workers,
    )
    CALLS.clear()
    try:
        yield CALLS
    finally:
        dist.destroy_process_group()
