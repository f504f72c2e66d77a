"""Schedulers of other libraries, gated schedulers inside another scheduler, and gates whose optimizer has loaded a state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch.optim import lr_scheduler

import gradaccum
from gradaccum_torch import GatedScheduler


def make(steps: int | None = 2) -> Any:
    return gradaccum.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0), steps=steps)


def micro_batch(opt: Any) -> None:
    opt.backward(opt.param_groups[0]["params"][0].sum())
    opt.step()


class Halving:
    """A scheduler of no library, which moves at each call."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5


class Positioned:
    """A scheduler like timm's: the caller passes the number of updates or of epochs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.told: list[tuple[Any, ...]] = []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.told.append(("epoch", epoch, metric))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.told.append(("update", num_updates, metric))

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)


def test_own_scheduler_moves_once_per_update() -> None:
    opt = make()
    gated = gradaccum.wrap(Halving(opt))
    assert isinstance(gated, GatedScheduler)
    for _ in range(4):
        micro_batch(opt)
        gated.step()
    assert opt.param_groups[0]["lr"] == 0.25


def test_timm_scheduler_gets_applied_updates() -> None:
    """Before the first update it is not called: timm's value at update 0 need not be the rate that the bare loop begins with."""
    opt = make()
    gated = gradaccum.wrap(Positioned(opt))
    gated.step(0)
    for index in range(4):
        micro_batch(opt)
        gated.step_update(num_updates=index + 1, metric=0.5)
    gated.step(1, 0.25)
    updates = [("update", number, 0.5) for number in (1, 1, 2)]
    assert gated.told == [("epoch", 0, None), *updates, ("epoch", 1, 0.25)]
    other = gradaccum.wrap(Positioned(make()))
    other.load_state_dict(gated.state_dict())
    assert other.told == gated.told
    assert not hasattr(gradaccum.wrap(Halving(opt)), "step_update")


def test_scheduler_follows_without_its_loop() -> None:
    """As between two windows that one flush closes; what needs an argument of the loop is left to the loop."""
    opt = make()
    kinds: list[Any] = [Halving(opt), Positioned(opt), lr_scheduler.ReduceLROnPlateau(opt)]
    gates = [gradaccum.wrap(kind) for kind in kinds]
    micro_batch(opt)
    micro_batch(opt)
    for gate in gates * 2:
        gate.follow()
        gates[0].step()
    assert opt.param_groups[0]["lr"] == 0.5
    assert gates[1].told == [("update", 1, None)] * 2


def test_own_scheduler_needs_wrapped_optimizer() -> None:
    bare = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(gradaccum.ArgumentTypeError, match="Wrap the optimizer first"):
        gradaccum.wrap(Halving(bare))


def test_holder_of_optimizer_is_no_scheduler() -> None:
    class Trainer:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)

    class Proxy(Trainer):
        def step(self) -> None: ...
        def zero_grad(self) -> None: ...

    for other in (Trainer(), Proxy()):
        with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer"):
            gradaccum.wrap(other, steps=2)


SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "first": lambda o: [gradaccum.wrap(lr_scheduler.ConstantLR(o, 0.5)), lr_scheduler.ExponentialLR(o, 0.9)],
    "second": lambda o: [lr_scheduler.ConstantLR(o, 0.5), gradaccum.wrap(lr_scheduler.ExponentialLR(o, 0.9))],
    "nested": lambda o: [
        lr_scheduler.ConstantLR(o, 0.5),
        gradaccum.wrap(lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)])),
    ],
}


@pytest.mark.parametrize("children", SEQUENCES)
def test_sequence_of_gated_schedulers_is_refused(children: str) -> None:
    """SequentialLR would repeat their first steps and count its milestones in micro-batches."""
    opt = make()
    with pytest.raises(gradaccum.UsageError, match=r"gradaccum\.wrap\(SequentialLR"):
        lr_scheduler.SequentialLR(opt, SEQUENCES[children](opt), milestones=[2])


def test_chain_of_gated_schedulers_works() -> None:
    opt = make()
    chain = lr_scheduler.ChainedScheduler([gradaccum.wrap(lr_scheduler.ExponentialLR(opt, factor)) for factor in (0.5, 0.25)])
    for _ in range(4):
        micro_batch(opt)
        chain.step()
    assert opt.param_groups[0]["lr"] == 0.125**2


@pytest.mark.parametrize("older", [True, False])
def test_loaded_optimizer_does_not_move_gate(older: bool) -> None:
    """The optimizer loads a state, its gated scheduler does not."""
    opt, saved = make(), make()
    gated = gradaccum.wrap(lr_scheduler.StepLR(opt, 1, gamma=0.5))
    for _ in range(4):
        micro_batch(opt if older else saved)
        gated.step()
    opt.load_state_dict(copy.deepcopy(saved.state_dict()))
    rate = opt.param_groups[0]["lr"]
    gated.step()
    micro_batch(opt)
    gated.step()
    assert opt.param_groups[0]["lr"] == rate
    micro_batch(opt)
    gated.step()
    assert opt.param_groups[0]["lr"] == rate / 2


@pytest.mark.parametrize("gate_first", [True, False])
def test_pending_scheduler_step_survives_saving(gate_first: bool) -> None:
    """The states are saved after the update and before the scheduler's step, and loaded in either order."""
    opt, new = make(steps=1), make(steps=1)
    gated, fresh = (gradaccum.wrap(lr_scheduler.StepLR(o, 1, gamma=0.5)) for o in (opt, new))
    micro_batch(opt)
    pairs = [(fresh, gated.state_dict()), (new, opt.state_dict())]
    for target, state in pairs if gate_first else pairs[::-1]:
        target.load_state_dict(copy.deepcopy(state))
    fresh.step()
    assert new.param_groups[0]["lr"] == 0.5
    fresh.step()
    assert new.param_groups[0]["lr"] == 0.5
