"""Counts the reductions of a window of `DistributedDataParallel` loops: ours, and those
of the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 2
"""Windows after which a module has ordered its buckets, and a wrapper knows the
parameters that take part.
"""


def visible(parallel: DistributedDataParallel) -> None:
    """Make the module's own reductions calls of ``dist.all_reduce``; it is then not to
    be timed.
    """
    parallel.register_comm_hook(None, allreduce_hook)


def reductions(window: Callable[[], object]) -> Mapping[str, float]:
    """The all-reduces of one window, and the bytes that a worker hands to them.
    Collective.
    """
    for _ in range(WARM_UP):
        window()
    sizes: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        window()
    finally:
        dist.all_reduce = original
    return {"reductions": len(sizes), "bytes": sum(sizes)}
