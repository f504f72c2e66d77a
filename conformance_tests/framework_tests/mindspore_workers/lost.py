"""One of three workers is killed; the others save what they hold of the window, and a
job of one resumes with that.

``lost.py in_mid_window``: three processes without an msrun, which would end the
survivors within a second. They can form a group, but MindSpore ends them a minute
later, as its scheduler gives the job up, unless MS_NODE_TIMEOUT is long. So they save.
``lost.py alone`` resumes. The numbers are such that every sum is exact.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import create_group, get_rank, init

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_mindspore import (
    AccumulatingOptimizer,
    load_checkpoint_into,
    redistributed,
)

WORKERS, SIZES = 3, (3, 2**18)
"""The second parameter's sum is a message of its own."""


def build(data_parallel: bool = True) -> AccumulatingOptimizer:
    parameters = [
        Parameter(Tensor(np.full(size, 8.0), ms.float32), name=f"p{size}")
        for size in SIZES
    ]
    return gradaccum.wrap(
        nn.SGD(parameters, 1.0), steps=None, data_parallel=data_parallel
    )


def learn(optimizer: AccumulatingOptimizer, value: float, weight: int) -> None:
    optimizer(
        tuple(
            Tensor(np.full(parameter.shape, value), ms.float32)
            for parameter in optimizer.parameters
        ),
        weight,
    )


def values(optimizer: AccumulatingOptimizer) -> list[float]:
    assert all(
        (parameter.asnumpy() == parameter.asnumpy()[0]).all()
        for parameter in optimizer.parameters
    )
    return [float(parameter.asnumpy()[0]) for parameter in optimizer.parameters]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int) -> None:
    """A window of weight 6 closes on all, with a mean of 1. In the next one the last
    worker dies.
    """
    optimizer = build()
    learn(optimizer, 1.0, 1 + rank)
    optimizer.flush()
    assert values(optimizer) == [7.0, 7.0]
    learn(optimizer, 1.0 + rank, 1)
    if rank == WORKERS - 1:
        die()
    learn(optimizer, 4.0, 1 + rank)
    with refused(RuntimeError):
        optimizer.flush()
    assert (optimizer.result.micro_step, values(optimizer)) == (2, [7.0, 7.0])
    assert [float(total.asnumpy()[0]) for total in optimizer.storage.sums] == [
        1.0 + rank + 4.0 * (1 + rank)
    ] * 2
    ms.save_checkpoint(optimizer, f"held-{rank}.new")
    Path(f"held-{rank}.new.ckpt").rename(f"held-{rank}.ckpt")
    create_group("survivors", list(range(WORKERS - 1)))
    assert ops.AllReduce(group="survivors")(
        Tensor([1.0 + rank], ms.float32)
    ).asnumpy().tolist() == [3.0]


def alone() -> None:
    """The survivors' sums are 5 and 10, of weights 2 and 3."""
    optimizer = build(data_parallel=False)
    states = [ms.load_checkpoint(f"held-{rank}.ckpt") for rank in range(WORKERS - 1)]
    with refused(gradaccum.CheckpointError, "rank 1 of 3", "None"):
        redistributed(states, 1)
    load_checkpoint_into(optimizer, redistributed([*states, None], 1)[0])
    assert (optimizer.result.micro_step, optimizer.storage.weight.item()) == (2, 5.0)
    learn(optimizer, 3.0, 1)
    optimizer.flush()
    assert values(optimizer) == [7.0 - (5.0 + 10.0 + 3.0) / 6] * 2


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        alone()
    else:
        init()
        killed(get_rank())
