"""A state loaded under other options: the same loss scale multiplies and divides, and a scaler of the user keeps its own scale."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradaccum

DYNAMIC = gradaccum.DynamicLossScale(init_scale=1024.0)
NO_SCALE: dict[str, Callable[[], Any]] = {"none": lambda: None, "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False)}


def make(**options: Any) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    return parameter, gradaccum.wrap(torch.optim.SGD([parameter], lr=1.0), **{"steps": 2, **options})


def train(parameter: torch.nn.Parameter, opt: Any, micro_batches: int, weight: float = 1.0) -> None:
    for _ in range(micro_batches):
        opt.backward(parameter.sum(), weight)
        opt.step()


@pytest.mark.parametrize("scale", NO_SCALE)
def test_plain_backward_after_scaled_run(scale: str) -> None:
    """A float16 run goes on in bfloat16 without a scale: nothing multiplies the loss, so nothing divides the sum."""
    first, saved = make(loss_scale=DYNAMIC)
    train(first, saved, 2)
    parameter, opt = make(loss_scale=NO_SCALE[scale]())
    opt.load_state_dict(saved.state_dict())
    for _ in range(2):
        parameter.sum().backward()
        opt.step()
    assert parameter.tolist() == [0.0, 0.0]
    assert opt.result.loss_scale == 1.0
    assert opt.result.optimizer_step == 2


@pytest.mark.parametrize("saved", [None, 8.0, 1024.0], ids=str)
def test_given_scaler_keeps_its_scale(saved: float | None) -> None:
    """The user may have loaded the scaler from a file of its own after wrapping."""
    first, old = make(loss_scale=saved)
    train(first, old, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameter, opt = make(loss_scale=scaler)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 7})
    opt.load_state_dict(old.state_dict())
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (512.0, 7)
    train(parameter, opt, 2)
    assert parameter.tolist() == [0.0, 0.0]
    assert scaler.state_dict()["_growth_tracker"] == 8


def test_scaler_takes_saved_dynamic_scale() -> None:
    first, old = make(loss_scale=DYNAMIC)
    train(first, old, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    _, opt = make(loss_scale=scaler)
    opt.load_state_dict(old.state_dict())
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (1024.0, 1)


def test_interrupted_full_window_resumes() -> None:
    """A handler of KeyboardInterrupt saves such a window: it is full, and its update raised."""
    first, old = make()
    handle = old.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    train(first, old, 1)
    with pytest.raises(KeyboardInterrupt):
        train(first, old, 1)
    handle.remove()
    parameter, opt = make()
    opt.load_state_dict(copy.deepcopy(old.state_dict()))
    opt.flush()
    assert parameter.tolist() == [0.0, 0.0]


def test_exhausted_schedule_can_be_saved() -> None:
    """The list has a size for one window, and no second window begins."""
    parameter, opt = make(steps=lambda step: [2][step])
    train(parameter, opt, 2)
    assert opt.state_dict()["gradaccum"]["terms"]["steps"] is None


def test_open_window_keeps_its_size() -> None:
    """A state says which size its open window has. It loads only where the schedule gives the same size."""
    sizes = [3]
    parameter, opt = make(steps=lambda step: sizes[0])
    train(parameter, opt, 1)
    sizes[0] = 5
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["gradaccum"]["terms"] == {"reduction": "mean", "on_overflow": "skip_window", "scale": "unused", "steps": 3}
    with pytest.raises(gradaccum.CheckpointError, match="steps"):
        opt.load_state_dict(saved)
    sizes[0] = 3
    opt.load_state_dict(saved)
    train(parameter, opt, 2)
    assert opt.result.applied
