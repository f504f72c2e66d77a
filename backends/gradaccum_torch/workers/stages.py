"""The stages of a pipeline: one norm, one clip and one decision on overflow for all of
them.

Each stage has its own optimizer, and all count the same micro-batches.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from gradaccum import UsageError
from gradaccum.kit import Options, State, explain
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
            UsageError: a stage has other micro-batches, or did not come in time.
        """
        is_finite = finite and not state.overflow
        numbers = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        if is_finite:
            count = state.micro_step
            weight = state.weight
            numbers = [norm**2, 0.0, count, weight, count**2, weight**2]
        sums = add_numbers(numbers, [self.group], self.device, state)
        squares, overflows, count, weight, count_squares, weight_squares = sums
        if overflows:
            return math.inf, False
        # n times the sum of squares is the square of the sum where all are equal.
        stages = dist.get_world_size(self.group)
        for total, square_total in ((count, count_squares), (weight, weight_squares)):
            if not math.isclose(stages * square_total, total**2, rel_tol=1e-9):
                raise unequal_stages_error(state)
        return math.sqrt(squares), True


def unequal_stages_error(state: State) -> UsageError:
    return explain(
        UsageError,
        "norm_group",
        expected="the same micro-batches on every stage",
        found=f"{state.micro_step} of weight {state.weight:g} here, and others on"
        " another stage",
        fix="Give each stage the same weights and steps, after opt.discard() on every"
        " stage.",
    )
