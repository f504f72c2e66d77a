"""The operations of torch that a program runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Records the operations that run inside the ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """In the order in which they ran, without their overloads."""
        self.overloads: set[tuple[str, str]] = set()
        """A name and an overload of it."""

    @property
    def counts(self) -> Counter[str]:
        """How often each ran, by name."""
        return Counter(self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.append(name)
        self.overloads.add((name, func._overloadname))
        return func(*args, **(kwargs or {}))
