"""A wrapper for learning-rate schedulers: you call ``scheduler.step()`` after every
micro-batch, and the scheduler steps once per update.

If a ``flush()`` closes several windows, the wrapper also steps the scheduler between
these windows. For a timm scheduler, the wrapper passes the number of updates to the
scheduler's ``step_update`` method. The scheduler's ``step`` method, whose argument is
an epoch, works as before.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import torch

from gradaccum import ArgumentTypeError
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import note_step_called

Scheduler = Any
"""A learning-rate scheduler: an object with a ``step`` method or timm's
``step_update``, and with an ``optimizer`` attribute.
"""

_GATE_NAMES = frozenset({"_scheduler", "_updates", "_has_loaded"})
_ANY = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
_STEPPED_AT = "gradaccum_optimizer_step"
_REPLAYED = (
    "gradaccum: scheduler.step() did nothing, because no update was applied since"
    " optimizer.load_state_dict(), and the scheduler has never stepped. To resume the"
    " scheduler, save scheduler.state_dict() too, and call"
    " scheduler.load_state_dict(saved)."
)


def is_scheduler(candidate: object) -> bool:
    """True if `candidate` is one of torch's schedulers. Also true for any other object
    that has a ``step`` or ``step_update`` method, and an ``optimizer`` attribute that
    contains a torch optimizer. An object with a ``zero_grad`` method does not count,
    because such an object is itself an optimizer.
    """
    if isinstance(candidate, torch.optim.lr_scheduler.LRScheduler):
        return True
    optimizer = getattr(candidate, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    has_step = hasattr(candidate, "step") or hasattr(candidate, "step_update")
    return has_step and not hasattr(candidate, "zero_grad")


class GatedScheduler(torch.optim.lr_scheduler.LRScheduler):
    """A learning-rate scheduler that steps only if the optimizer has applied an update
    since the scheduler's last step.

    Args:
        scheduler: a scheduler that was created for a wrapped optimizer. It needs a
            ``step`` method that works like the ``step`` of an `LRScheduler`, or timm's
            ``step_update``.

    Raises:
        ArgumentTypeError: the scheduler's optimizer is not wrapped.
    """

    _scheduler: Scheduler
    _updates: int
    """The number of updates that the optimizer had applied when the scheduler last
    stepped.
    """
    _has_loaded: bool
    """Whether the scheduler has loaded a state and has not stepped since then. If the
    optimizer now loads a state too, the two states belong together.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise ArgumentTypeError(
                "scheduler: expected a scheduler that was created for a wrapped"
                " optimizer; got a scheduler that was created for"
                f" {type(optimizer).__name__}. Wrap the optimizer first:"
                " opt = gradaccum.wrap(optimizer, steps=4); scheduler = StepLR(opt,"
                " 10)."
            )
        self._scheduler = scheduler
        self._updates = optimizer._window.updates
        self._has_loaded = False
        optimizer._window.schedulers.add(self)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call the scheduler's ``step(*args, **kwargs)`` if the optimizer has applied
        an update since the last call of this method. A timm scheduler's ``step`` is
        always called, because its argument is an epoch.
        """
        updates = self._optimizer_updates()
        window = self._scheduler.optimizer._window
        if hasattr(self._scheduler, "step_update") or updates > self._updates:
            # torch warns if a scheduler steps before its optimizer. Prevent this
            # warning, because the optimizer may have made its steps in another process,
            # before a checkpoint was loaded.
            note_step_called(self._scheduler.optimizer)
            self._scheduler.step(*args, **kwargs)
            window.changed_rate_warning.allow_change()
        elif window.has_just_loaded and updates and self._is_at_beginning():
            window.warn(_REPLAYED)
        self._updates = updates
        self._has_loaded = False

    def follow(self) -> None:
        """Step the scheduler, unless its ``step`` method needs an argument, such as a
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
        """Called after the optimizer has loaded a state. From now on, step only for
        updates that are applied after this load. If the scheduler itself has just
        loaded a state, change nothing, because the scheduler's state already says for
        which updates the scheduler has stepped.
        """
        if not self._has_loaded:
            self._updates = self._optimizer_updates()

    def _step_update(
        self, num_updates: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """If the optimizer has applied any update, call the scheduler's ``step_update``
        with the number of updates.
        """
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
        """Return the scheduler's ``state_dict``, plus the number of updates that the
        optimizer had applied when the scheduler last stepped.
        """
        return {**self._scheduler.state_dict(), _STEPPED_AT: self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state. If a scheduler that is not wrapped saved the state,
        the state does not say for how many updates that scheduler has stepped. In this
        case, assume that it has stepped for every update that this scheduler's
        optimizer has applied so far.
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
