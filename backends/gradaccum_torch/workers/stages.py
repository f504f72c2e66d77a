"""The stages of a pipeline: one norm, one clip and one decision on overflow for all of
them.

Each stage has its own optimizer, and all count the same micro-batches.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Options, State, explain, missing_worker_error
from gradaccum_torch.workers.checks import require_group, require_same_options


class StageGroup:
    """The stages of `norm_group`."""

    def __init__(
        self, norm_group: object, options: Options, device: torch.device
    ) -> None:
        self.rank, self.stages = require_group(norm_group, "norm_group")
        if not isinstance(norm_group, dist.ProcessGroup):
            raise explain(
                ArgumentTypeError,
                "norm_group",
                expected="the process group of all stages",
                got=norm_group,
                fix="Write for example norm_group=torch.distributed.group.WORLD.",
            )
        if options.on_overflow == "drop_micro_batch":
            raise explain(
                ArgumentValueError,
                "on_overflow",
                expected="a choice of all stages beside norm_group=",
                found="a choice that each stage would make by its own gradients",
                fix="Leave on_overflow out.",
            )
        self.group = norm_group
        self.device = device
        require_same_options(options, norm_group)

    def norm(self, state: State, norm: float, finite: bool) -> tuple[float, bool]:
        """Return the norm of all stages, and whether all are finite; collective.

        Raises:
            UsageError: a stage has other micro-batches, or did not come in time.
        """
        is_finite = finite and not state.overflow
        square = norm**2 if is_finite else 0.0
        weight = state.weight if is_finite else 0.0
        counted = (state.micro_step, weight)
        numbers = torch.tensor(
            [square, not is_finite, *counted, *(number**2 for number in counted)],
            dtype=torch.float64,
            device=self.device,
        )
        try:
            dist.all_reduce(numbers, group=self.group)
        except RuntimeError as error:
            raise missing_worker_error(state, self.rank) from error
        squares, overflows, micro_steps, weights, *second = numbers.tolist()
        if overflows:
            return math.inf, False
        # n times the sum of squares is the square of the sum where all are equal.
        for total, square_total in zip((micro_steps, weights), second, strict=True):
            if not math.isclose(self.stages * square_total, total**2, rel_tol=1e-9):
                raise self._unequal_error(state)
        return math.sqrt(squares), True

    def _unequal_error(self, state: State) -> UsageError:
        return explain(
            UsageError,
            "norm_group",
            expected="the same micro-batches on every stage",
            found=f"{state.micro_step} of weight {state.weight:g} here, and others on"
            " another stage",
            fix="Give each stage the same weights and steps. The window cannot be"
            " closed: call opt.discard() on every stage.",
        )
