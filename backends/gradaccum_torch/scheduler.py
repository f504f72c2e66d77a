"""A gate for learning-rate schedulers: ``scheduler.step()`` after every micro-batch
moves the scheduler once per update.

Where one ``flush()`` closes several windows, the gate moves the scheduler between
these. A scheduler of timm gets the number of updates in its ``step_update``; its
``step``, which takes an epoch, is left alone.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import is_sequence_calling, note_step_called

Scheduler = Any
"""An object with a ``step`` or timm's ``step_update``, and the optimizer that it
schedules as ``optimizer``.
"""
Argument = Any
"""What a scheduler's method takes, or the value of one of its attributes: handed
through, whatever it is.
"""

_OWN = frozenset({"_scheduler", "_moved", "_was_loaded"})
_ANY = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
_STEPPED_AT = "gradaccum_optimizer_step"
_REPLAYED = (
    "gradaccum: scheduler.step() moved nothing, as no update was made since"
    " optimizer.load_state_dict(), and the scheduler is at its beginning. To resume it,"
    " save scheduler.state_dict() too, and call scheduler.load_state_dict(saved)."
)


def is_scheduler(candidate: object) -> bool:
    """True if `candidate` is one of torch's schedulers, or has an optimizer and a
    ``step`` and is no optimizer.
    """
    if isinstance(candidate, torch.optim.lr_scheduler.LRScheduler):
        return True
    of_an_optimizer = isinstance(
        getattr(candidate, "optimizer", None), torch.optim.Optimizer
    ) and not hasattr(candidate, "zero_grad")
    return of_an_optimizer and any(
        callable(getattr(candidate, name, None)) for name in ("step", "step_update")
    )


class Moved(NamedTuple):
    """The updates at which a gate last looked."""

    updates: int
    loads: int
    """How often the optimizer had loaded a saved state by then."""
    was_loaded: bool = False
    """The gate itself has loaded one since. The optimizer's, if it is loaded after
    that, belongs to it.
    """


class GatedScheduler(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that moves only when an update was applied since its last step.

    Args:
        scheduler: built on a wrapped optimizer; it has the ``step`` of an
            `LRScheduler`, or timm's ``step_update``.

    Raises:
        ArgumentTypeError: its optimizer is not wrapped.
    """

    _scheduler: Scheduler
    _moved: Moved
    _was_loaded: bool

    def __init__(self, scheduler: Scheduler) -> None:
        if not isinstance(getattr(scheduler, "optimizer", None), AccumulatingOptimizer):
            expected = "a scheduler built on a wrapped optimizer"
            found = (
                f"a scheduler on {type(getattr(scheduler, 'optimizer', None)).__name__}"
            )
            fix = (
                "Wrap the optimizer first: opt = gradaccum.wrap(optimizer, steps=4);"
                " scheduler = StepLR(opt, 10)."
            )
            raise explain(
                ArgumentTypeError, "scheduler", expected=expected, found=found, fix=fix
            )
        self._scheduler = scheduler
        self._moved = Moved(self._updates(), len(scheduler.optimizer._loads))
        self._was_loaded = False
        scheduler.optimizer._window.schedulers.add(self)

    def step(self, *args: Argument, **kwargs: Argument) -> None:
        """Call ``scheduler.step(...)`` with the given arguments if an update was
        applied since the last call.
        """
        if hasattr(self._scheduler, "step_update"):
            return self._move(*args, **kwargs)
        moved = self._followed()
        updates = self._updates()
        if updates > moved.updates:
            self._move(*args, **kwargs)
        elif self._is_replayed():
            self._scheduler.optimizer._window.warn(_REPLAYED)
        self._moved = moved._replace(updates=updates)

    def follow(self) -> None:
        """Move as `step` does, unless ``scheduler.step`` needs an argument, such as a
        loss.
        """
        if hasattr(self._scheduler, "step_update"):
            self._step_update()
        elif all(
            each.default is not each.empty or each.kind in _ANY
            for each in signature(self._scheduler.step).parameters.values()
        ):
            self.step()

    def _step_update(
        self, num_updates: int | None = None, *args: Argument, **kwargs: Argument
    ) -> Any:
        """Call the scheduler's ``step_update`` with the number of updates applied."""
        updates = self._updates()
        self._scheduler.optimizer._window.changed_rate_warning.allow_change()
        if updates:
            return self._scheduler.step_update(updates, *args, **kwargs)
        return None

    def get_last_lr(self) -> list[Any]:
        return list(self._scheduler.get_last_lr())

    def get_lr(self) -> list[Any]:
        return list(self._scheduler.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's ``state_dict``, and the update at which it last
        moved.
        """
        self._moved = self._followed()
        return {**self._scheduler.state_dict(), _STEPPED_AT: self._moved.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state; a bare scheduler's state counts as having moved at the
        last update.
        """
        state_dict = dict(state_dict)
        self._was_loaded = True
        self._moved = self._moved._replace(
            updates=state_dict.pop(_STEPPED_AT, self._updates()), was_loaded=True
        )
        self._scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        _require_no_sequence()
        value = getattr(self._scheduler, name)
        return self._step_update if name == "step_update" else value

    def __setattr__(self, name: str, value: Argument) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            if name == "last_epoch":
                _require_no_sequence()
            setattr(self._scheduler, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scheduler!r})"

    def _move(self, *args: Argument, **kwargs: Argument) -> None:
        # torch warns if it has not seen the optimizer's step, and it cannot have seen
        # an update that was made before a checkpoint.
        note_step_called(self._scheduler.optimizer)
        self._scheduler.step(*args, **kwargs)
        self._scheduler.optimizer._window.changed_rate_warning.allow_change()

    def _is_replayed(self) -> bool:
        """True if a step right after a load of the optimizer is to bring a schedule at
        its beginning to where the optimizer is.
        """
        at_beginning = getattr(self._scheduler, "last_epoch", None) == 0
        return (
            at_beginning and not self._was_loaded and self._is_optimizer_just_loaded()
        )

    def _is_optimizer_just_loaded(self) -> bool:
        """True if nothing was counted since a state with updates was loaded."""
        loads = self._scheduler.optimizer._loads
        window = self._scheduler.optimizer._window
        return bool(loads and loads[-1]) and window.has_just_loaded

    def _updates(self) -> int:
        return int(self._scheduler.optimizer._window.updates)

    def _followed(self) -> Moved:
        """Return when the scheduler last moved; a state that the optimizer alone has
        loaded counts as a move.
        """
        loads = self._scheduler.optimizer._loads
        new = len(loads) != self._moved.loads and not self._moved.was_loaded
        return Moved(loads[-1] if new else self._moved.updates, len(loads))


def _require_no_sequence() -> None:
    """Raise unless outside of `SequentialLR`, which undoes its children's first steps
    and repeats them.
    """
    if is_sequence_calling(3):
        expected = "schedulers that are not gated, in a SequentialLR that is"
        found = "a SequentialLR over a gated one"
        fix = (
            "Write gradaccum.wrap(SequentialLR(opt, [LinearLR(opt),"
            " CosineAnnealingLR(opt, 100)], milestones=[10]))."
        )
        raise explain(UsageError, "schedulers", expected=expected, found=found, fix=fix)
