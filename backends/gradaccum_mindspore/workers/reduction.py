"""The sums of a window, replaced by their totals over all workers, in place and in one order.

Small sums travel packed together, as a message has a price of its own; a large one travels alone. One message leaves when the one before
has arrived: so no more than one packed copy lives, and the order is the same on every worker, which the kernels for the CPU match messages
by.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from gradaccum_mindspore.pynative_sums import ARRAYS, array_of
from gradaccum_mindspore.sums import each, working_dtype, write
from gradaccum_mindspore.types import Array, Sums
from gradaccum_mindspore.workers.exchange import added_up, compiled_added_up

BUCKET_ELEMENTS = 25 * 2**18
"""25 MiB of float32, the size of the buckets of `torch.nn.parallel.DistributedDataParallel`."""
LARGE_ELEMENTS = 2**18


class Bucket(nn.Cell):  # type: ignore[misc]
    """Sums of one working dtype that travel as one vector.

    Args:
        sums: these sums.
        workers: the number of all workers.
    """

    def __init__(self, sums: Sequence[Parameter], workers: int) -> None:
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "sums", tuple(sums))  # A Cell would list them as its own.
        self.workers = workers
        sizes = [prod(total.shape) for total in sums]
        self.starts = tuple(sum(sizes[:index]) for index in range(len(sizes)))
        self.ends = tuple(start + size for start, size in zip(self.starts, sizes, strict=True))

    def add_up(self) -> None:
        """Make each sum the total of all workers, from Python."""
        arrays = [_array(each_sum).reshape(-1) for each_sum in self.sums]
        total = added_up(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        for each_sum, start, end in zip(self.sums, self.starts, self.ends, strict=True):
            write(each_sum, Tensor.from_numpy(total[start:end].reshape(each_sum.shape)).astype(each_sum.dtype))

    def construct(self, after: Tensor) -> Tensor:
        """The same in compiled code, once `after` is computed; returns the vector of totals."""
        packed = ops.depend(ops.concat(each(_flat, self.sums)), after)
        total = compiled_added_up(packed, self.workers)
        each(ops.partial(_unpack, total), self.sums, self.starts, self.ends)
        return total


def buckets(sums: Sums, workers: int) -> list[Bucket]:
    """`sums` in buckets: neighbours of one working dtype, a large one alone."""
    made: list[Bucket] = []
    small: list[Parameter] = []
    for dtype in (ms.float32, ms.float64):
        for total in (total for total in sums if working_dtype(total.dtype) == dtype):
            if total.size >= LARGE_ELEMENTS:
                made.append(Bucket([total], workers))
                continue
            if sum(other.size for other in small) + total.size > BUCKET_ELEMENTS:
                made.append(Bucket(small, workers))
                small = []
            small.append(total)
        if small:
            made.append(Bucket(small, workers))
            small = []
    return made


def _array(total: Parameter) -> Array:
    array = array_of(total)
    wide: Array = total.astype(ms.float32).asnumpy() if array is None else array.astype(ARRAYS[working_dtype(total.dtype)], copy=False)
    return wide


def _flat(total: Parameter) -> Tensor:
    return total.astype(working_dtype(total.dtype)).reshape(-1)


def _unpack(packed: Tensor, total: Parameter, start: int, end: int) -> bool:
    write(total, packed[start:end].reshape(total.shape).astype(total.dtype))
    return True
