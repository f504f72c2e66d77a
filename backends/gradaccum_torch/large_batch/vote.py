"""How the workers of a process group choose one size of micro-batch: after each attempt all of them say how it went.

An attempt that succeeded here counts for nothing if another worker ran out of memory: all start over with the smallest size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.optimizer import AccumulatingOptimizer

_FITS, _SHORT, _RAISED = range(3)


class ElsewhereShortError(Exception):
    """Another worker ran out of memory. The window puts everything back on its way, as after an error of its own.

    Args:
        size: that all go on with; 0: none is left.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"another worker ran out of memory; all go on with micro-batches of {size} items")
        self.size = size


class Vote:
    """One vote for each attempt; this process alone agrees with itself at once."""

    def __init__(self, workers: dist.ProcessGroup | None) -> None:
        self._workers = workers
        self._size = 0
        self.cast = False
        """This worker has voted on the attempt under way."""

    def begin(self, size: int) -> None:
        """Another attempt, in micro-batches of `size` items."""
        self._size, self.cast = size, False

    def fits(self) -> None:
        """The attempt of this worker fitted.

        Raises:
            ElsewhereShortError: another's did not.
            UsageError: another's raised.
        """
        outcome, size = self._said(_FITS, self._size)
        if outcome == _RAISED:
            raise other_raised_error()
        if outcome == _SHORT:
            raise ElsewhereShortError(size)

    def short(self, smaller: int) -> int:
        """The attempt of this worker ran out of memory; `smaller` is the size that it could go on with, 0 if there is none.

        Returns:
            The size that all go on with; 0 if one of them has none.

        Raises:
            UsageError: another's raised.
        """
        outcome, size = self._said(_SHORT, smaller)
        if outcome == _RAISED:
            raise other_raised_error()
        return size

    def raised(self) -> None:
        """The attempt of this worker raised. The others hear of it if they can still be reached."""
        if not self.cast:
            try:
                self._said(_RAISED, self._size)
            except RuntimeError:
                return

    def _said(self, outcome: int, size: int) -> tuple[int, int]:
        """The worst outcome and the smallest size of all workers; collective."""
        self.cast = True
        if self._workers is None:
            return outcome, size
        said = torch.tensor([outcome, -size], device=_device(self._workers))
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._workers)
        worst, smallest = said.tolist()
        return int(worst), -int(smallest)


def workers_of_call(optimizer: AccumulatingOptimizer | None) -> dist.ProcessGroup | None:
    """Who chooses together: the workers of the wrapped optimizer's window, or else all of the default process group; None: nobody else."""
    if optimizer is not None and (group := optimizer.whole_window().process_group) is not None:
        return group
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if several else None


def _device(workers: dist.ProcessGroup) -> torch.device:
    """Where the group reduces: NCCL and its like know tensors of their device only."""
    if dist.get_backend(workers) in ("gloo", "mpi") or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(str(torch.accelerator.current_accelerator()), torch.accelerator.current_device_index())


def other_raised_error() -> UsageError:
    """The error on the workers beside one that raised."""
    return explain(
        UsageError,
        "micro_batch_size",
        expected="every worker's window to run",
        found="a worker that raised another error than of its memory",
        fix="See that worker's own error. Nothing of this window was delivered.",
    )
