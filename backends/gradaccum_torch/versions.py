"""Which tensors have been written into since: torch counts every write, except through ``.data`` and into the parts of a `DTensor`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gradaccum_torch.torch_private import is_sharded, version


class Versions:
    """The versions of `tensors` as they are now."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.tensors = list(tensors)
        self._noted = list(map(version, self.tensors))
        self.all_written = False
        """All have been written into. The caller that wrote sets it, for the tensors that do not count a write."""

    def moved(self) -> list[Tensor]:
        """The tensors that something wrote into since."""
        pairs = zip(self.tensors, self._noted, strict=True)
        return [tensor for tensor, noted in pairs if version(tensor) != noted or (self.all_written and is_sharded(tensor))]
