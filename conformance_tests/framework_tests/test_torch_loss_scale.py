"""`torch.amp.GradScaler` around and inside a wrapped optimizer: a window moves scale
and growth tracker as a bare step does.

Differences by design: a window of weight 0 is neither clean nor an overflow; the scale
stays above 0, where a bare scaler underflows to 0 and never returns.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD

import gradaccum


def state_of(scaler: GradScaler) -> tuple[float, int]:
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


class Loop:
    """A wrapped optimizer with a scaler and one parameter. `micro_batch` takes the
    gradient that the parameter gets.
    """

    def __init__(
        self, kind: str, *, steps: int = 2, init_scale: float = 4.0, **rule: Any
    ) -> None:
        self.kind = kind
        self.scaler = GradScaler("cpu", init_scale=init_scale, **rule)
        self.parameter = torch.zeros(2, requires_grad=True)
        self.opt = self.wrap(self.parameter, steps)

    def wrap(self, parameter: Tensor, steps: int) -> Any:
        inner = SGD([parameter], lr=1.0)
        return gradaccum.wrap(inner, steps=steps, loss_scale=self.scaler)

    def micro_batch(self, gradient: float) -> None:
        loss = (self.parameter * gradient).sum()
        if self.kind == "scaler.step":
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
        elif self.kind == "opt.scale":
            self.opt.scale(loss).backward()
            self.opt.step()
        else:
            self.opt.backward(loss)
            self.opt.step()
        self.opt.zero_grad()


by_kind = pytest.mark.parametrize("kind", ["scaler.step", "opt.scale", "opt.backward"])


@by_kind
def test_window_is_one_scaler_step(kind: str) -> None:
    """With random factors, intervals and overflows."""
    rng = random.Random(1)
    for _ in range(30):
        rule = {
            "init_scale": 2.0 ** rng.randint(-10, 60) * 1.5,
            "growth_factor": rng.choice([1.0001, 1.3, 2.0, 3.7, 1e4]),
            "backoff_factor": rng.choice([0.1, 0.5, 0.77, 0.999]),
            "growth_interval": rng.randint(1, 5),
        }
        loop = Loop(kind, steps=3, **rule)
        scaler = GradScaler("cpu", **rule)
        parameter = torch.zeros(1, requires_grad=True)
        bare = SGD([parameter], lr=0.0)
        for window in range(6):
            overflow = rng.random() < 0.35
            for index in range(3):
                loop.micro_batch(math.inf if overflow and index == window % 3 else 1.0)
            scaler.scale((parameter * (math.inf if overflow else 1.0)).sum()).backward()
            scaler.step(bare)
            scaler.update()
            bare.zero_grad()
            entry = loop.opt.state_dict()["gradaccum"]
            own = entry["loss_scale"], entry["growth_tracker"]
            assert own == state_of(loop.scaler) == state_of(scaler), rule


@by_kind
def test_scale_changes_only_between_windows(kind: str) -> None:
    loop = Loop(kind, init_scale=2.0)
    for gradient in (1.0, 1.0, 3.0, 3.0):
        if gradient == 3.0 and not loop.opt.result.micro_step:
            loop.scaler.update(32.0)
        loop.micro_batch(gradient)
    assert loop.opt.result.loss_scale == 32.0
    assert loop.parameter.tolist() == [-4.0, -4.0]
    loop.micro_batch(1.0)
    loop.scaler.update(8.0)
    assert loop.opt.state_dict()["gradaccum"]["loss_scale"] == 32.0, "the window's"
    with pytest.raises(gradaccum.UsageError, match=r"opt\.discard"):
        loop.micro_batch(1.0)
    assert loop.parameter.tolist() == [-4.0, -4.0]
    loop.opt.discard()
    # With scaler.step the scaler still waits for its update().
    if kind != "scaler.step":
        for _ in range(2):
            loop.micro_batch(1.0)
        assert loop.parameter.tolist() == [-5.0, -5.0]


def test_two_wrappers_share_a_scaler() -> None:
    """Their windows close together, and one overflow is enough for both."""
    loop = Loop("scaler.step", growth_interval=2)
    b = torch.zeros(2, requires_grad=True)
    scaler = loop.scaler
    opts = [loop.opt, loop.wrap(b, 2)]
    scales = []
    for bad in (1.0, math.inf, 1.0, 1.0):
        for _ in range(2):
            opts[0].backward(loop.parameter.sum())
            opts[1].backward((b * bad).sum())
            for opt in opts:
                scaler.step(opt)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4, 2, 2, 4]


def test_scaled_losses_have_no_weight() -> None:
    """Those of ``scaler.scale``: not beside their backward pass, nor in ours."""
    loop = Loop("scaler.step")
    with pytest.raises(gradaccum.UsageError, match=r"got scaler\.scale"):
        loop.opt.backward(loop.scaler.scale(loop.parameter.sum()), 3)
    loop.opt.weigh(3)
    with pytest.raises(gradaccum.UsageError, match="multiplied by 3"):
        loop.micro_batch(1.0)


def test_flush_moves_the_scale() -> None:
    """`flush` needs no `update()` of the scaler."""
    loop = Loop("scaler.step", growth_interval=1)
    loop.micro_batch(2.0)
    loop.opt.flush()
    assert state_of(loop.scaler) == (8.0, 0)
    for gradient in (2.0, 4.0):
        loop.micro_batch(gradient)
    assert loop.parameter.tolist() == [-5.0, -5.0]
    assert state_of(loop.scaler) == (16.0, 0)


# Saved, loaded and copied.


@by_kind
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_scaler_resumes_with_the_wrapper(kind: str, stop: int) -> None:
    whole, first, resumed = (
        Loop(kind, init_scale=64.0, growth_interval=2) for _ in range(3)
    )
    for place, gradient in enumerate([1.0, 2.0, math.inf, 3.0, 0.5, 1.5, 2.5, 4.0]):
        whole.micro_batch(gradient)
        (first if place < stop else resumed).micro_batch(gradient)
        if place == stop - 1:
            resumed.opt.load_state_dict(copy.deepcopy(first.opt.state_dict()))
            resumed.parameter.data.copy_(first.parameter.data)
    assert torch.equal(whole.parameter, resumed.parameter)
    assert state_of(resumed.scaler) == state_of(whole.scaler)
