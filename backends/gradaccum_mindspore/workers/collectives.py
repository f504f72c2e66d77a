"""The messages of workers to each other: numbers, texts, and sums in buckets.

Small sums travel packed together, a large one alone. One message leaves when the one
before has arrived: the CPU's kernels match messages by order. These kernels add up
float32 and float16 only, and gather float64 rounded to float32. So half-precision sums
travel as float32, and a float64 number as a sum of three of float32, which is exact; a
number beyond float32's range arrives as an inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import Primitive

from gradaccum_mindspore.gradient_sum import (
    ARRAYS,
    Array,
    Sums,
    array_of,
    map_over,
    working_dtype,
    write,
)
from gradaccum_mindspore.workers.gather import gather_exactly


class NoAnswerError(Exception):
    """The engine gave up waiting for another worker, or lost it."""


def call(operator: type[Primitive], values: Array) -> Array:
    """Call a collective operator of MindSpore's from Python."""
    tensor = Tensor.from_numpy(np.ascontiguousarray(values))
    try:
        array: Array = operator()(tensor).asnumpy()
    except RuntimeError as error:
        raise NoAnswerError from error
    return array


def sum_over_workers(values: Array) -> Array:
    """Return the sum over the workers of a vector of float32 or float64;
    `compiled_sum_over_workers` sends the same, and adds in the same order.
    """
    if values.dtype == np.float32:
        return call(ops.AllReduce, values)
    with np.errstate(over="ignore", invalid="ignore"):
        high = values.astype(np.float32)
        rest = np.where(np.isfinite(high), values - high, 0.0)
        middle = rest.astype(np.float32)
        low = (rest - middle).astype(np.float32)
    gathered = call(ops.AllGather, np.stack((high, middle, low)))
    parts = gathered.astype(np.float64).reshape(-1, 3, values.size)
    vectors = parts[:, 0] + parts[:, 1] + parts[:, 2]
    total: Array = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total


def compiled_sum_over_workers(values: Tensor, workers: int) -> Tensor:
    if values.dtype == ms.float32:
        return ops.AllReduce()(values)
    vectors = gather_exactly(ops.AllGather(), values, workers)
    total = vectors[0]
    for worker in range(1, workers):
        total = total + vectors[worker]
    return total


def gather_texts(text: str) -> list[str]:
    """Return the text of each worker."""
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    lengths = call(ops.AllGather, np.array([len(codes)], np.int32))
    padded_codes = np.pad(codes, (0, int(lengths.max()) - len(codes)))
    rows = call(ops.AllGather, padded_codes).reshape(len(lengths), -1)
    pairs = zip(rows, lengths, strict=True)
    return [bytes(row[:length].astype(np.uint8)).decode() for row, length in pairs]


BUCKET_ELEMENTS = 25 * 2**18
"""25 MiB of float32, the size of the buckets of
`torch.nn.parallel.DistributedDataParallel`.
"""
LARGE_ELEMENTS = 2**18


class Bucket(nn.Cell):  # type: ignore[misc]
    """Sums of one working dtype that travel as one vector."""

    def __init__(self, sums: Sequence[Parameter], workers: int) -> None:
        super().__init__(auto_prefix=False)
        # A Cell would list them as its own.
        object.__setattr__(self, "sums", tuple(sums))
        self.workers = workers
        ends = np.cumsum([total.size for total in sums]).tolist()
        self.starts = (0, *ends[:-1])
        self.ends = tuple(ends)

    def total(self) -> Array:
        """Return the vector of totals, from Python."""
        arrays = [wide_array(each_sum).reshape(-1) for each_sum in self.sums]
        return sum_over_workers(
            arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        )

    def unpack(self, total: Array) -> None:
        for each_sum, start, end in zip(self.sums, self.starts, self.ends, strict=True):
            tensor = Tensor.from_numpy(total[start:end].reshape(each_sum.shape))
            write(each_sum, tensor.astype(each_sum.dtype))

    def construct(self, after: Tensor) -> Tensor:
        """Write the totals, and return the vector of them, once `after` is computed."""
        packed = ops.depend(ops.concat(map_over(_flat, self.sums)), after)
        total = compiled_sum_over_workers(packed, self.workers)
        map_over(ops.partial(_unpack, total), self.sums, self.starts, self.ends)
        return total


def buckets(sums: Sums, workers: int) -> list[Bucket]:
    """Return `sums` in buckets: neighbours of one working dtype, a large one alone."""
    filled: list[Bucket] = []
    for dtype in (ms.float32, ms.float64):
        small: list[Parameter] = []
        elements = 0
        for total in sums:
            if working_dtype(total.dtype) != dtype:
                continue
            if total.size >= LARGE_ELEMENTS:
                filled.append(Bucket([total], workers))
                continue
            if elements + total.size > BUCKET_ELEMENTS:
                filled.append(Bucket(small, workers))
                small = []
                elements = 0
            small.append(total)
            elements += total.size
        if small:
            filled.append(Bucket(small, workers))
    return filled


def wide_array(total: Parameter) -> Array:
    """Return a sum as NumPy reads it, in its working dtype."""
    array = array_of(total)
    if array is None:
        array = total.astype(ms.float32).asnumpy()
    wide: Array = array.astype(ARRAYS[working_dtype(total.dtype)], copy=False)
    return wide


def _flat(total: Parameter) -> Tensor:
    return total.astype(working_dtype(total.dtype)).reshape(-1)


def _unpack(packed: Tensor, total: Parameter, start: int, end: int) -> bool:
    write(total, packed[start:end].reshape(total.shape).astype(total.dtype))
    return True
