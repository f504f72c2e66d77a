"""What a segment's forward pass changes moves once: running statistics, counters, any Parameter without a gradient.

The second run of a segment begins with the values that the first run found, and afterwards the values are what they were before it.
Compiled code repeats no assignment; `keep_statistics` says what it has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mindspore import Tensor, nn, ops

from gradaccum_mindspore.recomputation.casting import uncast
from gradaccum_mindspore.types import Array

WRITERS = ("BatchNorm", "SyncBatchNorm", "BatchNormExt", "InstanceNorm")
"""The operators that write into an argument of theirs, and that MindSpore's compiler repeats all the same."""


def buffers_of(cells: Iterable[nn.Cell]) -> list[Tensor]:
    """What has no gradient in these cells: Parameters that are not trained, and registered buffers. A frozen weight is among them."""
    found: dict[int, Tensor] = {}
    for cell in cells:
        found |= {id(p): p for p in cell.get_parameters() if not p.requires_grad}
        found |= {id(buffer): buffer for buffer in cell.buffers()}
    return list(found.values())


class Values:
    """The values of some buffers at one moment."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._pairs = [(buffer, buffer.asnumpy().copy()) for buffer in buffers]

    def forget_unchanged(self) -> None:
        """Keep the values of what has changed since, and free the others."""
        self._pairs = [(buffer, value) for buffer, value in self._pairs if not same_bits(buffer.asnumpy(), value)]

    def put_back(self) -> None:
        """Assign them. A compiled function does not see `set_data`."""
        with uncast():
            for buffer, value in self._pairs:
                ops.assign(buffer, Tensor(value, buffer.dtype))

    @contextmanager
    def again(self) -> Iterator[None]:
        """The buffers have these values inside, and afterwards those from before."""
        before = Values([buffer for buffer, _ in self._pairs])
        self.put_back()
        try:
            yield
        finally:
            before.put_back()


def same_bits(first: Array, second: Array) -> bool:
    """Whether two arrays are equal bit for bit; a NaN equals itself."""
    return first.shape == second.shape and first.dtype == second.dtype and bool(np.array_equal(_bytes(first), _bytes(second)))


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def keep_statistics(cells: Iterable[nn.Cell]) -> None:
    """Let compiled code keep what batch normalization returns, in place of running it again and moving its statistics twice."""
    for cell in cells:
        for _, inner in cell.cells_and_names():
            for value in vars(inner).values():
                if isinstance(value, ops.Primitive) and value.name in WRITERS:
                    _keep(value)


def _keep(operator: ops.Primitive) -> ops.Primitive:
    """MindSpore's copy of an operator is made of its arguments alone, and would forget it."""
    operator.add_prim_attr("recompute", False)
    operator.__deepcopy__ = lambda memo: _keep(type(operator)(**operator.init_attrs))
    return operator
