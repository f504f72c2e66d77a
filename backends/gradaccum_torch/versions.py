"""Which tensors have been written into since: torch counts every write, except through ``.data`` and into the parts of a `DTensor`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is split over processes, so that its version does not count what torch writes into many at once."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is here, or the tensor itself."""
    whole: Any = tensor
    part: Tensor = getattr(whole, "_local_tensor", whole)
    return part


class Versions:
    """The versions of `tensors` as they are now."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self._noted = [tensor._version for tensor in self.tensors]
        self.all_written = False
        """All have been written into; set by who did it, for those that do not count it."""

    def moved(self) -> list[Tensor]:
        """Those that somebody wrote into since."""
        pairs = zip(self.tensors, self._noted, strict=True)
        return [tensor for tensor, version in pairs if tensor._version != version or (self.all_written and is_sharded(tensor))]
