"""A user's own `torch.amp.GradScaler`, driven once per window; and the factor of a
loss.

The window's scale is the scaler's when the first micro-batch ends. If something else
moved the scale inside the window, its end raises.

In the loop ``opt.backward(loss); opt.step()`` closing the window writes the scale and
growth tracker that one ``scaler.update()`` would. In ``scaler.scale(loss).backward();
scaler.step(opt); scaler.update()``, ``scaler.step`` finds a probe in place of gradients
and calls ``opt.step``. Inside a window the wrapper subtracts the 1 that ``update`` will
add to the tracker; at the end it sets the scaler's overflow flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Options, ScaleRule, State, contribution, explain
from gradaccum_torch.parameters import Group
from gradaccum_torch.private import names
from gradaccum_torch.private.names import LocalVariables

SMALLEST = 2.0**-125
"""`GradScaler` has no floor. Below this power of two a window could no longer be
divided, and the scale could never grow again.
"""

_SET_BACK: WeakKeyDictionary[torch.amp.GradScaler, tuple[Mapping[int, Any], Tensor]] = (
    WeakKeyDictionary()
)
"""By scaler whose tracker was set back: its pending update, which its ``update``
replaces by another, and its true scale and tracker.
"""


class Ended(NamedTuple):
    """A window that has ended."""

    after: State
    scale: float
    overflow: bool


class ScalerLink:
    """One scaler, as a window sees it."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        scaler.scale(torch.zeros((), device=device))
        start = self._now().clone()
        self._start = start, start[0] != start[0]
        """Scale and growth tracker as the window began, and whether the scale has moved
        since.
        """
        self._ended: list[Ended] | None = None
        """The window that has ended in the step under way, if ``scaler.step`` asked for
        it, after which ``scaler.update`` is called.
        """
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
        """Count a micro-batch; the scale must be the one at the first."""
        now, (start, moved) = self._now(), self._start
        self._start = (
            (now, now[0] != now[0]) if first else (start, moved | (now[0] != start[0]))
        )

    def notes(self) -> tuple[Tensor, ...]:
        """Return the tensors, shape ``()``, whose values `used` needs on the host."""
        start, moved = self._start
        return *start.unbind(), moved

    def used(self, fields: State, notes: list[float]) -> State:
        scale, tracker, moved = notes
        if moved:
            raise _moved_error()
        return fields._replace(loss_scale=scale, growth_tracker=int(tracker))

    def current(self, fields: State) -> State:
        """Return the state to save: within a window with the window's scale, else with
        the scaler's.
        """
        if fields.micro_step:
            scale, tracker = self._start[0].tolist()
        elif names.pending_update(self._scaler):
            # scaler.update() is still to come, and will give the scaler these values.
            return fields
        else:
            scale, tracker = self._now().tolist()
        return fields._replace(loss_scale=scale, growth_tracker=int(tracker))

    def write(self, fields: State) -> None:
        _SET_BACK.pop(self._scaler, None)
        self._scaler.load_state_dict(
            names.scaler_state(self._scaler, fields.loss_scale, fields.growth_tracker)
        )
        self.count(first=True)

    def window_ended(self, ended: Ended) -> None:
        if self._ended is None:
            self.write(ended.after)
        else:
            self._ended.append(ended)

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let ``scaler.step`` run the step of `optimizer`. ``scaler.update`` then moves
        the scale only if a window ended.
        """
        self._ended = ended = list[Ended]()
        try:
            yield
        except BaseException:
            # scaler.step would delete them after this, but does not get there, and the
            # next step may be the user's own.
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            for each in ended:
                self.write(each.after)
            raise
        finally:
            self._ended = None
        if not ended:
            self._hold()
        for each in ended:
            self._settle(optimizer, each)

    def groups_for(self, caller: LocalVariables) -> list[Group]:
        """Return the groups for ``scaler.step``: a probe in place of the gradients, so
        that its check finds no overflow.
        """
        if caller.get("self") is not self._scaler or not caller.get("allow_fp16"):
            raise foreign_scaler_error()
        return [{"params": [self._probe]}]

    def _hold(self) -> None:
        """Make the following ``scaler.update()`` restore the scale and tracker that the
        window began with.
        """
        start, _ = self._start
        names.tracker_of(self._scaler).copy_(start[1] - 1)
        self._note_set_back(start)

    def _settle(self, optimizer: torch.optim.Optimizer, ended: Ended) -> None:
        """Make the following ``scaler.update()`` end in the scale and tracker of the
        state after the window.

        ``update`` itself moves the scale, so that the user can compare it before and
        after. If the scale stays, ``update`` only counts.
        """
        if ended.after.loss_scale == ended.scale:
            start, _ = self._start
            self.write(
                ended.after._replace(growth_tracker=ended.after.growth_tracker - 1)
            )
            self._note_set_back(start)
        else:
            for found in names.found_inf_of(self._scaler, optimizer):
                found.fill_(float(ended.overflow))

    def _note_set_back(self, true: Tensor) -> None:
        """Note the tracker for another wrapped optimizer that asks before
        ``scaler.update()``.
        """
        _SET_BACK[self._scaler] = names.pending_update(self._scaler), true

    def _now(self) -> Tensor:
        awaited, true = _SET_BACK.get(self._scaler, (None, None))
        if true is not None and awaited is names.pending_update(self._scaler):
            return true
        scale, tracker = names.scale_of(self._scaler), names.tracker_of(self._scaler)
        return torch.stack([scale.to(_wide(scale)), tracker.to(_wide(scale))])


def scaler_rule(scaler: object) -> ScaleRule | None:
    """Return the rule of a `torch.amp.GradScaler`, without floor or ceiling; None for
    another object.
    """
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
    for name in names.SCALER:
        names.require_name(
            name,
            "loss_scale",
            "Write loss_scale=gradaccum.DynamicLossScale() in place of the scaler.",
        )
    return ScalerLink(scaler, device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _moved_error() -> UsageError:
    found = (
        "a scale that moved inside it, such as by scaler.update(new_scale) or another"
        " optimizer's overflow"
    )
    fix = (
        "Change it between two windows, and give each optimizer a scaler of its own."
        " The window cannot be mended: call opt.discard()."
    )
    return explain(
        UsageError,
        "scaler",
        expected="one scale for all micro-batches of a window",
        found=found,
        fix=fix,
    )


def foreign_scaler_error() -> UsageError:
    expected = (
        "the scaler that gradaccum.wrap was given, which moves only between windows"
    )
    fix = (
        "Write gradaccum.wrap(optimizer, ..., loss_scale=scaler); in place of"
        " scaler.unscale_(opt) and clip_grad_norm_ clip_norm=."
    )
    found = "a torch.amp.GradScaler that would unscale at every micro-batch"
    return explain(
        UsageError,
        "scaler.step, scaler.unscale_",
        expected=expected,
        found=found,
        fix=fix,
    )


# The factor of a loss before it is differentiated: its weight times the loss scale.


def factor(weight: float, fields: State, options: Options) -> float:
    product: float = contribution(weight, options) * fields.loss_scale
    return product


def scaled(
    loss: Tensor,
    weight: float,
    fields: State,
    options: Options,
    scaler: ScalerLink | None,
) -> Tensor:
    """Return `loss`, of any shape, times its `factor`; a `torch.amp.GradScaler` scales
    it on the device.
    """
    own, rule = float(contribution(weight, options)), options.scale_rule
    if own == 1 and scaler is None and fields.loss_scale == 1:
        return loss
    _require_in_range(
        loss, own * (rule.init_scale if rule.backoff_factor == 1 else rule.min_scale)
    )
    # backward() works inside torch.no_grad(), and so must this.
    with torch.enable_grad():
        if scaler is not None:
            loss = scaler.scale(loss)
        else:
            own *= fields.loss_scale
        return loss if own == 1 else loss * own


def _require_in_range(loss: Tensor, factor: float) -> None:
    """Raise unless the loss's dtype can hold `factor`, to which autograd casts the
    incoming gradient.
    """
    if loss.dtype is torch.float16 and factor > torch.finfo(torch.float16).max:
        expected = (
            f"a dtype that holds weight x loss scale, which is at least {factor:g} here"
        )
        found = (
            "a float16 loss, in which that is inf, so that every gradient would"
            " overflow"
        )
        fix = "Compute the loss in float32: loss_fn(output.float(), target)."
        raise explain(UsageError, "loss", expected=expected, found=found, fix=fix)
