"""Learning-rate schedulers on a wrapped optimizer, gated and not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import gradaccum
from gradaccum_torch import GatedScheduler


def make(steps: int | None = 2) -> Any:
    return gradaccum.wrap(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9),
        steps=steps,
    )


def feed(opt: Any, value: float = 1.0) -> None:
    (opt.param_groups[0]["params"][0] * value).sum().backward()
    opt.step()
    opt.zero_grad()


KINDS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
            lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter:UserWarning"
)  # SequentialLR itself passes one, before torch 2.8.
@pytest.mark.parametrize("kind", KINDS)
def test_gated_scheduler_moves_once_per_update(kind: str) -> None:
    bare = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)
    expected_scheduler = KINDS[kind](bare)
    opt = make()
    gated = gradaccum.wrap(KINDS[kind](opt))
    assert isinstance(gated, lr_scheduler.LRScheduler)
    for update in range(4):
        assert opt.param_groups[0]["lr"] == bare.param_groups[0]["lr"], update
        feed(opt)
        gated.step()
        assert opt.param_groups[0]["lr"] == bare.param_groups[0]["lr"], update
        feed(opt)
        gated.step()
        bare.step()
        expected_scheduler.step()
    assert gated.get_last_lr() == expected_scheduler.get_last_lr()
    assert (
        gated.last_epoch == expected_scheduler.last_epoch
        if kind != "ChainedScheduler"
        else True
    )


def test_gated_plateau_reads_metrics_at_updates() -> None:
    opt = make()
    gated = gradaccum.wrap(lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.5))
    for metric in (1.0, 2.0, 9.0, 2.0, 9.0):
        feed(opt)
        gated.step(metric)
    assert gated.num_bad_epochs == 1
    assert opt.param_groups[0]["lr"] == 1.0
    feed(opt)
    gated.step(metrics=2.0)
    assert opt.param_groups[0]["lr"] == 0.5


def test_skipped_window_moves_no_scheduler() -> None:
    opt = make(steps=1)
    gated = gradaccum.wrap(lr_scheduler.StepLR(opt, 1, gamma=0.5))
    feed(opt, float("nan"))
    gated.step()
    assert opt.result.skipped
    assert opt.param_groups[0]["lr"] == 1.0
    feed(opt)
    gated.step()
    assert opt.param_groups[0]["lr"] == 0.5


def test_rare_call_moves_once() -> None:
    """The scheduler moves once per call, even if several updates came before it."""
    opt = make(steps=1)
    gated = gradaccum.wrap(lr_scheduler.StepLR(opt, 1, gamma=0.5))
    for _ in range(3):
        feed(opt)
    gated.step()
    gated.step()
    assert opt.param_groups[0]["lr"] == 0.5


def test_gate_takes_the_state_of_another() -> None:
    """Of one that has moved already, with its optimizer's, and of a bare scheduler,
    which has not.
    """
    opt, other = make(steps=1), make(steps=1)
    gated, resumed = (
        gradaccum.wrap(lr_scheduler.StepLR(each, 1, gamma=0.5)) for each in (opt, other)
    )
    feed(opt)
    gated.step()
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    resumed.load_state_dict(gated.state_dict())
    resumed.step()
    assert resumed.last_epoch == 1
    resumed.load_state_dict(lr_scheduler.StepLR(make(), 1, gamma=0.5).state_dict())
    resumed.step()
    assert resumed.last_epoch == 0


def test_attributes_reach_the_scheduler() -> None:
    opt = make()
    scheduler = lr_scheduler.StepLR(opt, 1, gamma=0.5)
    gated = gradaccum.wrap(scheduler)
    gated.gamma = 0.25
    assert scheduler.gamma == gated.gamma == 0.25
    assert gated.optimizer is opt
    assert "StepLR" in repr(gated)
    assert copy.deepcopy(gated).gamma == 0.25


def test_ungated_scheduler_does_not_warn() -> None:
    """Torch warns where a scheduler's step seems to come before the optimizer's. No
    warning may come in windows of one.
    """
    opt = make(steps=1)
    scheduler = lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for _ in range(3):
        feed(opt)
        scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.125


def test_second_gate_and_steps_are_refused() -> None:
    opt = make()
    gated = gradaccum.wrap(lr_scheduler.StepLR(opt, 1))
    assert isinstance(gated, GatedScheduler)
    with pytest.raises(gradaccum.ArgumentTypeError, match="wrapped"):
        gradaccum.wrap(gated)
    with pytest.raises(gradaccum.ArgumentTypeError, match="steps"):
        gradaccum.wrap(lr_scheduler.StepLR(opt, 1), steps=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip_norm", 1.0), ("reduction", "nonsense"), ("no_such_option", 1)],
)
def test_options_beside_a_scheduler_are_refused(name: str, value: object) -> None:
    opt = make()
    with pytest.raises(gradaccum.ArgumentTypeError, match=name):
        gradaccum.wrap(lr_scheduler.StepLR(opt, 1), **{name: value})


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
        feed(opt)
        gated.step()
    assert opt.param_groups[0]["lr"] == 0.25


def test_timm_scheduler_gets_applied_updates() -> None:
    """Before the first update it is not called: timm's value at update 0 need not be
    the rate that the bare loop begins with.
    """
    opt = make()
    gated = gradaccum.wrap(Positioned(opt))
    gated.step(0)
    for index in range(4):
        feed(opt)
        gated.step_update(num_updates=index + 1, metric=0.5)
    gated.step(1, 0.25)
    updates = [("update", number, 0.5) for number in (1, 1, 2)]
    assert gated.told == [("epoch", 0, None), *updates, ("epoch", 1, 0.25)]
    other = gradaccum.wrap(Positioned(make()))
    other.load_state_dict(gated.state_dict())
    assert other.told == gated.told
    assert not hasattr(gradaccum.wrap(Halving(opt)), "step_update")


def test_scheduler_follows_without_its_loop() -> None:
    """As between two windows that one flush closes; what needs an argument of the loop
    is left to the loop.
    """
    opt = make()
    kinds: list[Any] = [
        Halving(opt),
        Positioned(opt),
        lr_scheduler.ReduceLROnPlateau(opt),
    ]
    gates = [gradaccum.wrap(kind) for kind in kinds]
    feed(opt)
    feed(opt)
    for gate in gates * 2:
        gate.follow()
        gates[0].step()
    assert opt.param_groups[0]["lr"] == 0.5
    assert gates[1].told == [("update", 1, None)] * 2


@pytest.mark.parametrize(
    "kind",
    [lambda optimizer: lr_scheduler.StepLR(optimizer, 1), Halving],
    ids=["torch's", "own"],
)
def test_scheduler_on_bare_optimizer_is_refused(kind: Callable[[Any], Any]) -> None:
    bare = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(gradaccum.ArgumentTypeError, match="Wrap the optimizer first"):
        gradaccum.wrap(kind(bare))


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
    "first": lambda o: [
        gradaccum.wrap(lr_scheduler.ConstantLR(o, 0.5)),
        lr_scheduler.ExponentialLR(o, 0.9),
    ],
    "second": lambda o: [
        lr_scheduler.ConstantLR(o, 0.5),
        gradaccum.wrap(lr_scheduler.ExponentialLR(o, 0.9)),
    ],
    "nested": lambda o: [
        lr_scheduler.ConstantLR(o, 0.5),
        gradaccum.wrap(
            lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)])
        ),
    ],
}


@pytest.mark.parametrize("children", SEQUENCES)
def test_sequence_of_gated_schedulers_is_refused(children: str) -> None:
    """SequentialLR would repeat their first steps and count its milestones in
    micro-batches.
    """
    opt = make()
    with pytest.raises(gradaccum.UsageError, match=r"gradaccum\.wrap\(SequentialLR"):
        lr_scheduler.SequentialLR(opt, SEQUENCES[children](opt), milestones=[2])


def test_chain_of_gated_schedulers_works() -> None:
    opt = make()
    chain = lr_scheduler.ChainedScheduler(
        [
            gradaccum.wrap(lr_scheduler.ExponentialLR(opt, factor))
            for factor in (0.5, 0.25)
        ]
    )
    for _ in range(4):
        feed(opt)
        chain.step()
    assert opt.param_groups[0]["lr"] == 0.125**2


@pytest.mark.parametrize("older", [True, False])
def test_loaded_optimizer_does_not_move_gate(older: bool) -> None:
    """The optimizer loads a state, its gated scheduler does not."""
    opt, saved = make(), make()
    gated = gradaccum.wrap(lr_scheduler.StepLR(opt, 1, gamma=0.5))
    for _ in range(4):
        feed(opt if older else saved)
        gated.step()
    opt.load_state_dict(copy.deepcopy(saved.state_dict()))
    rate = opt.param_groups[0]["lr"]
    with (
        nullcontext()
        if older
        else pytest.warns(gradaccum.GradAccumWarning, match="moved nothing")
    ):
        gated.step()
    feed(opt)
    gated.step()
    assert opt.param_groups[0]["lr"] == rate
    feed(opt)
    gated.step()
    assert opt.param_groups[0]["lr"] == rate / 2


@pytest.mark.parametrize("gate_first", [True, False])
def test_pending_scheduler_step_survives_saving(gate_first: bool) -> None:
    """The states are saved after the update and before the scheduler's step, and loaded
    in either order.
    """
    opt, new = make(steps=1), make(steps=1)
    gated, fresh = (
        gradaccum.wrap(lr_scheduler.StepLR(o, 1, gamma=0.5)) for o in (opt, new)
    )
    feed(opt)
    pairs = [(fresh, gated.state_dict()), (new, opt.state_dict())]
    for target, state in pairs if gate_first else pairs[::-1]:
        target.load_state_dict(copy.deepcopy(state))
    fresh.step()
    assert new.param_groups[0]["lr"] == 0.5
    fresh.step()
    assert new.param_groups[0]["lr"] == 0.5
