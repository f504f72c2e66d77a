"""Learning-rate schedulers on a wrapped optimizer, gated and not."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

import gradaccum


def bare() -> torch.optim.Optimizer:
    return SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)


def make(steps: Any = 2) -> Any:
    return gradaccum.wrap(bare(), steps=steps)


def feed(opt: Any, value: float = 1.0) -> None:
    (opt.param_groups[0]["params"][0] * value).sum().backward()
    opt.step()
    opt.zero_grad()


def rate(opt: Any) -> float:
    return opt.param_groups[0]["lr"]


def step_lr(opt: Any) -> Any:
    return lr_scheduler.StepLR(opt, 1, gamma=0.5)


def halving(opt: Any) -> Any:
    """Gated."""
    return gradaccum.wrap(step_lr(opt))


KINDS: dict[str, Any] = {
    "StepLR": step_lr,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
            lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("options", [{"steps": 4}, {"clip_norm": 1.0}])
def test_options_beside_a_scheduler_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match="no options when wrapping"):
        gradaccum.wrap(step_lr(make()), **options)


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter:UserWarning"
)  # SequentialLR itself passes one, before torch 2.8.
@pytest.mark.parametrize("kind", KINDS)
def test_gated_scheduler_moves_once_per_update(kind: str) -> None:
    other = bare()
    expected = KINDS[kind](other)
    opt = make()
    gated = gradaccum.wrap(KINDS[kind](opt))
    gated.step()
    assert isinstance(gated, lr_scheduler.LRScheduler)
    for update in range(4):
        for _ in range(2):
            assert rate(opt) == rate(other), update
            feed(opt)
            gated.step()
        other.step()
        expected.step()
    assert gated.get_last_lr() == expected.get_last_lr()


def test_gated_plateau_reads_metrics_at_updates() -> None:
    opt = make()
    gated = gradaccum.wrap(lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.5))
    for metric in (1.0, 2.0, 9.0, 2.0, 9.0):
        feed(opt)
        gated.step(metric)
    assert (gated.num_bad_epochs, rate(opt)) == (1, 1.0)
    feed(opt)
    metric = torch.tensor(2.0)
    kept = weakref.ref(metric)
    gated.step(metrics=metric)
    assert rate(opt) == 0.5
    del metric
    assert kept() is None, "with the graph of a loss"


@pytest.mark.parametrize(("places", "count"), [("012", 5), ("2", 2), ("3", 2)])
def test_flush_steps_only_a_scheduler_of_updates(places: str, count: int) -> None:
    """Not one that is called once per epoch."""
    opt = make([(0, 2), (2, 1)])
    gated = halving(opt)
    for _ in range(2):
        for index in opt.epoch("012"):
            feed(opt)
            if index in places:
                gated.step()
        if "3" in places:
            gated.step()
    assert rate(opt) == 0.5**count


def test_flush_repeats_the_argument_of_the_scheduler() -> None:
    """As torch documents for `CosineAnnealingWarmRestarts`."""
    opt = make()
    gated = gradaccum.wrap(lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=2))
    for index in opt.epoch(range(3)):
        feed(opt)
        gated.step(index / 3)
    assert rate(opt) == 0.75


class Positioned:
    """A scheduler like timm's: the caller passes the number of updates or of epochs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.told: list[tuple[Any, ...]] = []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.told.append(("epoch", epoch, metric))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.told.append(("update", num_updates, metric))


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


# Saved and loaded.


@pytest.mark.parametrize("gate_first", [True, False])
def test_pending_scheduler_step_survives_saving(gate_first: bool) -> None:
    """The states are saved after the update and before the scheduler's step, and loaded
    in either order.
    """
    opt, new = make(steps=1), make(steps=1)
    gated, fresh = halving(opt), halving(new)
    feed(opt)
    pairs = [(fresh, gated.state_dict()), (new, opt.state_dict())]
    for target, state in pairs if gate_first else pairs[::-1]:
        target.load_state_dict(copy.deepcopy(state))
    for _ in range(2):
        fresh.step()
        assert rate(new) == 0.5
