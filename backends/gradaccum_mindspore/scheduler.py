"""A wrapper for the learning-rate schedulers of
`mindspore.experimental.optim.lr_scheduler`. You can call the wrapped scheduler after
each micro-batch, but it steps only once per update.

If several workers share windows, one ``flush()`` may close several windows. In this
case the optimizer steps the scheduler between these windows.
"""

from __future__ import annotations

from typing import Any

from mindspore.experimental.optim.lr_scheduler import (
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from gradaccum.kit import unwrapped_optimizer_error
from gradaccum_mindspore.optimizer import AccumulatingOptimizer

SCHEDULERS = (LRScheduler, ReduceLROnPlateau, SequentialLR)


class GatedScheduler:
    """A learning-rate scheduler that steps only if an update has been applied since its
    last step. Call it from Python, not in compiled code.

    Args:
        scheduler: a scheduler from `mindspore.experimental.optim.lr_scheduler` that was
            created with a wrapped optimizer.

    Raises:
        ArgumentTypeError: the scheduler's optimizer is not wrapped.
    """

    def __init__(self, scheduler: Any) -> None:
        optimizer = scheduler.optimizer
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise unwrapped_optimizer_error(optimizer)
        self._scheduler = scheduler
        self._storage = optimizer.storage
        self._stepped_at: int = self._storage.optimizer_step.item()
        self._storage.schedulers.add(self)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call ``scheduler.step(...)`` if an update was applied since the last call of
        this method.

        If several updates were applied, the scheduler steps only once. After
        ``flush()``, call this method before the next micro-batch, which may close
        another window.
        """
        before = self._stepped_at
        updates = self._storage.optimizer_step.item()
        self._stepped_at = updates
        if updates > before:
            self._scheduler.step(*args, **kwargs)

    def follow(self) -> None:
        """Step the scheduler as `step` does, unless it is a `ReduceLROnPlateau`: such a
        scheduler needs a loss that only the user knows.
        """
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            self.step()

    def state_loaded(self) -> None:
        self._stepped_at = self._storage.optimizer_step.item()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_scheduler"], name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scheduler!r})"
