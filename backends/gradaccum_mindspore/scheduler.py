"""Gates a scheduler of `mindspore.experimental.optim.lr_scheduler`:
``scheduler.step()`` after each micro-batch moves it once per update.

Where one ``flush()`` closes several windows of several workers, the optimizer moves the
scheduler between these.
"""

from __future__ import annotations

from typing import Any

from mindspore.experimental.optim.lr_scheduler import (
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

SCHEDULERS = (LRScheduler, ReduceLROnPlateau, SequentialLR)


class GatedScheduler:
    """A scheduler that moves only when an update was applied since its last step. Call
    it from Python, not in compiled code.

    Args:
        scheduler: one of `SCHEDULERS`, built on a wrapped optimizer.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._storage = scheduler.optimizer.storage
        self._stepped_at: int = self._storage.optimizer_step.item()
        self._storage.schedulers.add(self)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call ``scheduler.step(...)`` if an update was applied since the last call."""
        before = self._stepped_at
        updates = self._storage.optimizer_step.item()
        self._stepped_at = updates
        if updates > before:
            self._scheduler.step(*args, **kwargs)

    def follow(self) -> None:
        """Move as `step` does. `ReduceLROnPlateau` needs a loss, which the caller alone
        has.
        """
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            self.step()

    def state_loaded(self) -> None:
        self._stepped_at = self._storage.optimizer_step.item()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_scheduler"], name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scheduler!r})"
