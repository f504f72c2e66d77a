"""Workers that hold parts of the same parameters (FSDP2, tensor parallel). The engine reduces the gradients; the weight is reduced here.

FSDP2 averages gradients over its workers. The window's sum is then the average of w_i g_i, so its weight is the average too. Workers of
tensor parallelism see the same items: the average of their weights is the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradaccum.kit import Fields, State, joined
from gradaccum_torch.workers.workers import OwnSum, Sums


@final
class ShardGroup(OwnSum):
    """The workers of one device mesh.

    Args:
        mesh: the mesh of the sharded parameters; of all of its dimensions.
    """

    several = True

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor]) -> tuple[Fields, Sums]:
        # After an update that raised this comes again, and changes nothing: the average of averages.
        numbers = torch.tensor([fields.weight, fields.overflow], dtype=torch.float64, device=self._mesh.device_type)
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(numbers, group=self._mesh.get_group(dimension))
        weight, overflows = numbers.tolist()
        return joined(fields, weight / self._mesh.size(), overflows > 0), sums
