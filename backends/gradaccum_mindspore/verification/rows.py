"""Which rows of an array belong to which items: found by its shape in the large batch and in a smaller one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray


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
