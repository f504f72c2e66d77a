"""The sums of the gradients of one large batch, in PyNative and where Python calls compiled micro-batches.

A gradient of a parameter is a sum over micro-batches. A gradient of an argument that was cut is not: each item's part stands in its own
micro-batch, so the parts are concatenated. Nothing is added in place, because a gradient may share its memory with the user's batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from gradaccum.kit import Nest, leaves_of, mapped, with_leaves
from gradaccum_mindspore.pynative_sums import divided, scaled
from gradaccum_mindspore.sums import sum_dtype, working_dtype
from gradaccum_mindspore.types import DType


class GradientSums:
    """The gradients of the micro-batches so far.

    Args:
        accumulate_dtype: the option; None sums half precision in float32.
        joins: for each gradient in order, the axis along which its parts are concatenated, or None where they are added. Those beyond its
            end are added.
    """

    def __init__(self, accumulate_dtype: object, joins: Sequence[int | None] = ()) -> None:
        self.accumulate_dtype = accumulate_dtype
        self.joins = joins
        self.totals: list[Tensor] = []
        self.parts: list[list[Tensor]] = []
        self.dtypes: list[DType] = []
        self.outline: Nest = None

    def add(self, gradients: Nest, factor: float) -> None:
        """Take in the gradients of one micro-batch times `factor`; a factor of 0 adds nothing, whatever they hold."""
        leaves: list[Tensor] = [leaf.value for leaf in leaves_of(gradients)]
        if not self.totals:
            self.outline, self.dtypes = mapped(lambda leaf: object(), gradients), [leaf.dtype for leaf in leaves]
            self.totals, self.parts = [None] * len(leaves), [[] for _ in leaves]
        for place, gradient in enumerate(leaves):
            self._add_one(place, gradient, factor)

    def finished(self, divisor: float) -> Nest:
        """The large batch's gradients, in the dtypes and the structure in which they came."""
        totals = [self._total(place) for place in range(len(self.totals))]
        leaves = divided(totals, divisor, self.dtypes, ms.float64) if divisor != 1 else map(_cast, totals, self.dtypes)
        return with_leaves(self.outline, iter(leaves))

    def _add_one(self, place: int, gradient: Tensor, factor: float) -> None:
        dtype = sum_dtype(gradient.dtype, self.accumulate_dtype)
        given = scaled(gradient, factor, dtype) if factor != 0 else _zeros(gradient, dtype)
        if self._join(place) is not None:
            self.parts[place].append(given)
        elif factor != 0 or self.totals[place] is None:
            before = self.totals[place]
            self.totals[place] = given if before is None else _added(before, given)

    def _join(self, place: int) -> int | None:
        return self.joins[place] if place < len(self.joins) else None

    def _total(self, place: int) -> Tensor:
        axis = self._join(place)
        if axis is None:
            return self.totals[place]
        parts = self.parts[place]
        return parts[0] if len(parts) == 1 else ops.concat(parts, axis)


def _added(total: Tensor, given: Tensor) -> Tensor:
    work = working_dtype(total.dtype)
    return _cast(ops.add(_cast(total, work), _cast(given, work)), total.dtype)


def _cast(tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _zeros(like: Tensor, dtype: DType) -> Tensor:
    return Tensor(np.zeros(like.shape), dtype)
