"""A wrapper for learning-rate schedulers: you call ``scheduler.step()`` after every
micro-batch, and the scheduler steps once per update.

A ``flush()`` may close several windows. If you call the scheduler after every
micro-batch or after every update, the wrapper itself steps it between these windows. If
you call it after every micro-batch, the wrapper also steps it at the end of
``flush()``. Without this last step, if the next micro-batch closed a window too, the
scheduler would step only once for two updates.

For a timm scheduler, the wrapper passes the number of updates to the scheduler's
``step_update`` method. The scheduler's ``step`` method, whose argument is an epoch,
works as before.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import torch

from gradaccum.kit import unwrapped_optimizer_error
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import note_step_called

Scheduler = Any
"""A learning-rate scheduler: an object with a ``step`` method or timm's
``step_update``, and with an ``optimizer`` attribute.
"""

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

    # These attributes belong to this wrapper. All others are read from and written to
    # the scheduler.
    _scheduler: Scheduler
    _updates: int
    """The number of updates that the optimizer had applied when the scheduler last
    stepped.
    """
    _has_loaded: bool
    """Whether the scheduler has loaded a state and has not stepped since then. If the
    optimizer now loads a state too, the two states belong together.
    """
    _called_at: tuple[int, int]
    """The number of updates, and the number of micro-batches in the open window, when
    the scheduler was last called.
    """
    _calls_are_consecutive: bool
    """Whether there was only one micro-batch between the last two calls."""
    _last_arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the last call to ``step``, such as the epoch for
    ``CosineAnnealingWarmRestarts``. Tensors are not kept, because they may keep the
    graph of a loss alive.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, AccumulatingOptimizer):
            raise unwrapped_optimizer_error(optimizer)
        self._scheduler = scheduler
        self._updates = optimizer._window.updates
        self._has_loaded = False
        self._called_at = self._position()
        self._calls_are_consecutive = True
        self._last_arguments = ((), {})
        optimizer._window.schedulers.add(self)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call the scheduler's ``step(*args, **kwargs)`` if the optimizer has applied
        an update since the last call to this method. A timm scheduler's ``step`` is
        always called, because its argument is an epoch.
        """
        window = self._window
        updates = window.updates
        if not hasattr(self._scheduler, "step_update"):
            self._note_call()
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
        has_tensor = any(
            isinstance(each, torch.Tensor) for each in [*args, *kwargs.values()]
        )
        self._last_arguments = ((), {}) if has_tensor else (args, kwargs)

    def is_called_each_time(self) -> bool:
        """True if the scheduler was called after each of the last two micro-batches.

        A scheduler that is called once per epoch was not, so it does not step at the
        end of a ``flush``.
        """
        return self._calls_are_consecutive and self._called_at == self._position()

    def is_called_at_updates(self) -> bool:
        """True if the scheduler was called after each micro-batch or after each update.
        Such a scheduler steps between two windows that a single ``flush`` closes.
        """
        updates, _ = self._position()
        places = (self._position(), (updates, 0))
        return self._calls_are_consecutive and self._called_at in places

    def follow(self) -> None:
        """Step the scheduler with the arguments of its last call. Do nothing if its
        ``step`` has a required argument, such as a loss.
        """
        if hasattr(self._scheduler, "step_update"):
            self._step_update()
            return
        parameters = signature(self._scheduler.step).parameters.values()
        if all(
            each.default is not each.empty or each.kind in _ANY for each in parameters
        ):
            args, kwargs = self._last_arguments
            self.step(*args, **kwargs)

    def optimizer_loaded(self) -> None:
        """Called after the optimizer has loaded a state. If the scheduler has just
        loaded its own state too, continue from the number of updates in that state.
        Otherwise, step only for updates that are applied from now on.
        """
        self._called_at = self._position()
        if not self._has_loaded:
            self._updates = self._window.updates

    def _step_update(
        self, num_updates: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """If the optimizer has applied any update, call the scheduler's ``step_update``
        with the number of updates.
        """
        updates = self._window.updates
        self._note_call()
        self._window.changed_rate_warning.allow_change()
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
        """Restore a saved state. The state of a scheduler that was not wrapped lacks
        the number of updates that had been applied when the scheduler last stepped. In
        this case, use the number of updates that the wrapped optimizer has applied so
        far.
        """
        state_dict = dict(state_dict)
        self._updates = state_dict.pop(_STEPPED_AT, self._window.updates)
        self._has_loaded = True
        self._scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in GatedScheduler.__annotations__:
            raise AttributeError(name)
        if name == "step_update" and hasattr(self._scheduler, name):
            return self._step_update
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in GatedScheduler.__annotations__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._scheduler, name, value)

    def _is_at_beginning(self) -> bool:
        last_epoch = getattr(self._scheduler, "last_epoch", None)
        return last_epoch == 0 and not self._has_loaded

    def _note_call(self) -> None:
        position = self._position()
        if position != self._called_at:
            updates, micro_step = self._called_at
            # One micro-batch later, the window is still open, or its update was skipped
            # or applied.
            self._calls_are_consecutive = position in (
                (updates, micro_step + 1),
                (updates, 0),
                (updates + 1, 0),
            )
        self._called_at = position

    def _position(self) -> tuple[int, int]:
        state = self._window.state
        return int(state.optimizer_step), int(state.micro_step)

    @property
    def _window(self) -> Any:
        return self._scheduler.optimizer._window
