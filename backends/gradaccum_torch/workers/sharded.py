"""Workers that hold parts of the same parameters (FSDP2, tensor parallel): the engine reduces gradients, the window's weight is left.

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

from gradaccum.kit import State
from gradaccum_torch.workers.workers import Sums, Workers


@final
class ShardGroup(Workers):
    """The workers of one device mesh.

    Args:
        mesh: the mesh of the sharded parameters; of all of its dimensions.
    """

    several, not_own, joined = True, False, True

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor]) -> tuple[State, Sums]:
        # Again after an update that raised it changes nothing: the average of averages.
        numbers = torch.tensor([fields.weight, fields.overflow], dtype=torch.float64, device=self._mesh.device_type)
        for dimension in range(self._mesh.ndim):
            dist.all_reduce(numbers, group=self._mesh.get_group(dimension))
        weight, overflows = numbers.tolist()
        return fields._replace(weight=weight / self._mesh.size(), overflow=overflows > 0), sums

    def flush(self, close: Callable[[], None], is_open: bool) -> None:
        if is_open:
            close()

    def window_ended(self) -> None: ...

    def require_own_sum(self, call: str) -> None: ...

    def require_no_closure(self) -> None: ...

    def require_no_copy(self) -> None: ...
