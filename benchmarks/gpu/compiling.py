"""Stage 6: after the first windows, `torch.compile` compiles nothing more and finds no
further graph break.

On a CPU Dynamo traces in the same way, and the graphs run without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gradaccum
import gradaccum_torch
from benchmarks.gpu.problem import (
    STEPS,
    backward,
    cut,
    inner_optimizer,
    joined,
    make_items,
    make_model,
    mean_loss,
)
from benchmarks.gpu.records import Check, Measured, Setting

ITEMS = 8
BOUND = "0 graphs, 0 breaks"


def compiled(setting: Setting, function: Any, **options: Any) -> Any:
    backend = "inductor" if setting.device == "cuda" else "eager"
    return torch.compile(function, backend=backend, **options)


def counts() -> tuple[int, int]:
    """Return how many graphs Dynamo has made, and how many breaks it has found."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def after_the_first(
    window: Callable[[], None], windows_before: int, usual: Callable[[], None]
) -> Measured:
    """Count what three windows compile after the first ones have; `usual`: a window of
    the loop without gradaccum.
    """
    graphs, breaks = _further(window, windows_before)
    usual_graphs, usual_breaks = _further(usual, windows_before)
    return Measured(
        graphs == breaks == 0,
        f"{graphs} graphs, {breaks} breaks",
        BOUND,
        f"{usual_graphs} graphs, {usual_breaks} breaks",
    )


def _further(window: Callable[[], None], windows_before: int) -> tuple[int, int]:
    torch._dynamo.reset()
    graphs_at_start, _ = counts()
    for _ in range(windows_before):
        window()
    graphs, breaks = counts()
    assert graphs > graphs_at_start, "nothing was compiled"
    for _ in range(3):
        window()
    graphs_now, breaks_now = counts()
    return graphs_now - graphs, breaks_now - breaks


def compiled_model(setting: Setting) -> Measured:
    """Compile the model without a break, and train it in the usual loop."""
    micro_batches = cut(make_items(setting, ITEMS * STEPS, DTYPE), [ITEMS] * STEPS)
    model = make_model(setting, DTYPE)
    opt = gradaccum.wrap(inner_optimizer(model), STEPS, clip_norm=1.0)
    forward = compiled(setting, model, fullgraph=True)

    def window() -> None:
        for x, y in micro_batches:
            opt.backward(mean_loss(forward, x, y), weight=len(x))
            opt.step()
            opt.zero_grad()

    return after_the_first(window, 1, usual_window(setting))


def usual_window(setting: Setting) -> Callable[[], None]:
    micro_batches = cut(make_items(setting, ITEMS * STEPS, DTYPE), [ITEMS] * STEPS)
    model = make_model(setting, DTYPE)
    optimizer = inner_optimizer(model)
    forward = compiled(setting, model, fullgraph=True)

    def window() -> None:
        for x, y in micro_batches:
            backward(mean_loss(forward, x, y) / STEPS)
        optimizer.step()
        optimizer.zero_grad()

    return window


def compiled_loss_function(setting: Setting) -> Measured:
    """Compile the loss function that `gradaccum_torch.backward` calls."""
    x, y = make_items(setting, ITEMS * STEPS, DTYPE)
    model = make_model(setting, DTYPE)
    opt = gradaccum.wrap(inner_optimizer(model), None)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return mean_loss(model, x, y)

    forward = compiled(setting, loss_fn, fullgraph=True)

    def window() -> None:
        gradaccum_torch.backward(forward, x, y, steps=STEPS, optimizer=opt)

    return after_the_first(window, 1, usual_window(setting))


def compiled_step(setting: Setting) -> Measured:
    """Compile a complete step, ``opt.step()`` included, which Dynamo breaks up as it
    compiles the first two windows.
    """
    micro_batches = cut(make_items(setting, ITEMS * STEPS, DTYPE), [ITEMS] * STEPS)
    model = make_model(setting, DTYPE)
    opt = gradaccum.wrap(inner_optimizer(model), STEPS)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mean_loss(model, x, y)
        backward(loss)
        opt.step()
        opt.zero_grad()
        return loss

    forward = compiled(setting, step)

    def window() -> None:
        for x, y in micro_batches:
            forward(x, y)

    return after_the_first(window, 2, usual_step(setting))


def usual_step(setting: Setting) -> Callable[[], None]:
    """Compile a step of the bare optimizer with the large batch."""
    x, y = joined(cut(make_items(setting, ITEMS * STEPS, DTYPE), [ITEMS] * STEPS))
    model = make_model(setting, DTYPE)
    optimizer = inner_optimizer(model)

    def step(x: Tensor, y: Tensor) -> None:
        backward(mean_loss(model, x, y))
        optimizer.step()
        optimizer.zero_grad()

    forward = compiled(setting, step)
    return lambda: forward(x, y)


DTYPE = torch.float32
CHECKS = (
    Check("compiled model, the usual loop", compiled_model),
    Check("compiled loss function, gradaccum_torch.backward", compiled_loss_function),
    Check("compiled step, opt.step() included", compiled_step),
)
