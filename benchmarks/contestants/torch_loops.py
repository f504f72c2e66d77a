"""The loops that torch users write or get today, each as one window of `STEPS`
micro-batches, and ours.

Every recipe takes a model, its optimizer and a function from the model to the loss of
one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum

STEPS = 8
BASELINE = "hand-written loop"
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

Loss = Callable[[nn.Module], Tensor]
Window = Callable[[], object]
Recipe = Callable[[nn.Module, torch.optim.Optimizer, Loss], Window]


def hand_written(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    clip_norm: float | None = None,
    steps: int = STEPS,
) -> Window:
    """What torch's own notes on gradient accumulation show."""

    def window() -> None:
        for _ in range(steps):
            (loss(model) / steps).backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        wait()

    return window


def wrapped(
    model: nn.Module, inner: torch.optim.Optimizer, loss: Loss, **options: Any
) -> Window:
    """`gradaccum.wrap` with `options`, and a loop as without accumulation."""
    optimizer = gradaccum.wrap(inner, steps=STEPS, **options)
    return without_accumulation(model, optimizer, loss)


def without_accumulation(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: int = STEPS
) -> Window:
    """`steps` turns of a loop that knows nothing of accumulation."""

    def window() -> None:
        for _ in range(steps):
            loss(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        wait()

    return window


def accelerate(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    loss: Loss,
    clip_norm: float | None = None,
) -> Window:
    """The loop of Accelerate's guide to gradient accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=not CUDA)
    model, optimizer = accelerator.prepare(model, inner)

    def window() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model))
                if clip_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
        wait()

    return window


def fabric(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    loss: Loss,
    clip_norm: float | None = None,
) -> Window:
    """The loop of Fabric's guide to gradient accumulation."""
    launched = import_fabric()(accelerator=DEVICE.type, devices=1)
    model, optimizer = launched.setup(model, inner)

    def window() -> None:
        for index in range(STEPS):
            with launched.no_backward_sync(model, enabled=index < STEPS - 1):
                launched.backward(loss(model) / STEPS)
        if clip_norm is not None:
            launched.clip_gradients(model, optimizer, max_norm=clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        wait()

    return window


def recipes() -> Mapping[str, Recipe]:
    """The recipes that can be followed here, the baseline first."""
    found: dict[str, Recipe] = {BASELINE: hand_written, "gradaccum": wrapped}
    found |= {"Accelerate": accelerate} if find_spec("accelerate") else {}
    return found | ({"Fabric": fabric} if find_spec("lightning_fabric") else {})


def fabric_module() -> str:
    """Return the module that Fabric is in: a package of its own, or a part of
    Lightning, which may be missing too.
    """
    return "lightning_fabric" if find_spec("lightning_fabric") else "lightning.fabric"


def import_fabric() -> Any:
    """Return the class `Fabric`."""
    return import_module(fabric_module()).Fabric


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if CUDA:
        torch.cuda.synchronize()
