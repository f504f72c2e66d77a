"""A limit in bytes where the device has none to ask for: the memory that autograd keeps is counted, and is refused past the limit.

Counted is what the loss function's graph keeps for its backward pass. Each memory counts once, and those of the batch and of modules do not
count: they are there whatever the size of a micro-batch. What a recomputed part makes anew in the backward pass is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gradaccum_torch.torch_private import base_of, elements, local, version


def within(limit: int | None, existing: Iterable[Tensor]) -> AbstractContextManager[object]:
    """A context in which autograd may keep `limit` bytes beside those of the tensors that are `existing`; None: any number.

    The operation that would keep more raises `torch.OutOfMemoryError`, as the device's own allocator does.
    """
    if limit is None:
        return nullcontext()
    ledger = Ledger(limit, existing)
    return torch.autograd.graph.saved_tensors_hooks(ledger.keep, Kept.handed_out)


class Ledger:
    """The memory that autograd keeps now, by the address of its storage."""

    def __init__(self, limit: int, existing: Iterable[Tensor]) -> None:
        self._limit, self._bytes = limit, 0
        self._existing = {_address(tensor) for tensor in existing}
        self._users: dict[int, int] = {}
        self._lock = threading.RLock()
        """A device's graph is freed by a thread of autograd's own; and a release may come in the midst of `keep`."""

    def keep(self, tensor: Tensor) -> Any:
        """Count `tensor`, of any shape and dtype, until what is returned is freed.

        Raises:
            OutOfMemoryError: it would exceed the limit; it is not counted then.
        """
        address = _address(tensor)
        if address in self._existing or _is_of_parameter(tensor):
            return Kept(tensor, None, 0)
        size = _memory(tensor).nbytes()
        with self._lock:
            added = 0 if address in self._users else size
            if self._bytes + added > self._limit:
                raise torch.OutOfMemoryError(f"autograd would keep {self._bytes + added} bytes, and memory_limit is {self._limit}")
            self._bytes += added
            self._users[address] = self._users.get(address, 0) + 1
        return Kept(tensor, self, size)

    def release(self, address: int, size: int) -> None:
        """One of those who keep this memory has let go."""
        with self._lock:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self._bytes -= size


class Kept:
    """A tensor that autograd keeps, counted as long as it does."""

    def __init__(self, tensor: Tensor, ledger: Ledger | None, size: int) -> None:
        self._tensor, self._ledger, self._size, self._version = tensor, ledger, size, version(tensor)

    def handed_out(self) -> Tensor:
        """The tensor, for the backward pass.

        Raises:
            RuntimeError: it was written into since; autograd leaves this check to who keeps its tensors.
        """
        if version(self._tensor) != self._version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation")
        return self._tensor

    def __del__(self) -> None:
        if self._ledger is not None:
            self._ledger.release(_address(self._tensor), self._size)


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    """Where the numbers of `tensor` are, of a sharded or a sparse one too; a sparse one's indices do not count."""
    tensor = local(tensor)
    if tensor.layout is torch.strided:
        return tensor.untyped_storage()
    return (elements(tensor) if tensor.is_sparse else tensor.values()).untyped_storage()


def _address(tensor: Tensor) -> int:
    return _memory(tensor).data_ptr()


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether it is a leaf that trains, or a view of one, such as the transposed weight of a layer."""
    base = base_of(tensor)
    base = tensor if base is None else base
    return base.is_leaf and base.requires_grad
