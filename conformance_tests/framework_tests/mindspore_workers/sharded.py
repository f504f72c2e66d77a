"""A parameter that all workers share beside a head whose classes they share out: one
norm, one overflow flag, and files of their own.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import gradaccum
from gradaccum_mindspore import load_checkpoint_into, redistributed

from ..mindspore_common import Descent, entries_of, set_mode
from ..refusing import refused
from .checks import check
from .common import WORLD, require_same_everywhere
from .refusals import files

CLASSES = (5, 3)
"""Of each worker."""


def optimizer_of(rank: int, dtype: Any = ms.float32, **options: Any) -> Any:
    backbone = Parameter(Tensor(np.ones(2), dtype), name="backbone")
    head = Parameter(Tensor(np.ones(CLASSES[rank]), dtype), name="head")
    head.layerwise_parallel = True
    given = {"steps": 2, "reduction": "sum_per_item", **options}
    return gradaccum.wrap(nn.SGD([backbone, head], 1.0), data_parallel=True, **given)


def learn(opt: Any, of_backbone: float, of_head: float) -> None:
    """A micro-batch of three items on each worker, whose losses are 24 on both."""
    gradients = [
        Tensor(np.full(parameter.shape, value), parameter.dtype)
        for parameter, value in zip(opt.parameters, (of_backbone, of_head), strict=True)
    ]
    opt(tuple(gradients), Tensor(3.0, ms.float32), Tensor(24.0, ms.float32))


@check
def sharded_head_makes_the_large_batch(rank: int) -> None:
    """Of twelve items. The second window has an inf in the gradient of one worker's
    classes: all skip it.
    """
    for mode in ("pynative", "graph"):
        set_mode(mode)
        scale = gradaccum.DynamicLossScale(8.0, growth_interval=1)
        opt = optimizer_of(rank, loss_scale=scale, clip_norm=np.sqrt(50.0) / 2)
        opt.scale(Tensor(1.0))  # the gradients are those of a scaled loss
        for _ in range(2):
            learn(opt, 8.0 * 6.0 * (1 + rank), 8.0 * 12.0)
        found = [parameter.asnumpy()[0] for parameter in opt.parameters]
        # two numbers of 2 * (6 + 12) / 12, and eight of 2 * 12 / 12
        np.testing.assert_allclose(
            [*found, opt.result.grad_norm, opt.result.loss, opt.result.loss_scale],
            [1 - 3 / 2, 1 - 2 / 2, np.sqrt(50.0), 4.0, 16.0],
            rtol=1e-6,
            atol=1e-6,
        )
        for _ in range(2):
            learn(opt, 1.0, np.inf if rank == 1 else 1.0)
        assert (opt.result.overflow, opt.result.applied) == (True, False)
        assert opt.result.loss_scale == 8.0
        assert [parameter.asnumpy()[0] for parameter in opt.parameters] == found
        require_same_everywhere(opt.result)
    set_mode("pynative")


@check
def shard_beyond_float16_is_an_overflow_of_all(rank: int) -> None:
    """float32 holds its sum, 120000, on one worker."""
    opt = optimizer_of(rank, ms.float16, reduction="sum")
    for _ in range(2):
        learn(opt, 1.0, 6e4 if rank == 1 else 1.0)
    assert opt.result.overflow


@check
def sharded_head_loads_its_own_file(rank: int) -> None:
    """Between two windows too: each worker has other classes."""
    opt = optimizer_of(rank)
    saved = entries_of(opt)
    load_checkpoint_into(opt, saved)
    saved["gradaccum.workers"] = Tensor([1 - rank, WORLD], ms.int32)
    with refused(gradaccum.CheckpointError, f"by rank {1 - rank} of 2"):
        load_checkpoint_into(opt, saved)


@check
def sharded_head_is_not_redistributed(rank: int) -> None:
    opt = optimizer_of(rank)
    learn(opt, 1.0, 1.0)
    states = files(rank, opt)
    with refused(gradaccum.CheckpointError, "head", "its own file"):
        redistributed(states, 1)


@check
def sharded_head_is_refused(rank: int) -> None:
    for name, value in (("reduction", "mean"), ("on_overflow", "drop_micro_batch")):
        with refused(gradaccum.ArgumentValueError, f"{name}: ", "layerwise_parallel"):
            optimizer_of(rank, **{name: value})


@check
def float64_sums_are_exact(rank: int) -> None:
    """Numbers that float32 does not hold."""
    values = np.random.RandomState(5).randn(WORLD, 3)
    parameter = Parameter(Tensor(np.zeros(3)), name="p")
    opt = gradaccum.wrap(Descent(1.0, [parameter]), steps=1, data_parallel=True)
    opt((Tensor(values[rank]),))
    np.testing.assert_array_equal(parameter.asnumpy(), -values.sum(0) / WORLD)
