"""The workers that a window is added up over, as the window asks them.

A window knows this interface alone; `gradaccum_torch.workers.workers` finds the workers of an optimizer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError
from gradaccum.kit import Fields, State, explain
from gradaccum_torch.private import is_in_join

if TYPE_CHECKING:
    from gradaccum_torch.parameters import Parameters
    from gradaccum_torch.strategy import Strategy

Sums = Sequence[Tensor | None]
"""Sums by position, None where there is none."""


class Joined(NamedTuple):
    """A window that several workers share, as all of them have it."""

    fields: Fields
    sums: Sums
    numbers: Sequence[float]
    """Of all; this worker's own where they were added up before."""


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group; waits for the device where one is there."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


STATE_DICT = "torch.distributed.checkpoint.state_dict"


class Shares(NamedTuple):
    """What each worker has in an open window, so that other workers can go on with it."""

    weights: list[float]
    """By worker."""
    workers: int
    """Those of them that have different items."""
    divisors: list[float]
    """By what the sum over the workers is divided, by the position of the parameter."""
    overflow: bool
    """Any worker's flag."""
    losses: list[float] = []  # noqa: RUF012
    """The sum of the losses, by worker; empty where nobody saved it."""

    def weight_of(self, index: int, size: int, workers: int) -> float:
        """The weight with which worker `index` goes on, of `size`, of which `workers` have different items.

        Each gets its own back. Among another number of them the first gets the weight of all.
        """
        return self._part_of(self.weights, index, size, workers)

    def loss_of(self, index: int, size: int, workers: int) -> float:
        """The sum of the losses with which it goes on, in the same way."""
        return self._part_of(self.losses, index, size, workers) if self.losses else math.nan

    def _part_of(self, values: list[float], index: int, size: int, workers: int) -> float:
        if (size, workers) == (len(values), self.workers):
            return values[index]
        total = sum(values) / len(values) * self.workers
        return 0.0 if index else total * size / workers


class Workers(ABC):
    """The workers that share a window, as it asks them."""

    several: bool
    """There are others, so that a window's end must `join` them."""
    not_own: bool
    """The open window's sum is not this worker's own; see `require_own_sum`."""
    joined: bool
    """After `join`: the window holds a micro-batch."""
    place: tuple[int, int] | None = None
    """The rank of this worker and their number, which its part of a saved sum belongs to; None: any worker can load any part."""
    group: dist.ProcessGroup | None = None
    """The process group that they make; None: this worker is alone, or a mesh of several groups shares its parameters."""
    keeps_sum = False
    """The workers' engine keeps the sum until the window ends; see `strategy`."""

    @abstractmethod
    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor], numbers: Sequence[float]) -> Joined:
        """Add up the window of all workers; collective. Nothing is added twice where the update of a joined window raised.

        Returns:
            The state with the weight and the overflow flag of all, the sums, None where no worker has one, and the numbers of all.
        """

    def strategy(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> Strategy:
        """The place of the sum that the engine keeps; only with `keeps_sum`."""
        raise NotImplementedError

    def require_one_weight(self, fields: State) -> None:  # noqa: B027
        """Raise `UsageError` where other workers, which nothing joins, need the weight of this one's window; collective there."""

    @abstractmethod
    def flush(self, close: Callable[[], None], between: Callable[[], None], is_open: bool) -> None:
        """Close the open window by `close`, and with others as many more as they have."""

    @abstractmethod
    def window_ended(self) -> None:
        """The next window begins, with this worker's own sum."""

    @abstractmethod
    def require_own_sum(self, call: str) -> None:
        """The sum is this worker's own."""

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:  # noqa: B027
        """Raise `ArgumentValueError` unless each of `parameters`, new ones of the optimizer, is one that the workers share."""

    def taking_part(self) -> AbstractContextManager[None] | None:
        """Where other workers wait in their backward pass for that of a micro-batch of weight 0: inside, it delivers zeros, and no NaN."""
        return None

    def require_no_graph(self) -> None:
        """Raise `UsageError` where gradients that are to be differentiated again would lose their graph."""
        fix = "Leave create_graph= out; second derivatives over several workers are not supported."
        found = "gradients with a graph, which a reduction does not have"
        raise explain(UsageError, "create_graph", expected="False where several workers reduce gradients", found=found, fix=fix)

    def shares(self, fields: State, loss: float) -> Shares:
        """What all workers have in the open window; collective. `loss`: the sum of this worker's."""
        fix = "Save opt.state_dict() on each worker; gradaccum_torch.redistributed gives it to another number of workers."
        found = "an open window, of which each worker has a sum of its own"
        raise explain(UsageError, STATE_DICT, expected="to be called between two windows", found=found, fix=fix)

    def own(self, shares: Shares) -> tuple[float, float, list[float]]:
        """The weight and the sum of the losses with which this worker goes on, and by what to multiply each sum."""
        fix = "Load it with fully_shard, or what each worker saved by opt.state_dict()."
        found = "a state whose window is open, which no worker of these has alone"
        raise explain(UsageError, STATE_DICT, expected="a state that was saved between two windows", found=found, fix=fix)

    @abstractmethod
    def require_no_copy(self) -> None:
        """Raise `UsageError` where a copy of the optimizer would have no part in the others' reductions."""


class OwnSum(Workers):
    """Workers that need no reduction of the sum: this one closes, saves and copies its window by itself."""

    not_own, joined = False, True

    def flush(self, close: Callable[[], None], between: Callable[[], None], is_open: bool) -> None:
        if is_open:
            close()

    def window_ended(self) -> None: ...

    def require_own_sum(self, call: str) -> None: ...

    def require_no_copy(self) -> None: ...


def require_no_join(module: DistributedDataParallel) -> None:
    """The loop does not run under ``module.join()``, which answers collectives of the module alone."""
    if is_in_join(module):
        fix = "Leave join() out, and write gradaccum.wrap(optimizer, ..., module=parallel): opt.flush() takes part in the others' windows."
        raise explain(UsageError, "join", expected="a loop without DistributedDataParallel.join()", found="one under it", fix=fix)
