"""Which rows of an array belong to which items: found by its shape in the large batch and in a smaller one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray


def item_axis(large: Sequence[int], small: Sequence[int], items: int, part: int) -> int | None:
    """The axis along which a value has one row, or equally many, per item; None if there is none, or several."""
    if len(large) != len(small):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(large, small, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    a, b = large[differing[0]], small[differing[0]]
    return differing[0] if a % items == 0 and b == a // items * part else None


def rows(value: Any, axis: int, items: int, part: Sequence[int]) -> Any:
    """Those of the items of `part`, of a Tensor or a NumPy array with the same number of rows for each of `items`."""
    each = value.shape[axis] // items
    places = np.asarray([item * each + row for item in part for row in range(each)], np.int32)
    return ops.gather(value, Tensor(places), axis) if isinstance(value, Tensor) else np.take(value, places, axis)


def wide(value: Any) -> NDArray[np.float64]:
    """A Tensor or a NumPy array as NumPy's, in float64."""
    if isinstance(value, Tensor):
        value = (value.astype(ms.float32) if value.dtype == ms.bfloat16 else value).asnumpy()
    made: NDArray[np.float64] = np.asarray(value).astype(np.float64)
    return made
