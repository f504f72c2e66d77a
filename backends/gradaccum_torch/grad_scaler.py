"""Supports a `torch.amp.GradScaler` that the user passes as ``loss_scale=``. The
scaler's scale is updated once per window.

In the loop ``opt.backward(loss); opt.step()``, the scale and the growth tracker are set
at the end of the window, as a single ``scaler.update()`` would set them. In the loop
``scaler.scale(loss).backward(); scaler.step(opt); scaler.update()``, the scaler updates
its scale itself. In the middle of a window, ``scaler.update()`` must have no effect.
Therefore, gradaccum reports no overflow to the scaler, and decreases the growth tracker
by one before ``update`` increases it by one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Options, ScaleRule, State
from gradaccum_torch.torch_private.names import (
    found_inf_of,
    pending_update,
    scale_and_tracker,
    unscaling_caller,
)

SMALLEST = 2.0**-125
"""The minimum loss scale, because `GradScaler` itself has no minimum. With a smaller
scale, the gradient sum could not be divided by the scale, every window would count as
an overflow, and the scale could never grow again.
"""


SET_BACK: WeakKeyDictionary[torch.amp.GradScaler, tuple[Any, int]] = WeakKeyDictionary()
"""The scalers whose growth tracker was set to one less than its true value, because the
user's next ``scaler.update()`` adds one to the growth tracker. Each scaler is mapped to
a pair: the object that `pending_update` returned at that time, and the true value of
the growth tracker.

``scaler.update()`` replaces this object. If `pending_update` returns another object,
`ScalerLink.with_scale` therefore ignores the pair.
"""


class ScalerLink:
    """Reads and sets the scale of one `GradScaler` for the windows of one optimizer."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        # The scaler creates its tensors on the first call to `scale`.
        scaler.scale(torch.zeros((), device=device))
        self.stepping_optimizer: torch.optim.Optimizer | None = None
        """The wrapped optimizer that ``scaler.step`` is currently stepping."""
        self.probe = torch.zeros((), device=device)
        self.probe.grad = torch.zeros((), device=device)

    def with_scale(self, state: State) -> State:
        """Return `state` with the scaler's current scale and growth tracker. Call this
        method only between two windows.
        """
        pending = pending_update(self.scaler)
        if pending and self.stepping_optimizer is None:
            # The user's next scaler.update() will set the scaler to the values in
            # `state`.
            return state
        scale, tracker = scale_and_tracker(self.scaler)
        awaited_update, true_tracker = SET_BACK.get(self.scaler, (None, 0))
        if awaited_update is pending:
            tracker = true_tracker
        return state._replace(loss_scale=scale, growth_tracker=int(tracker))

    def require_unmoved(self, state: State) -> None:
        """Raise if the scaler's scale has changed since the window began."""
        if self.scaler.get_scale() != state.loss_scale:
            raise UsageError(
                "scaler: expected the same scale for all micro-batches of a window; got"
                " a scale that changed within the window, for example through"
                " scaler.update(new_scale) or another optimizer's overflow. This window"
                " cannot be recovered, so call opt.discard(). Change the scale only"
                " between two windows, and use a separate scaler for each optimizer."
            )

    def write(self, state: State) -> None:
        """Set the scaler's scale and growth tracker to the values in `state`."""
        entries = self.scaler.state_dict()
        entries["scale"] = state.loss_scale
        entries["_growth_tracker"] = state.growth_tracker
        self.scaler.load_state_dict(entries)

    def window_closed(self, state: State, overflow: bool) -> None:
        if self.stepping_optimizer is None:
            self.write(state)
        else:
            self.prepare_update(state, overflow)

    def prepare_update(self, state: State, overflow: bool) -> None:
        """Prepare the scaler so that its scale becomes ``state.loss_scale`` when the
        user calls ``scaler.update()`` after ``scaler.step``.
        """
        # Let ``scaler.update()`` change the scale, because the user may compare the
        # scale before and after that call. If the scale must not change, decrease the
        # growth tracker by one, because ``update`` increases it by one.
        moves = self.scaler.get_scale() != state.loss_scale
        assert self.stepping_optimizer is not None
        for found_inf in found_inf_of(self.scaler, self.stepping_optimizer):
            found_inf.fill_(float(overflow and moves))
        if not moves:
            self.write(state._replace(growth_tracker=state.growth_tracker - 1))
            true_tracker = int(state.growth_tracker)
            SET_BACK[self.scaler] = (pending_update(self.scaler), true_tracker)


def scaler_rule(scaler: torch.amp.GradScaler) -> ScaleRule:
    """Return the rule that `scaler` currently uses to update its scale."""
    if not scaler.is_enabled():
        return ScaleRule()
    return ScaleRule(
        float(scaler.get_scale()),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
        min_scale=SMALLEST,
    )


def link_scaler(options: Options, parameters: list[Tensor]) -> ScalerLink | None:
    scaler: torch.amp.GradScaler | None = options.scaler
    if scaler is None or not scaler.is_enabled():
        return None
    device = parameters[0].device if parameters else torch.device("cpu")
    return ScalerLink(scaler, device)


def groups_for_a_scaler(link: ScalerLink | None) -> list[dict[str, Any]] | None:
    """If a `GradScaler` is reading ``opt.param_groups`` to look for an overflow, return
    parameter groups that contain only a dummy parameter with a finite gradient, so that
    the scaler finds no overflow. If any other code is reading ``opt.param_groups``,
    return None.

    Raises:
        UsageError: the reader is a scaler that was not passed as ``loss_scale=``; or
            the user has called ``scaler.unscale_``, which would unscale the gradients
            in each micro-batch.
    """
    caller = unscaling_caller()
    if caller is None:
        return None
    if (
        link is None
        or caller.get("self") is not link.scaler
        or not caller.get("allow_fp16")  # The user has called scaler.unscale_.
    ):
        raise UsageError(
            "scaler.step, scaler.unscale_: expected the scaler that was passed to"
            " gradaccum.wrap, because its scale changes only between windows; got a"
            " torch.amp.GradScaler that would unscale at every micro-batch. Write"
            " gradaccum.wrap(optimizer, ..., loss_scale=scaler), and use clip_norm="
            " instead of scaler.unscale_(opt) and clip_grad_norm_."
        )
    return [{"params": [link.probe]}]
