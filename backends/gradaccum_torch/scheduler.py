"""A gate for learning-rate schedulers: you call ``scheduler.step()`` after every
micro-batch, and the scheduler steps once per update.

If a ``flush()`` closes several windows, the gate steps the scheduler between them. A
timm scheduler gets the number of updates through its ``step_update``; its ``step``,
whose argument is an epoch, is left as it is.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import torch

from gradaccum import ArgumentTypeError
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import note_step_called

Scheduler = Any
"""An object with a ``step``, or with timm's ``step_update``, whose ``optimizer``
attribute is the optimizer that it schedules.
"""

_GATE_NAMES = frozenset({"_scheduler", "_updates", "_has_loaded"})
_ANY = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
_STEPPED_AT = "gradaccum_optimizer_step"
_REPLAYED = (
    "gradaccum: scheduler.step() did nothing, because no update was made since"
    " optimizer.load_state_dict(), and the scheduler is still at its beginning. To"
    " resume it, save scheduler.state_dict() too, and call"
    " scheduler.load_state_dict(saved)."
)


def is_scheduler(candidate: object) -> bool:
    """True if `candidate` is one of torch's schedulers, or has an optimizer and a
    ``step`` and is not itself an optimizer.
    """
    if isinstance(candidate, torch.optim.lr_scheduler.LRScheduler):
        return True
    optimizer = getattr(candidate, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    has_step = hasattr(candidate, "step") or hasattr(candidate, "step_update")
    return has_step and not hasattr(candidate, "zero_grad")


class GatedScheduler(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that steps only when an update was applied since its last step.

    Args:
        scheduler: a scheduler built on a wrapped optimizer, with the ``step`` of an
            `LRScheduler` or with timm's ``step_update``.

    Raises:
        ArgumentTypeError: the scheduler's optimizer is not wrapped.
    """

    _scheduler: Scheduler
    _updates: int
    """The number of updates when the scheduler last stepped."""
    _has_loaded: bool
    """Whether the gate itself has loaded a state. If the optimizer loads its state
    after that, the two states belong together.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise ArgumentTypeError(
                "scheduler: expected a scheduler built on a wrapped optimizer; got a"
                f" scheduler on {type(optimizer).__name__}. Wrap the optimizer first:"
                " opt = gradaccum.wrap(optimizer, steps=4); scheduler = StepLR(opt,"
                " 10)."
            )
        self._scheduler = scheduler
        self._updates = optimizer._window.updates
        self._has_loaded = False
        optimizer._window.schedulers.add(self)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call ``scheduler.step(...)`` with the given arguments if an update was
        applied since the last call.
        """
        updates = self._optimizer_updates()
        window = self._scheduler.optimizer._window
        if hasattr(self._scheduler, "step_update") or updates > self._updates:
            # torch warns if it has not seen the optimizer's step, and it cannot have
            # seen an update from before a checkpoint.
            note_step_called(self._scheduler.optimizer)
            self._scheduler.step(*args, **kwargs)
            window.changed_rate_warning.allow_change()
        elif window.has_just_loaded and updates and self._is_at_beginning():
            window.warn(_REPLAYED)
        self._updates = updates
        self._has_loaded = False

    def follow(self) -> None:
        """Step as `step` does, unless ``scheduler.step`` needs an argument, such as a
        loss.
        """
        if hasattr(self._scheduler, "step_update"):
            self._step_update()
            return
        parameters = signature(self._scheduler.step).parameters.values()
        if all(
            each.default is not each.empty or each.kind in _ANY for each in parameters
        ):
            self.step()

    def optimizer_loaded(self) -> None:
        """Treat the updates as followed if only the optimizer has loaded a state."""
        if not self._has_loaded:
            self._updates = self._optimizer_updates()

    def _step_update(
        self, num_updates: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the scheduler's ``step_update`` with the number of applied updates."""
        updates = self._optimizer_updates()
        self._scheduler.optimizer._window.changed_rate_warning.allow_change()
        if updates:
            return self._scheduler.step_update(updates, *args, **kwargs)
        return None

    def get_last_lr(self) -> list[Any]:
        return list(self._scheduler.get_last_lr())

    def get_lr(self) -> list[Any]:
        return list(self._scheduler.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's ``state_dict``, with the number of updates when it
        last stepped.
        """
        return {**self._scheduler.state_dict(), _STEPPED_AT: self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state. The state of a scheduler that is not gated is taken to
        be up to date with the last update.
        """
        state_dict = dict(state_dict)
        self._updates = state_dict.pop(_STEPPED_AT, self._optimizer_updates())
        self._has_loaded = True
        self._scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in _GATE_NAMES:
            raise AttributeError(name)
        if name == "step_update" and hasattr(self._scheduler, name):
            return self._step_update
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _GATE_NAMES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._scheduler, name, value)

    def _is_at_beginning(self) -> bool:
        last_epoch = getattr(self._scheduler, "last_epoch", None)
        return last_epoch == 0 and not self._has_loaded

    def _optimizer_updates(self) -> int:
        return int(self._scheduler.optimizer._window.updates)
