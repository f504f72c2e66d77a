"""A user's own `torch.amp.GradScaler`, driven once per window.

The window's scale is what the scaler holds as its first micro-batch ends. Everything is noted on the scaler's device and read
together with the norm at the window's end, so that nothing waits for the device before; a scale that something else moved inside
the window makes its end an error.

Two loops work. ``opt.backward(loss); opt.step()``: the close writes what one ``scaler.update()`` would have made of scale and growth
tracker. ``scaler.scale(loss).backward(); scaler.step(opt); scaler.update()``, word for word: ``scaler.step`` finds no gradients to
unscale, only a probe, and calls ``opt.step``. Inside a window the tracker is set back by the one that ``scaler.update()`` will add, and
at the end the scaler is told whether there was an overflow, so that its own ``update`` moves the scale. So ``scaler.get_scale()`` before
and after ``update`` tell what they always told.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Options, ScaleRule, State, explain

SMALLEST = 2.0**-125
"""The floor of a scale without one: a power of two by which a window may still be divided, so that the scale can grow again."""

_SET_BACK: WeakKeyDictionary[torch.amp.GradScaler, tuple[Any, Tensor]] = WeakKeyDictionary()
"""The true scale and tracker of a scaler whose tracker was set back, and the table that its next ``update`` replaces by another."""


class ScalerLink:
    """One scaler, as a window sees it.

    Args:
        scaler: an enabled `torch.amp.GradScaler`.
        device: where its tensors are made if it has none yet.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        scaler.scale(torch.zeros((), device=device))
        self._start = self._now().clone()
        self._moved = self._start[0] != self._start[0]
        self._used = 0.0
        self.update_follows = False
        """The window's end was asked for by ``scaler.step``, and the user calls ``scaler.update`` after it."""
        self._probe = torch.zeros((), device=device)
        self._probe.grad = torch.zeros((), device=device)

    @property
    def rule(self) -> ScaleRule:
        """How the scale moves, by the factors that the scaler has now."""
        scaler = self.scaler
        return ScaleRule(
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            min_scale=SMALLEST,
        )

    def count(self, *, first: bool) -> None:
        """A micro-batch ended: the first one's scale is the window's, the others' must be the same."""
        if first:
            self._start = self._now()
            self._moved = self._start[0] != self._start[0]
        else:
            self._moved = self._moved | (self._now()[0] != self._start[0])

    def notes(self) -> tuple[Tensor, ...]:
        """What `used` needs on the host: 0-d tensors."""
        return *self._start.unbind(), self._moved

    def used(self, fields: State, notes: list[float]) -> State:
        """The state with the scale and the growth tracker of the window, from the values of `notes`.

        Raises:
            UsageError: the scale moved inside the window.
        """
        scale, tracker, moved = notes
        if moved:
            raise _moved()
        self._used = scale
        return fields._replace(loss_scale=scale, growth_tracker=int(tracker))

    def current(self, fields: State) -> State:
        """The state as it is to be saved: in a window with the window's scale, between two with the scaler's own."""
        if fields.micro_step:
            scale, tracker = self._start.tolist()
        elif self.scaler._per_optimizer_states:
            return fields  # scaler.update() is still to come and will make it what the transition made it.
        else:
            scale, tracker = self._now().tolist()
        return fields._replace(loss_scale=scale, growth_tracker=int(tracker))

    def write(self, fields: State) -> None:
        """Make the state's scale and tracker the scaler's, and the window's if one is open."""
        scaler = self.scaler
        _SET_BACK.pop(scaler, None)
        scaler.load_state_dict(
            {
                "scale": fields.loss_scale,
                "growth_factor": scaler.get_growth_factor(),
                "backoff_factor": scaler.get_backoff_factor(),
                "growth_interval": scaler.get_growth_interval(),
                "_growth_tracker": fields.growth_tracker,
            }
        )
        self.count(first=True)

    def group(self) -> dict[str, Any]:
        """What the scaler is shown in place of the gradients, so that it records a finite check."""
        return {"params": [self._probe]}

    def hold(self) -> None:
        """Make the ``scaler.update()`` that follows leave scale and tracker as they were when the window began."""
        tracker = self.scaler._growth_tracker
        assert tracker is not None
        tracker.copy_(self._start[1] - 1)
        self._note_set_back(self._start)

    def settle(self, optimizer: torch.optim.Optimizer, fields: State, overflow: bool) -> None:
        """Make the ``scaler.update()`` that follows end in the scale and tracker of `fields`, the state after the window.

        Where the scale moves, ``update`` itself moves it, so that comparing the scale before and after tells what it always told. Where
        it stays (a window of weight 0, a scale at its floor) it only counts up to the tracker.
        """
        if fields.loss_scale == self._used:
            start = self._start
            self.write(fields._replace(growth_tracker=fields.growth_tracker - 1))
            self._note_set_back(start)
        else:
            for found in self.scaler._found_inf_per_device(optimizer).values():
                found.fill_(float(overflow))

    def _note_set_back(self, true: Tensor) -> None:
        """Another wrapped optimizer with this scaler may ask for it before ``scaler.update()``."""
        _SET_BACK[self.scaler] = self.scaler._per_optimizer_states, true

    def _now(self) -> Tensor:
        """Scale and growth tracker side by side, float64: both exactly."""
        awaited, true = _SET_BACK.get(self.scaler, (None, None))
        if true is not None and awaited is self.scaler._per_optimizer_states:
            return true
        scale, tracker = self.scaler._get_scale_async(), self.scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        return torch.stack([scale.to(_wide(scale)), tracker.to(_wide(scale))])


def scaler_rule(scaler: object) -> ScaleRule | None:
    """How a `torch.amp.GradScaler` moves, from the scale that it has now; it has no floor and no ceiling. None for another object."""
    if not isinstance(scaler, torch.amp.GradScaler):
        return None
    if not scaler.is_enabled():
        return ScaleRule()
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
    return ScaleRule(float(scaler.get_scale()), *factors, scaler.get_growth_interval())


def link_scaler(options: Options, device: torch.device) -> ScalerLink | None:
    """The scaler that was given as ``loss_scale=``, unless it is disabled."""
    scaler: torch.amp.GradScaler | None = options.scaler
    return None if scaler is None or not scaler.is_enabled() else ScalerLink(scaler, device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _moved() -> UsageError:
    return explain(
        UsageError,
        "scaler",
        expected="one scale for all micro-batches of a window",
        found="a scale that moved inside it, such as by scaler.update(new_scale), scaler.load_state_dict() or another optimizer's overflow",
        fix="Change it between two windows, and give each optimizer a scaler of its own. The window cannot be mended: call opt.discard().",
    )


def refused() -> UsageError:
    """The error for a scaler that the wrapper was not given, or that is to unscale gradients in ``.grad``."""
    return explain(
        UsageError,
        "scaler.step, scaler.unscale_",
        expected="the scaler that gradaccum.wrap was given, which moves only between windows",
        found="a torch.amp.GradScaler that would unscale at every micro-batch",
        fix="Write gradaccum.wrap(optimizer, ..., loss_scale=scaler) and keep the loop as it is; in place of scaler.unscale_(opt) "
        "and clip_grad_norm_ write clip_norm=.",
    )
