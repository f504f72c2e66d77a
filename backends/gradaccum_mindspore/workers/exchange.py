"""What workers send each other: sums of numbers, and texts.

MindSpore's kernels for the CPU add up float32 and float16 only, and gather float64 rounded to float32. So half-precision sums travel as
float32. A float64 number travels as a sum of three of float32, which is exact, and each worker adds up what all of them sent; one beyond
float32's range arrives as an inf, and its window is skipped as an overflow.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import Primitive

from gradaccum_mindspore.types import Array

ALL_REDUCE, ALL_GATHER = ops.AllReduce, ops.AllGather


class NoAnswerError(Exception):
    """The engine gave up waiting for another worker, or lost it."""


def added_up(mine: Array) -> Array:
    """The sum over the workers of a vector of float32 or float64, in NumPy; `compiled_added_up` sends the same."""
    if mine.dtype == np.float32:
        return _answer(ALL_REDUCE, mine)
    with np.errstate(over="ignore", invalid="ignore"):
        high = mine.astype(np.float32)
        rest = mine - high
        middle = rest.astype(np.float32)
        low = (rest - middle).astype(np.float32)
    gathered = _answer(ALL_GATHER, np.stack((high, middle, low)))
    return _in_turn(gathered.astype(np.float64).reshape(-1, 3, mine.size))


def _in_turn(parts: Array) -> Array:
    """The sum over workers and parts, in the order in which compiled code adds."""
    each = parts[:, 0] + parts[:, 1] + parts[:, 2]
    total: Array = each[0]
    for other in each[1:]:
        total = total + other
    return total


def compiled_added_up(mine: Tensor, workers: int) -> Tensor:
    """The same on Tensors, for the compiler to follow."""
    if mine.dtype == ms.float32:
        return ALL_REDUCE()(mine)
    high = mine.astype(ms.float32)
    rest = mine - high.astype(ms.float64)
    middle = rest.astype(ms.float32)
    low = (rest - middle.astype(ms.float64)).astype(ms.float32)
    gathered = ALL_GATHER()(ops.stack((high, middle, low))).astype(ms.float64).reshape((workers, 3, -1))
    each = gathered[:, 0] + gathered[:, 1] + gathered[:, 2]
    total = each[0]
    for worker in range(1, workers):
        total = total + each[worker]
    return total


def gather_texts(text: str) -> list[str]:
    """The texts of all workers, by rank. Collective."""
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    lengths = _answer(ALL_GATHER, np.array([len(codes)], np.int32))
    rows = _answer(ALL_GATHER, np.pad(codes, (0, int(lengths.max()) - len(codes)))).reshape(len(lengths), -1)
    return [bytes(row[:length].astype(np.uint8)).decode() for row, length in zip(rows, lengths, strict=True)]


def _answer(operator: type[Primitive], values: Array) -> Array:
    try:
        array: Array = operator()(Tensor.from_numpy(np.ascontiguousarray(values))).asnumpy()
    except RuntimeError as error:
        raise NoAnswerError from error
    return array
