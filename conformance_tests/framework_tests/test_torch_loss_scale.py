"""`torch.amp.GradScaler` around and inside a wrapped optimizer: a window moves scale
and growth tracker as a bare step does.

Differences by design, each with a test: a window of weight 0 is neither clean nor an
overflow; the scale stays above 0, where a bare scaler underflows to 0 and never
returns; and our own `DynamicLossScale` has a floor of 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradaccum


class Alone:
    """A scaler around a bare optimizer, stepped and updated once per event."""

    def __init__(self, rule: dict[str, Any]) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **rule)
        self.scaler.scale(torch.zeros(()))
        self.parameter = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)

    def event(self, overflow: bool) -> tuple[float, int]:
        self.parameter.grad = torch.full((1,), math.inf if overflow else 0.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return state_of(self.scaler)


def state_of(scaler: torch.amp.GradScaler) -> tuple[float, int]:
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


class Loop:
    """A wrapped optimizer with a scaler and one parameter. `micro_batch` takes the
    gradient that the parameter gets.
    """

    def __init__(
        self, kind: str, *, steps: Any = 3, fused: bool = False, **rule: Any
    ) -> None:
        self.kind = kind
        self.scaler = torch.amp.GradScaler("cpu", **rule)
        self.parameter = torch.zeros(2, requires_grad=True)
        inner: torch.optim.Optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        if fused:
            inner = torch.optim.AdamW([self.parameter], lr=0.5, fused=True)
        self.opt: Any = gradaccum.wrap(inner, steps=steps, loss_scale=self.scaler)

    def micro_batch(self, gradient: float, weight: float | None = None) -> None:
        loss = (self.parameter * torch.full((2,), gradient)).sum()
        if self.kind == "scaler.step":
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
        elif self.kind == "opt.scale":
            self.opt.scale(loss).backward()
            self.opt.step()
        else:
            self.opt.backward(loss, weight)
            self.opt.step()
        self.opt.zero_grad()


KINDS = ("scaler.step", "opt.scale", "opt.backward")


by_kind = pytest.mark.parametrize("kind", KINDS)


SMALLEST = 2.0**-125


PATTERNS = 60


def patterns(seed: int, events: int) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Random factors and intervals, each with a random sequence of overflows."""
    rng = np.random.default_rng(seed)
    for _ in range(PATTERNS):
        rule = {
            "init_scale": float(np.float32(2.0 ** rng.uniform(-10, 60))),
            "growth_factor": float(rng.choice([1.0001, 1.3, 2.0, 3.7, 1e4])),
            "backoff_factor": float(rng.choice([0.1, 0.5, 0.77, 0.999])),
            "growth_interval": int(rng.integers(1, 6)),
        }
        yield rule, rng.random(events) < rng.uniform(0.05, 0.6)


@by_kind
def test_window_is_one_scaler_step(kind: str) -> None:
    for rule, overflows in patterns(1, events=6):
        alone, loop = Alone(rule), Loop(kind, **rule)
        for window, overflow in enumerate(overflows.tolist()):
            before = state_of(loop.scaler)
            for index in range(3):
                loop.micro_batch(math.inf if overflow and index == window % 3 else 1.0)
                assert index == 2 or state_of(loop.scaler) == before, (
                    "a scaler moved inside a window"
                )
            assert state_of(loop.scaler) == alone.event(overflow), (rule, overflows)
            state = loop.opt.state_dict()["gradaccum"]
            assert (state["loss_scale"], state["growth_tracker"]) == state_of(
                loop.scaler
            )


@by_kind
def test_scale_changes_only_between_windows(kind: str) -> None:
    loop = Loop(kind, steps=2, init_scale=4.0)
    for _ in range(2):
        loop.micro_batch(1.0)
    loop.scaler.update(32.0)
    for _ in range(2):
        loop.micro_batch(3.0)
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


def test_another_optimizers_overflow_is_an_error() -> None:
    """The scaler is shared, and would back off inside the window."""
    loop, other = (
        Loop("scaler.step", steps=3, init_scale=4.0),
        torch.zeros(1, requires_grad=True),
    )
    bare = torch.optim.SGD([other], lr=1.0)
    for gradient in (math.inf, 1.0):
        loop.scaler.scale(loop.parameter.sum() + (other * gradient).sum()).backward()
        loop.scaler.step(loop.opt)
        loop.scaler.step(bare)
        loop.scaler.update()
        bare.zero_grad()
    with pytest.raises(gradaccum.UsageError, match="scaler of its own"):
        loop.micro_batch(1.0)


def two_loops(steps: int, **rule: Any) -> tuple[Any, list[Tensor], list[Any]]:
    """A scaler, and two optimizers of a parameter each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, **rule)
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    return (
        scaler,
        parameters,
        [
            gradaccum.wrap(torch.optim.SGD([p], lr=1.0), steps=steps, loss_scale=scaler)
            for p in parameters
        ],
    )


def step_all(scaler: torch.amp.GradScaler, opts: list[Any]) -> float:
    for opt in opts:
        scaler.step(opt)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("steps", [1, 2])
def test_two_wrappers_share_a_scaler(steps: int) -> None:
    """Their windows close together."""
    scaler, (a, b), opts = two_loops(steps, growth_interval=2)
    scales = []
    for index in range(4 * steps):
        bad = math.inf if index == 2 * steps - 1 else 1.0
        scaler.scale((a + b * bad).sum()).backward()
        scales.append(step_all(scaler, opts))
    assert scales[steps - 1 :: steps] == [8, 4, 4, 8]
    assert (a.item(), b.item()) == (-4.0, -3.0)
    assert opts[1].result.overflow is False


def test_shared_scaler_ignores_empty_window() -> None:
    """One wrapper's window has weight 0. The other one's clean window still counts."""
    scaler, (a, b), opts = two_loops(1)
    for expected in (1, 2):
        opts[0].backward(a.sum(), weight=0)
        opts[1].backward(b.sum())
        step_all(scaler, opts)
        assert state_of(scaler) == (8.0, expected)


def test_unscale_is_refused() -> None:
    loop = Loop("by hand", steps=2, init_scale=4.0)
    loop.scaler.scale(loop.parameter.sum()).backward()
    before = loop.parameter.grad.clone()
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        loop.scaler.unscale_(loop.opt)
    assert torch.equal(loop.parameter.grad, before)
    assert loop.opt.result.micro_step == 0


def test_error_in_scaler_step_is_recoverable() -> None:
    loop = Loop("by hand", steps=2, init_scale=4.0)
    loop.scaler.scale(loop.parameter.sum()).backward()
    nn.utils.clip_grad_norm_([loop.parameter], 0.1)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        loop.scaler.step(loop.opt)
    loop.opt.discard()
    loop.kind = "opt.scale"
    for _ in range(2):
        loop.micro_batch(3.0)
    assert loop.parameter.tolist() == [-3.0, -3.0]
    assert state_of(loop.scaler) == (4.0, 1)


def test_flush_moves_the_scale() -> None:
    """`flush` needs no `update()` of the scaler."""
    loop = Loop("scaler.step", steps=4, init_scale=4.0, growth_interval=1)
    loop.micro_batch(2.0)
    loop.opt.flush()
    assert state_of(loop.scaler) == (8.0, 0)
    for gradient in (1.0, 2.0, 3.0, 6.0):
        loop.micro_batch(gradient)
    assert loop.parameter.tolist() == [-5.0, -5.0]
    assert state_of(loop.scaler) == (16.0, 0)


@by_kind
def test_scale_stays_above_zero(kind: str) -> None:
    loop = Loop(kind, steps=1, init_scale=4 * SMALLEST, growth_interval=2)
    scales = []
    for gradient in (0.0, math.inf, math.inf, math.inf, 0.0, math.inf):
        loop.micro_batch(gradient)
        scales.append(loop.scaler.get_scale() / SMALLEST)
    assert scales == [4, 2, 1, 1, 1, 1]


def test_changed_factors_count_at_next_close() -> None:
    loop = Loop("opt.backward", steps=1, init_scale=4.0, growth_interval=1)
    loop.scaler.set_growth_factor(8.0)
    loop.micro_batch(1.0)
    assert loop.scaler.get_scale() == 32.0
    loop.scaler.set_backoff_factor(0.25)
    loop.micro_batch(math.inf)
    assert loop.scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    "options", [{}, {"on_overflow": "ignore"}, {"loss_scale": None}], ids=str
)
@pytest.mark.parametrize("kind", ["scaler.step", "opt.backward", "plain"])
def test_disabled_scaler_has_scale_one(kind: str, options: dict[str, Any]) -> None:
    """Whether the optimizer was given it or not."""
    parameter = torch.zeros(2, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    opt: Any = gradaccum.wrap(
        torch.optim.SGD([parameter], lr=1.0),
        steps=2,
        **{"loss_scale": scaler, **options},
    )
    for gradient in (1.0, 3.0):
        loss: Tensor = (parameter * gradient).sum()
        if kind == "opt.backward":
            opt.backward(loss)
        else:
            scaler.scale(loss).backward()
        scaler.step(opt) if kind == "scaler.step" else opt.step()
        scaler.update()
    assert parameter.tolist() == [-2.0, -2.0]
    assert opt.result.loss_scale == 1.0


@by_kind
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_scaler_resumes_with_the_wrapper(
    kind: str, stop: int, with_scaler: bool
) -> None:
    gradients = [1.0, 2.0, math.inf, 3.0, 0.5, 1.5, 2.5, 4.0]
    loops = [
        Loop(kind, steps=2, init_scale=64.0, growth_interval=2, fused=True)
        for _ in range(3)
    ]
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
    """The saved scale is already the one that `update()` will set. Loops compare
    `get_scale()` before and after `update()` to see that a step was skipped.
    """
    loop, saved = Loop("by hand", steps=2, init_scale=64.0, growth_interval=2), []
    scale = 64.0
    for gradient in (1.0, 2.0, 3.0, 4.0, math.inf, 1.0):
        loop.scaler.scale((loop.parameter * gradient).sum()).backward()
        loop.scaler.step(loop.opt)
        entry = loop.opt.state_dict()["gradaccum"]
        saved.append((entry["loss_scale"], entry["growth_tracker"]))
        assert loop.scaler.get_scale() == scale
        loop.scaler.update()
        assert saved[-1] == state_of(loop.scaler)
        scale = loop.scaler.get_scale()
    assert saved == [(64, 0), (64, 1), (64, 1), (128, 0), (128, 0), (64, 0)]


def test_loaded_scaler_rules_next_window() -> None:
    """The wrapper's state saves the loaded scale, too."""
    loop = Loop("opt.backward", steps=2, init_scale=4.0)
    loop.scaler.load_state_dict(
        {**loop.scaler.state_dict(), "scale": 128.0, "_growth_tracker": 7}
    )
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
