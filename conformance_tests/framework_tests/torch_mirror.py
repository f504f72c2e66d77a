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


class Mirror(dist.ProcessGroup):
    """Collectives of `size` ranks that all bring what this one brings."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._name = name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        for tensor in tensors:
            # In place, for who measures memory.
            tensor.detach().mul_(self._factor(opts))
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

    def _reduce_scatter_base(
        self, output: Tensor, tensor: Tensor, opts: Any = None
    ) -> Any:
        part = tensor.reshape(self._size, *output.shape)[self._rank]
        output.detach().copy_(part * self._factor(opts))
        return self._done("reduce_scatter", [tensor])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            output.detach().copy_(parts[self._rank])
        return self._done("scatter", outputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", [])

    # The names of newer torch.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base

    def _factor(self, opts: Any) -> int:
        """Return by what equal tensors are multiplied if they are reduced."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return self._size
        # A product, or a maximum of bits, of equal tensors is another thing, and no
        # window asks for it.
        equal_ones = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        assert any(op == equal_one for equal_one in equal_ones), op
        return 1

    def _done(self, name: str, brought: Sequence[Tensor]) -> Any:
        """Note a collective, and return its work, which is over."""
        CALLS.append(Call(name, sum(tensor.nbytes for tensor in brought), self._size))
        future: Future[Any] = Future()
        future.set_result(list(brought))
        return _create_work_from_future(future)


def register() -> None:
    """Make `Mirror` the process group of its backend, once."""

    def create(common: Any, _: object) -> Mirror:
        return Mirror(common.group_rank, common.group_size, common.group_id)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, create, extended_api=True, devices=["cpu", "cuda"]
        )


@contextmanager
def mirror(workers: int) -> Iterator[list[Call]]:
    """Run the block as rank 0 of `workers`; the list fills with the block's
    collectives.
    """
    register()
    store = dist.HashStore()
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=workers)
    CALLS.clear()
    try:
        yield CALLS
    finally:
        dist.destroy_process_group()
