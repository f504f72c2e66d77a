"""A window's sums as a compiled program measures them: the small ones as one.

MindSpore compiles each operator by itself, and takes several times as long for one in a branch inside a branch, as that of the robust norm
is. To measure a sum takes four operators, and seven the robust way: for hundreds of sums they were half of the time to compile a step. To
join one to the others takes one. The copy of a small sum takes no longer than the operators that it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum_mindspore.norm import ROW
from gradaccum_mindspore.sums import each
from gradaccum_mindspore.types import DType, Sums

SMALL = 4 * ROW
"""Elements up to which a sum is small: 64 KiB in float32."""
JOINED = 2**22
"""Elements that are joined at most, 16 MiB in float32: the copy and its squares are no buffer of a large model's size."""
reshape: Callable[[Tensor, tuple[int, ...]], Tensor] = ops.Reshape()
concat: Callable[[tuple[Tensor, ...]], Tensor] = ops.Concat()
"""Primitives: the functions of these names are graphs of their own, for each tensor."""


def smallest(sums: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """The small ones that together have no more than `JOINED` elements, smallest first."""
    small = sorted((total for total in sums if total.size <= SMALL), key=lambda total: total.size)
    ends = accumulate(total.size for total in small)
    return tuple(total for total, end in zip(small, ends, strict=True) if end <= JOINED)


class Packed(nn.Cell):  # type: ignore[misc]
    """The sums of one accumulation, for the norms of `gradaccum_mindspore.norm`.

    Args:
        sums: the sums.
        dtype: the dtype to measure in.
    """

    small: Sequence[Parameter]
    others: Sequence[Parameter]
    """Large ones, those of another dtype, and what would be more than `JOINED`."""

    def __init__(self, sums: Sequence[Parameter], dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        small = smallest(total for total in sums if total.dtype == dtype)
        self.joins = len(small) > 1
        joined = {id(total) for total in small} if self.joins else set()
        # A Cell would list them as its own.
        object.__setattr__(self, "small", small)
        object.__setattr__(self, "others", tuple(total for total in sums if id(total) not in joined))
        elements = sum(total.size for total in small)
        self.in_rows = elements > ROW
        gap = -elements % ROW if self.in_rows else 0
        self.gap = (Tensor(np.zeros(gap), dtype),) if gap else ()
        """Zeros that fill the last row; the number of elements may be a prime."""

    def construct(self) -> Sums:
        """The tensors whose elements are those of the sums and zeros."""
        if not self.joins:
            return self.others
        joined = concat((*each(_flat, self.small), *self.gap))
        if self.in_rows:
            joined = reshape(joined, (-1, ROW))
        return (joined, *self.others)


def _flat(total: Parameter) -> Tensor:
    return reshape(total, (-1,))
