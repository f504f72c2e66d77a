"""The messages of workers to each other: numbers, and sums in buckets.

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

from gradaccum_mindspore.gradient_sum import Sums, map_over, working_dtype, write


def compiled_sum_over_workers(values: Tensor, workers: int) -> Tensor:
    """Return the sum over the workers of a vector of float32 or float64."""
    if values.dtype == ms.float32:
        return ops.AllReduce()(values)
    vectors = gather_exactly(values, workers)
    total = vectors[0]
    for worker in range(1, workers):
        total = total + vectors[worker]
    return total


def gather_exactly(values: Tensor, workers: int) -> Tensor:
    """Return the float64 vector of each worker, as rows."""
    high = values.astype(ms.float32)
    rest = ops.where(ops.isfinite(high), values - high.astype(ms.float64), 0.0)
    middle = rest.astype(ms.float32)
    low = (rest - middle.astype(ms.float64)).astype(ms.float32)
    parts = (
        ops.AllGather()(ops.stack((high, middle, low)))
        .astype(ms.float64)
        .reshape((workers, 3, -1))
    )
    return parts[:, 0] + parts[:, 1] + parts[:, 2]


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

    def construct(self, after: Tensor) -> Tensor:
        """Write the totals, and return the vector of them, once `after` is computed."""
        vector = ops.depend(ops.concat(map_over(_flat, self.sums)), after)
        total = compiled_sum_over_workers(vector, self.workers)
        map_over(ops.partial(_unpack, total), self.sums, self.starts, self.ends)
        return total


def buckets(sums: Sums, workers: int) -> list[Bucket]:
    """Return `sums` in buckets: neighbours of one working dtype, a large one alone."""
    bucket_list: list[Bucket] = []
    for dtype in (ms.float32, ms.float64):
        small: list[Parameter] = []
        elements = 0
        for total in sums:
            if working_dtype(total.dtype) != dtype:
                continue
            if total.size >= LARGE_ELEMENTS:
                bucket_list.append(Bucket([total], workers))
                continue
            if elements + total.size > BUCKET_ELEMENTS:
                bucket_list.append(Bucket(small, workers))
                small = []
                elements = 0
            small.append(total)
            elements += total.size
        if small:
            bucket_list.append(Bucket(small, workers))
    return bucket_list


def _flat(total: Parameter) -> Tensor:
    return total.astype(working_dtype(total.dtype)).reshape(-1)


def _unpack(vector: Tensor, total: Parameter, start: int, end: int) -> bool:
    write(total, vector[start:end].reshape(total.shape).astype(total.dtype))
    return True
