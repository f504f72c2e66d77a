"""The messages that workers exchange: a few numbers, and gradient sums packed into
buckets.

Small sums are packed together into one message, and a large sum is sent by itself. A
message is sent only after the previous message has arrived, because MindSpore's CPU
kernels match messages by their order. These kernels can add up only float32 and float16
numbers, and they round float64 numbers to float32 when they gather them. So
half-precision sums are sent as float32, and a float64 number is sent as three float32
numbers whose sum is exactly this number. A number beyond float32's range arrives as
inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum_mindspore.gradient_sum import Sums, map_over, working_dtype, write


def compiled_sum_over_workers(values: Tensor, workers: int) -> Tensor:
    """Return the sum of a float32 or float64 vector over the workers."""
    if values.dtype == ms.float32:
        return ops.AllReduce()(values)
    vectors = gather_exactly(values, workers)
    total = vectors[0]
    for worker in range(1, workers):
        total = total + vectors[worker]
    return total


def gather_exactly(values: Tensor, workers: int) -> Tensor:
    """Return the float64 vectors of all workers as the rows of a matrix, without
    rounding.
    """
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
"""The maximum number of elements in a bucket: 25 MiB of float32, as in
`torch.nn.parallel.DistributedDataParallel`.
"""
LARGE_ELEMENTS = 2**18


class Bucket(nn.Cell):  # type: ignore[misc]
    """Gradient sums that the workers exchange as one vector, in one dtype."""

    def __init__(self, sums: Sequence[Parameter], workers: int) -> None:
        super().__init__(auto_prefix=False)
        # With a plain assignment, the Cell would register these Parameters as its own.
        object.__setattr__(self, "sums", tuple(sums))
        self.workers = workers
        ends = np.cumsum([total.size for total in sums]).tolist()
        self.starts = (0, *ends[:-1])
        self.ends = tuple(ends)

    def construct(self, after: Tensor) -> Tensor:
        """Replace each gradient sum of this bucket with its total over all workers, and
        return the totals as one vector.

        Messages must be sent one after the other. So the caller passes the totals that
        it received with the previous message as `after`, and this bucket's message is
        sent only when `after` has been computed.
        """
        vector = ops.depend(ops.concat(map_over(_flat, self.sums)), after)
        total = compiled_sum_over_workers(vector, self.workers)
        map_over(ops.partial(_unpack, total), self.sums, self.starts, self.ends)
        return total


def buckets(sums: Sums, workers: int) -> list[Bucket]:
    """Return `sums` grouped into buckets. Small sums that are sent in the same dtype
    share a bucket, and each large sum has its own bucket.
    """
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
