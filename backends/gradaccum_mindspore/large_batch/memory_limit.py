"""A limit in bytes on a CPU, where MindSpore has none to ask for: what autograd keeps is counted, and refused past the limit.

Counted is what PyNative mode keeps for the backward pass, each memory once. The batch and the Parameters are there whatever the size of a
micro-batch, so they do not count. What the backward pass itself makes does not count either, a recomputed segment's activations among it:
MindSpore records it as if it were to be differentiated once more. Compiled code keeps its memory to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mindspore as ms
from mindspore import Tensor

from gradaccum_mindspore.recomputation.casting import detached


class MemoryLimitError(MemoryError):
    """Autograd would keep more than the limit: a smaller micro-batch may help."""


def within(limit: int | None, existing: Iterable[Tensor]) -> AbstractContextManager[object]:
    """A context in which autograd may keep `limit` bytes beside those of the tensors that are `existing`; None: any number.

    The operation that would keep more raises `MemoryLimitError`.
    """
    if limit is None:
        return nullcontext()
    ledger = Ledger(limit, existing)
    return ms.saved_tensors_hooks(ledger.keep, Kept.handed_out)  # type: ignore[no-any-return]


class Ledger:
    """The memory that autograd keeps now, by its address."""

    def __init__(self, limit: int, existing: Iterable[Tensor]) -> None:
        self._limit, self._bytes = limit, 0
        self._existing = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in existing]
        self._users: dict[int, int] = {}
        self._backward = False

    def keep(self, tensor: Tensor) -> Kept:
        """Count `tensor`, of any shape and dtype, until what is returned is freed.

        Raises:
            MemoryLimitError: it would exceed the limit; it is not counted then.
        """
        address, size = tensor.data_ptr(), tensor.nbytes
        if self._backward or any(start <= address < end for start, end in self._existing):
            return Kept(tensor, None, address, 0)
        added = 0 if address in self._users else size
        if self._bytes + added > self._limit:
            raise MemoryLimitError(f"autograd would keep {self._bytes + added} bytes, and memory_limit is {self._limit}")
        self._bytes += added
        self._users[address] = self._users.get(address, 0) + 1
        return Kept(tensor, self, address, size)

    def hand_out(self) -> None:
        """A backward pass has begun. It ends when nothing is kept any more."""
        self._backward = True

    def release(self, address: int, size: int) -> None:
        """One of those who keep this memory has let go."""
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self._bytes -= size
        self._backward = self._backward and bool(self._users)


class Kept:
    """A tensor that autograd keeps, counted as long as it does. Detached: an output that kept itself would never be freed."""

    def __init__(self, tensor: Tensor, ledger: Ledger | None, address: int, size: int) -> None:
        self._tensor, self._ledger, self._address, self._size = detached(tensor), ledger, address, size

    def handed_out(self) -> Any:
        """The tensor, for the backward pass."""
        if self._ledger is not None:
            self._ledger.hand_out()
        return self._tensor

    def __del__(self) -> None:
        if self._ledger is not None:
            self._ledger.release(self._address, self._size)
