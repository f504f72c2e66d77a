"""Stage 4: autocast, `torch.amp.GradScaler`, bfloat16 gradients, master weights and one
inf.

What autocast rounds depends on how the items are cut, so there the bound is a multiple
of the half precision's unit roundoff. Sums are compared with the same gradients summed
in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
from benchmarks.gpu.problem import (
    STEPS,
    MicroBatch,
    backward,
    cut,
    distance,
    flat,
    gradients_of,
    have_equal_bits,
    inner_optimizer,
    joined,
    make_items,
    make_model,
    mean_loss,
)
from benchmarks.gpu.records import Check, Measured, Setting

INITIAL_SCALE = 2.0**10
ITEMS = 8
FLOAT32_BOUND = 2.0**-12
AUTOCAST_BOUND = 2.0**-4
LONG_WINDOW = 64
"""Micro-batches: enough for a sum in bfloat16 to lose them."""
SUM_BOUND = 2.0**-18
"""64 additions in float32, each within 2 ** -24."""

Model = Callable[[Tensor], Tensor]


def micro_batches_of(
    setting: Setting, count: int, dtype: torch.dtype = torch.float32
) -> list[MicroBatch]:
    return cut(make_items(setting, ITEMS * count, dtype), [ITEMS] * count)


def autocast_loss(
    setting: Setting, model: Model, items: MicroBatch, dtype: torch.dtype | None
) -> Tensor:
    """Return the loss under autocast to `dtype`; None: without autocast."""
    x, y = items
    enabled = dtype is not None
    with torch.autocast(setting.device, dtype=dtype or torch.bfloat16, enabled=enabled):
        outputs = model(x)
    return nn.functional.mse_loss(outputs.float(), y)


def make_scaler(setting: Setting) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(setting.device, init_scale=INITIAL_SCALE)


def one_window(
    setting: Setting, autocast: torch.dtype | None, by_scaler: bool
) -> Measured:
    """Train on one window, in the words of a `GradScaler` or by ``opt.backward``."""
    micro_batches = micro_batches_of(setting, STEPS)
    scaler = make_scaler(setting)
    model = make_model(setting, torch.float32)
    opt = gradaccum.wrap(inner_optimizer(model), steps=STEPS, loss_scale=scaler)
    for items in micro_batches:
        loss = autocast_loss(setting, model, items, autocast)
        if by_scaler:
            backward(scaler.scale(loss))
            scaler.step(opt)
            scaler.update()
        else:
            opt.backward(loss)
            opt.step()
        opt.zero_grad()
    large = make_model(setting, torch.float32)
    optimizer = inner_optimizer(large)
    backward(autocast_loss(setting, large, joined(micro_batches), autocast))
    optimizer.step()
    bound = FLOAT32_BOUND if autocast is None else AUTOCAST_BOUND
    found = distance(model, large, make_model(setting, torch.float32))
    state = scaler.state_dict()
    counted = (state["scale"], state["_growth_tracker"]) == (INITIAL_SCALE, 1)
    passed = found <= bound and opt.result.applied and counted
    text = f"{found:.1e}, scale {state['scale']:g}, {state['_growth_tracker']} clean"
    return Measured(passed, text, f"{bound:.1e}, scale {INITIAL_SCALE:g}, 1 clean")


def scale_of_a_power_of_two(setting: Setting) -> Measured:
    """Compare the bits of a float32 window with and without a loss scale."""
    models = []
    for scale in (None, INITIAL_SCALE):
        model = make_model(setting, torch.float32)
        opt = gradaccum.wrap(inner_optimizer(model), steps=STEPS, loss_scale=scale)
        for x, y in micro_batches_of(setting, STEPS):
            opt.backward(mean_loss(model, x, y))
            opt.step()
            opt.zero_grad()
        models.append(model)
    usual, scaled = models
    equal = have_equal_bits(usual, scaled)
    start = make_model(setting, torch.float32)
    text = "equal bits" if equal else f"{distance(scaled, usual, start):.1e}"
    return Measured(equal, text, "equal bits")


def one_inf(setting: Setting) -> Measured:
    """Let one inf skip the window and halve the scale, once."""
    scaler = make_scaler(setting)
    model = make_model(setting, torch.float32)
    opt = gradaccum.wrap(inner_optimizer(model), steps=STEPS, loss_scale=scaler)
    for index, (x, y) in enumerate(micro_batches_of(setting, STEPS)):
        factor = float("inf") if index == 1 else 1.0
        backward(scaler.scale(mean_loss(model, x, y) * factor))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    untouched = have_equal_bits(model, make_model(setting, torch.float32))
    scale = scaler.get_scale()
    where = "untouched" if untouched else "changed"
    passed = untouched and scale == INITIAL_SCALE / 2 and opt.result.skipped
    text = f"parameters {where}, scale {scale:g}"
    return Measured(passed, text, f"parameters untouched, scale {INITIAL_SCALE / 2:g}")


class TakenGradient:
    """The gradients that an inner optimizer gets, without an update."""

    def __init__(self, model: nn.Module) -> None:
        self.gradients: list[Tensor] = []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.optimizer.register_step_pre_hook(self._take)

    def _take(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.gradients.append(parameter.grad.detach().clone())


def bfloat16_sums(setting: Setting) -> Measured:
    """Compare a window's mean of bfloat16 gradients, as the master weights get it, with
    the mean in float64; beside it `.grad` of the usual loop.
    """
    dtype = torch.bfloat16
    micro_batches = micro_batches_of(setting, LONG_WINDOW, dtype)
    model = make_model(setting, dtype)
    total: Tensor | None = None
    for x, y in micro_batches:
        backward(mean_loss(model, x, y))
        gradient = flat(gradients_of(model))
        total = gradient if total is None else total + gradient
        model.zero_grad()
    assert total is not None
    expected = total / LONG_WINDOW

    taken = TakenGradient(model)
    opt: Any = gradaccum.wrap(taken.optimizer, LONG_WINDOW, master_weights=True)
    for x, y in micro_batches:
        opt.backward(mean_loss(model, x, y))
        opt.step()
        opt.zero_grad()

    bare = make_model(setting, dtype)
    for x, y in micro_batches:
        backward(mean_loss(bare, x, y) / LONG_WINDOW)

    def off(gradients: list[Tensor]) -> float:
        return float((flat(gradients) - expected).norm() / expected.norm())

    found = off(taken.gradients)
    usual = off(gradients_of(bare))
    return Measured(
        found <= SUM_BOUND, f"{found:.1e}", f"{SUM_BOUND:.1e}", f"{usual:.1e}"
    )


def master_weights(setting: Setting, dtype: torch.dtype) -> Measured:
    """The model's parameters are the rounded float32 masters."""
    model = make_model(setting, dtype)
    opt: Any = gradaccum.wrap(
        inner_optimizer(model), steps=STEPS, loss_scale=2.0**8, master_weights=True
    )
    for x, y in micro_batches_of(setting, STEPS, dtype):
        opt.backward(mean_loss(model, x, y).float())
        opt.step()
        opt.zero_grad()
    masters = list(opt.master_weights.values())
    pairs = list(zip(model.parameters(), masters, strict=True))
    rounded = all(torch.equal(each, master.to(dtype)) for each, master in pairs)
    are_float32 = all(master.dtype == torch.float32 for master in masters)
    moved = not have_equal_bits(model, make_model(setting, dtype))
    passed = rounded and are_float32 and moved and opt.result.applied
    text = "the rounded masters" if passed else f"{rounded=}, {are_float32=}, {moved=}"
    return Measured(passed, text, "the rounded masters")


FLOAT16 = torch.float16
BFLOAT16 = torch.bfloat16
CHECKS = (
    Check(
        "float32, opt.backward and GradScaler",
        partial(one_window, autocast=None, by_scaler=False),
    ),
    Check(
        "float32, the loop of a GradScaler",
        partial(one_window, autocast=None, by_scaler=True),
    ),
    Check(
        "autocast bfloat16, opt.backward",
        partial(one_window, autocast=BFLOAT16, by_scaler=False),
    ),
    Check(
        "autocast float16, opt.backward",
        partial(one_window, autocast=FLOAT16, by_scaler=False),
        needs_gpu=True,
    ),
    Check(
        "autocast float16, the loop of a GradScaler",
        partial(one_window, autocast=FLOAT16, by_scaler=True),
        needs_gpu=True,
    ),
    Check("a scale of 1024 in float32", scale_of_a_power_of_two),
    Check("one inf", one_inf),
    Check("bfloat16 gradients, windows of 64", bfloat16_sums),
    Check("master weights of bfloat16", partial(master_weights, dtype=BFLOAT16)),
    Check("master weights of float16", partial(master_weights, dtype=FLOAT16)),
)
