"""The gathering of the workers' items."""

from __future__ import annotations

import os
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from gradaccum import UsageError
from gradaccum.kit import explain


def workers_here() -> int:
    if GlobalComm.INITED:
        return int(get_group_size())
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def require_communication(argument: str) -> None:
    """Raise unless communication is initialised: MindSpore would take this process for
    the only one.
    """
    if not GlobalComm.INITED:
        raise explain(
            UsageError,
            argument,
            expected="communication that is initialised",
            found="none in this process",
            fix="Call mindspore.communication.init() first.",
        )


class GatherItems(nn.Cell):  # type: ignore[misc]
    """Gathers the items of all workers, by rank, along axis 0. Collective: every worker
    calls it, with equal shapes.

    The gradient of a worker's items is the sum over the workers. Make it once, as a
    part of the network: for PyNative, `mindspore.jit` and graph mode. MindSpore's
    `ops.AllGather` has no gradient on a CPU.

    Inputs: x: shape ``(items, ...)``, any floating dtype, or an integer dtype, which
        has no gradient. A float64 number beyond float32's range
            arrives as an inf, one below it as 0.

    Outputs:
        Shape ``(workers * items, ...)``, the dtype of `x`.

    Raises:
        UsageError: communication is not initialised where there are several workers.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.rank = 0
        self.workers = 1
        if workers_here() > 1:
            require_communication("GatherItems")
            self.rank = int(get_rank())
            self.workers = int(get_group_size())
            self.gather = ops.AllGather()
            self.add_up = ops.AllReduce()

    def construct(self, x: Tensor) -> Tensor:
        if self.workers == 1:
            return x
        if x.dtype == ms.float64:
            return gather_exactly(self.gather, x, self.workers).reshape(
                (-1, *x.shape[1:])
            )
        if x.dtype == ms.bfloat16:  # A CPU does not gather it.
            return self.gather(x.astype(ms.float32)).astype(ms.bfloat16)
        return self.gather(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        if self.workers == 1:
            return (dout,)
        items = x.shape[0]
        mine = slice(self.rank * items, (self.rank + 1) * items)
        if x.dtype == ms.float64:
            return (
                gather_exactly(self.gather, dout, self.workers)[:, mine].sum(axis=0),
            )
        return (self.add_up(dout.astype(ms.float32))[mine].astype(x.dtype),)


def gather_exactly(
    gather: Callable[[Tensor], Tensor], mine: Tensor, workers: int
) -> Tensor:
    """Return a float64 tensor of each worker, shape ``(workers, *shape)``.

    The CPU gathers float64 rounded to float32, so each number travels as a sum of three
    of float32, which is exact; one beyond float32's range arrives as an inf, one below
    it as 0.
    """
    high = mine.astype(ms.float32)
    rest = ops.where(ops.isfinite(high), mine - high.astype(ms.float64), 0.0)
    middle = rest.astype(ms.float32)
    low = (rest - middle.astype(ms.float64)).astype(ms.float32)
    parts = (
        gather(ops.stack((high, middle, low)))
        .astype(ms.float64)
        .reshape((workers, 3, *mine.shape))
    )
    return parts[:, 0] + parts[:, 1] + parts[:, 2]
