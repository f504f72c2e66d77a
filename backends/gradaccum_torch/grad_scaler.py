"""A user's own `torch.amp.GradScaler`, driven once per window.

The window's scale is the scaler's when the first micro-batch ends. Everything is noted on the scaler's device and read with the norm at the
window's end. If something else moved the scale inside the window, its end raises.

Two loops work. ``opt.backward(loss); opt.step()``: closing the window writes the scale and growth tracker that one ``scaler.update()``
would write. ``scaler.scale(loss).backward(); scaler.step(opt); scaler.update()``: ``scaler.step`` finds a probe in place of gradients and
calls ``opt.step``. Inside a window the wrapper subtracts from the tracker the 1 that ``scaler.update()`` will add. At the end it sets the
scaler's overflow flag, and ``update`` moves the scale, so that a changed ``scaler.get_scale()`` means a skipped update as in the bare loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Options, ScaleRule, State, explain
from gradaccum_torch.parameters import Group
from gradaccum_torch.private import SCALER, LocalVariables, found_inf_of, pending_update, require_name, scale_of, scaler_state, tracker_of

SMALLEST = 2.0**-125
"""`GradScaler` has no floor. Below this power of two a window could no longer be divided, and the scale could never grow again."""

_SET_BACK: WeakKeyDictionary[torch.amp.GradScaler, tuple[Mapping[int, Any], Tensor]] = WeakKeyDictionary()
"""By scaler whose tracker was set back: its pending update, which its ``update`` replaces by another, and its true scale and tracker."""


class ScalerLink:
    """One scaler, as a window sees it."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        scaler.scale(torch.zeros((), device=device))
        self._start = self._now().clone()
        self._moved = self._start[0] != self._start[0]
        self._used = 0.0
        self._ended: tuple[State, bool] | None = None
        """The state after the window that has ended in the step under way, and whether it was an overflow."""
        self._update_follows = False
        """``scaler.step`` asked for the window's end, and the user calls ``scaler.update`` after it."""
        self._probe = torch.zeros((), device=device)
        self._probe.grad = torch.zeros((), device=device)

    @property
    def rule(self) -> ScaleRule:
        scaler = self._scaler
        return ScaleRule(
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            min_scale=SMALLEST,
        )

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def count(self, *, first: bool) -> None:
        """Count a micro-batch. The scale at the first is the window's; at the others it must be the same."""
        if first:
            self._start = self._now()
            self._moved = self._start[0] != self._start[0]
        else:
            self._moved = self._moved | (self._now()[0] != self._start[0])

    def notes(self) -> tuple[Tensor, ...]:
        """Return the tensors, shape ``()``, whose values `used` needs on the host."""
        return *self._start.unbind(), self._moved

    def used(self, fields: State, notes: list[float]) -> State:
        scale, tracker, moved = notes
        if moved:
            raise _moved_error()
        self._used = scale
        return fields._replace(loss_scale=scale, growth_tracker=int(tracker))

    def current(self, fields: State) -> State:
        """Return the state to save: in a window with the window's scale, between two with the scaler's."""
        if fields.micro_step:
            scale, tracker = self._start.tolist()
        elif pending_update(self._scaler):
            return fields  # scaler.update() is still to come, and will give the scaler these values.
        else:
            scale, tracker = self._now().tolist()
        return fields._replace(loss_scale=scale, growth_tracker=int(tracker))

    def write(self, fields: State) -> None:
        _SET_BACK.pop(self._scaler, None)
        self._scaler.load_state_dict(scaler_state(self._scaler, fields.loss_scale, fields.growth_tracker))
        self.count(first=True)

    def window_ended(self, fields: State, overflow: bool) -> None:
        if self._update_follows:
            self._ended = fields, overflow
        else:
            self.write(fields)

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let ``scaler.step`` run the step of `optimizer` inside the block.

        The following ``scaler.update`` moves the scale if a window ended inside, otherwise it has no effect.
        """
        self._update_follows, self._ended = True, None
        try:
            yield
        except BaseException:
            # scaler.step would delete them after this, but does not get there, and the next step may be the user's own.
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            if self._ended is not None:
                self.write(self._ended[0])
            raise
        finally:
            self._update_follows = False
        if self._ended is None:
            self._hold()
        else:
            self._settle(optimizer, *self._ended)

    def groups_for(self, caller: LocalVariables) -> list[Group]:
        """Return the groups that ``scaler.step`` may look at: a probe in place of the gradients, so that it records a finite check."""
        if caller.get("self") is not self._scaler or not caller.get("allow_fp16"):
            raise foreign_scaler_error()
        return [{"params": [self._probe]}]

    def _hold(self) -> None:
        """Make the following ``scaler.update()`` leave scale and tracker as they were when the window began."""
        tracker_of(self._scaler).copy_(self._start[1] - 1)
        self._note_set_back(self._start)

    def _settle(self, optimizer: torch.optim.Optimizer, fields: State, overflow: bool) -> None:
        """Make the following ``scaler.update()`` end in the scale and tracker of `fields`, the state after the window.

        If the scale moves, ``update`` itself moves it, so that the user can compare it before and after. If it stays (a window of weight 0,
        a scale at its floor), ``update`` only counts up to the tracker.
        """
        if fields.loss_scale == self._used:
            start = self._start
            self.write(fields._replace(growth_tracker=fields.growth_tracker - 1))
            self._note_set_back(start)
        else:
            for found in found_inf_of(self._scaler, optimizer):
                found.fill_(float(overflow))

    def _note_set_back(self, true: Tensor) -> None:
        """Note the tracker, since another wrapped optimizer with this scaler may ask before ``scaler.update()``."""
        _SET_BACK[self._scaler] = pending_update(self._scaler), true

    def _now(self) -> Tensor:
        """Return scale and growth tracker in one float64 tensor, which holds both exactly."""
        awaited, true = _SET_BACK.get(self._scaler, (None, None))
        if true is not None and awaited is pending_update(self._scaler):
            return true
        scale, tracker = scale_of(self._scaler), tracker_of(self._scaler)
        return torch.stack([scale.to(_wide(scale)), tracker.to(_wide(scale))])


def scaler_rule(scaler: object) -> ScaleRule | None:
    """Return the rule of a `torch.amp.GradScaler`, without floor or ceiling; None for another object."""
    if not isinstance(scaler, torch.amp.GradScaler):
        return None
    if not scaler.is_enabled():
        return ScaleRule()
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
    return ScaleRule(float(scaler.get_scale()), *factors, scaler.get_growth_interval())


def link_scaler(options: Options, device: torch.device) -> ScalerLink | None:
    scaler: torch.amp.GradScaler | None = options.scaler
    if scaler is None or not scaler.is_enabled():
        return None
    for name in SCALER:
        require_name(name, "loss_scale", "Write loss_scale=gradaccum.DynamicLossScale() in place of the scaler.")
    return ScalerLink(scaler, device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _moved_error() -> UsageError:
    found = "a scale that moved inside it, such as by scaler.update(new_scale) or another optimizer's overflow"
    fix = "Change it between two windows, and give each optimizer a scaler of its own. The window cannot be mended: call opt.discard()."
    return explain(UsageError, "scaler", expected="one scale for all micro-batches of a window", found=found, fix=fix)


def foreign_scaler_error() -> UsageError:
    expected = "the scaler that gradaccum.wrap was given, which moves only between windows"
    fix = "Write gradaccum.wrap(optimizer, ..., loss_scale=scaler); in place of scaler.unscale_(opt) and clip_grad_norm_ clip_norm=."
    found = "a torch.amp.GradScaler that would unscale at every micro-batch"
    return explain(UsageError, "scaler.step, scaler.unscale_", expected=expected, found=found, fix=fix)
