"""The stages of a pipeline: one norm, one clip and one decision on overflow for all of
them.

Each stage has its own optimizer, and all count the same micro-batches.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from gradaccum.kit import Options, State
from gradaccum_torch.workers.checks import require_same_options
from gradaccum_torch.workers.interface import add_numbers


class StageGroup:
    """The stages of `group`."""

    def __init__(
        self, group: dist.ProcessGroup, options: Options, device: torch.device
    ) -> None:
        self.group = group
        self.device = device
        require_same_options(options, group)

    def norm(self, state: State, norm: float, finite: bool) -> tuple[float, bool]:
        """Return the norm of all stages, and whether all are finite; collective.

        Raises:
            UsageError: a stage did not come in time.
        """
        numbers = [norm**2, 0.0]
        if state.overflow or not finite:
            numbers = [0.0, 1.0]
        square, overflows = add_numbers(numbers, [self.group], self.device, state)
        if overflows:
            return math.inf, False
        return math.sqrt(square), True
