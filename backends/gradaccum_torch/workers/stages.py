"""The stages of a pipeline: one norm, one clip and one decision on overflow for all of
them, and the sums of tied parameters.

Each stage has its own optimizer, and all count the same micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import (
    Options,
    State,
    explain,
    missing_worker_error,
    update_due_error,
)
from gradaccum_torch.private.names import is_sharded
from gradaccum_torch.sums.arithmetic import measure
from gradaccum_torch.workers.group import require_group, require_same_options
from gradaccum_torch.workers.interface import Sums


class Progress(NamedTuple):
    """The collectives that a window's end has made."""

    added: bool
    """The tied sums are those of all stages."""
    agreed: tuple[float, bool] | None
    """The norm of all stages, and whether all are finite."""


class StageGroup:
    """The stages of `norm_group`, and the groups of ranks that hold copies of a tied
    parameter.
    """

    def __init__(
        self,
        norm_group: object,
        tied: object,
        parameters: Sequence[Tensor],
        options: Options,
    ) -> None:
        self._rank, self._stages = require_group(norm_group, "norm_group")
        if not isinstance(norm_group, dist.ProcessGroup):
            fix = (
                "Write norm_group= the process group of all stages, such as"
                " torch.distributed.group.WORLD."
            )
            raise explain(
                ArgumentTypeError,
                "norm_group",
                expected="a process group beside tied=",
                got=norm_group,
                fix=fix,
            )
        if options.on_overflow == "drop_micro_batch":
            raise explain(
                ArgumentValueError,
                "on_overflow",
                expected="a choice of all stages beside norm_group=",
                found="a choice that each stage would make by its own gradients",
                fix="Leave on_overflow out.",
            )
        self._group, self._device = norm_group, parameters[0].device
        self._tied = [
            (group, _places(each, parameters)) for group, each in _require_tied(tied)
        ]
        self.window_ended()
        require_same_options(options, norm_group)

    def window_ended(self) -> None:
        """Begin the next window; within one, a repeated update makes no second
        collective.
        """
        self._now = Progress(added=False, agreed=None)

    @torch.no_grad()
    def add_tied(
        self, fields: State, sums: Sums, zeros: Callable[[int], Tensor]
    ) -> Sums:
        """Return `sums` with the tied ones added up over their stages; collective, and
        at most once per window.
        """
        if self._now.added or not self._tied:
            return sums
        made = list(sums)
        try:
            for group, places in self._tied:
                for place in places:
                    own = sums[place]
                    made[place] = (
                        zeros(place) if own is None else own.to_dense().clone()
                    )
                    dist.all_reduce(made[place], group=group)
        except RuntimeError as error:
            raise missing_worker_error(fields, self._rank) from error
        self._now = Progress(added=True, agreed=None)
        return made

    def agreed(
        self, fields: State, sums: Sums, norm: float, finite: bool
    ) -> tuple[float, bool]:
        """Return the norm of all stages, each tied parameter once, and whether all are
        finite; collective.
        """
        agreed = (
            self._gathered(fields, sums, norm, finite)
            if self._now.agreed is None
            else self._now.agreed
        )
        self._now = self._now._replace(agreed=agreed)
        return agreed

    def _gathered(
        self, fields: State, sums: Sums, norm: float, finite: bool
    ) -> tuple[float, bool]:
        copies = [
            sums[place]
            for group, places in self._tied
            for place in places
            if dist.get_rank(group)
        ]
        twice = (
            measure([each for each in copies if each is not None]).norm
            if copies
            else 0.0
        )
        own = torch.tensor(
            [
                norm,
                twice,
                finite and not fields.overflow,
                fields.weight,
                fields.micro_step,
            ],
            dtype=torch.float64,
        )
        rows = [torch.empty_like(own, device=self._device) for _ in range(self._stages)]
        try:
            dist.all_gather(rows, own.to(self._device), group=self._group)
        except RuntimeError as error:
            raise missing_worker_error(fields, self._rank) from error
        norms, again, all_finite, weights, counts = zip(
            *torch.stack(rows).tolist(), strict=True
        )
        if not all(all_finite):
            return math.inf, False
        if len({*weights}) > 1 or len({*counts}) > 1:
            raise _windows_error(fields, weights, counts)
        largest = max(norms) or 1.0
        return (
            largest
            * math.sqrt(
                math.fsum(
                    (a / largest) ** 2 - (b / largest) ** 2
                    for a, b in zip(norms, again, strict=True)
                )
            ),
            True,
        )

    def require_own_sum(self, call: str) -> None:
        if self._now.added:
            raise update_due_error(call)


def _require_tied(tied: object) -> list[tuple[dist.ProcessGroup, Sequence[Tensor]]]:
    if tied is None:
        return []
    if not isinstance(tied, Mapping):
        fix = "Write tied={torch.distributed.new_group([0, 3]): [embedding.weight]}."
        raise explain(
            ArgumentTypeError,
            "tied",
            expected="a mapping from a process group to its parameters",
            got=tied,
            fix=fix,
        )
    for group in tied:
        require_group(group, "tied")
    return list(tied.items())


def _places(tied: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[int]:
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    if not all(id(each) in places for each in tied) or any(map(is_sharded, tied)):
        fix = (
            "Give each tied parameter, whole, to the optimizer of every stage that"
            " holds a copy."
        )
        raise explain(
            ArgumentValueError,
            "tied",
            expected="whole parameters of this optimizer",
            found="another one",
            fix=fix,
        )
    return [places[id(each)] for each in tied]


def _windows_error(
    fields: State, weights: Sequence[float], counts: Sequence[float]
) -> UsageError:
    spread = (
        f"{min(counts):g} to {max(counts):g} of weight {min(weights):g} to"
        f" {max(weights):g}"
    )
    found = (
        f"{fields.micro_step} of weight {fields.weight:g} here, {spread} on the stages"
    )
    fix = (
        "Give each stage the same weights and steps. The window cannot be closed: call"
        " opt.discard() on every stage."
    )
    return explain(
        UsageError,
        "norm_group",
        expected="the same micro-batches on every stage",
        found=found,
        fix=fix,
    )
