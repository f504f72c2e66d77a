"""The operations of torch that a program runs, and the memory of the tensors that they
make.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Records the operations that run inside the ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """In the order in which they ran, without their overloads."""

    @property
    def counts(self) -> Counter[str]:
        """How often each ran, by name."""
        return Counter(self.names)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """The bytes of all tensors made within it that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        }
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if (
                isinstance(tensor, Tensor)
                and tensor.untyped_storage()._cdata not in given | self._known
            ):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
