"""A window's sums as a compiled program measures them: the small ones as one.

MindSpore compiles each operator by itself, and takes several times as long for one in a branch inside a branch, as that of the robust norm
is. To measure a sum takes four operators, and seven the robust way: for hundreds of sums they were half of the time to compile a step. To
join one to the others takes one. The copy of a small sum takes no longer than the operators that it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum_mindspore.norm import ROW
from gradaccum_mindspore.sums import cast, each
from gradaccum_mindspore.types import DType, Sums

SMALL = 4 * ROW
"""Elements up to which a sum is small: 64 KiB in float32."""


class Packed(nn.Cell):  # type: ignore[misc]
    """The sums of one accumulation, for the norms of `gradaccum_mindspore.norm`.

    Args:
        sums: the sums.
        dtype: the dtype to measure in.
    """

    small: Sequence[Parameter]
    large: Sequence[Parameter]

    def __init__(self, sums: Sequence[Parameter], dtype: DType) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = dtype
        small = tuple(total for total in sums if total.size <= SMALL)
        self.joins = len(small) > 1
        # A Cell would list them as its own.
        object.__setattr__(self, "small", small)
        object.__setattr__(self, "large", tuple(total for total in sums if total.size > SMALL) if self.joins else tuple(sums))
        elements = sum(total.size for total in small)
        self.in_rows = elements > ROW
        gap = -elements % ROW if self.in_rows else 0
        self.gap = (Tensor(np.zeros(gap), dtype),) if gap else ()
        """Zeros that fill the last row; the number of elements may be a prime."""

    def construct(self) -> Sums:
        """The tensors whose elements are those of the sums and zeros."""
        if not self.joins:
            return self.large
        joined = ops.concat((*each(ops.partial(_flat, self.dtype), self.small), *self.gap))
        if self.in_rows:
            joined = joined.reshape(-1, ROW)
        return (joined, *self.large)


def _flat(dtype: DType, total: Parameter) -> Tensor:
    return ops.reshape(cast(total, dtype), (-1,))
