"""A `torch.amp.GradScaler` inside a wrapped optimizer, saved, loaded and copied with it, in mid-window too."""

from __future__ import annotations

import copy
import math

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch

from conformance_tests.framework_tests.torch_loss_scale_loop import Loop, by_kind, state_of


@by_kind
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_scaler_resumes_with_the_wrapper(kind: str, stop: int, with_scaler: bool) -> None:
    gradients = [1.0, 2.0, math.inf, 3.0, 0.5, 1.5, 2.5, 4.0]
    loops = [Loop(kind, steps=2, init_scale=64.0, growth_interval=2, fused=True) for _ in range(3)]
    whole, first, resumed = loops
    for gradient in gradients[:stop]:
        whole.micro_batch(gradient)
        first.micro_batch(gradient)
    resumed.opt.load_state_dict(copy.deepcopy(first.opt.state_dict()))
    resumed.parameter.data.copy_(first.parameter.data)
    if with_scaler:
        resumed.scaler.load_state_dict(first.scaler.state_dict())
    assert state_of(resumed.scaler) == state_of(whole.scaler)
    for gradient in gradients[stop:]:
        whole.micro_batch(gradient)
        resumed.micro_batch(gradient)
    assert torch.equal(whole.parameter, resumed.parameter)
    assert state_of(resumed.scaler) == state_of(whole.scaler)


def test_save_between_step_and_update() -> None:
    """The saved scale is already the one that `update()` will set."""
    loop, saved = Loop("by hand", steps=2, init_scale=64.0, growth_interval=2), []
    for gradient in (1.0, 2.0, 3.0, 4.0, math.inf, 1.0):
        loop.scaler.scale((loop.parameter * gradient).sum()).backward()
        loop.scaler.step(loop.opt)
        entry = loop.opt.state_dict()["gradaccum"]
        saved.append((entry["loss_scale"], entry["growth_tracker"]))
        loop.scaler.update()
        assert saved[-1] == state_of(loop.scaler)
    assert saved == [(64, 0), (64, 1), (64, 1), (128, 0), (128, 0), (64, 0)]


def test_loaded_scaler_rules_next_window() -> None:
    """The wrapper's state saves the loaded scale, too."""
    loop = Loop("opt.backward", steps=2, init_scale=4.0)
    loop.scaler.load_state_dict({**loop.scaler.state_dict(), "scale": 128.0, "_growth_tracker": 7})
    assert loop.opt.state_dict()["gradaccum"]["loss_scale"] == 128.0
    for _ in range(2):
        loop.micro_batch(2.0)
    assert loop.parameter.tolist() == [-2.0, -2.0]
    assert state_of(loop.scaler) == (128.0, 8)


@pytest.mark.parametrize("kind", ["scaler.step", "opt.scale"])
def test_bare_state_keeps_the_scale(kind: str) -> None:
    loop = Loop(kind, steps=2, init_scale=4.0)
    loop.scaler.update(16.0)
    loop.opt.load_state_dict(torch.optim.SGD([torch.zeros(2)], lr=1.0).state_dict())
    assert state_of(loop.scaler) == (16.0, 0)


def test_copy_has_its_own_scaler() -> None:
    loop = Loop("scaler.step", steps=2, init_scale=4.0)
    loop.micro_batch(1.0)
    twin = copy.deepcopy(loop)
    twin.micro_batch(3.0)
    assert twin.parameter.tolist() == [-2.0, -2.0]
    assert loop.parameter.tolist() == [0.0, 0.0]
    assert (state_of(twin.scaler)[1], state_of(loop.scaler)[1]) == (1, 0)
