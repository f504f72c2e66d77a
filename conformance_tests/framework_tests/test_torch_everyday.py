"""The everyday mistakes of a torch loop are refused by name, or said once, and loops
that look alike stay as they are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, StepLR
from torch.utils.checkpoint import checkpoint

import gradaccum
from gradaccum import ArgumentTypeError, GradAccumWarning, UsageError

from .torch_model import (
    X,
    by_place,
    loss_of,
    make,
    rows_of,
    same,
    train,
    values,
)

Said = Callable[[], list[str]]
Loop = Callable[[Any, Any], object]
"""What a loop does with its model and its optimizer."""


@pytest.fixture
def said() -> Iterator[Said]:
    """A function that returns what gradaccum has warned of in the test, none of it from
    a line of its own.
    """

    def texts() -> list[str]:
        ours = [each for each in caught if each.category is GradAccumWarning]
        assert not any("gradaccum_torch" in Path(each.filename).parts for each in ours)
        return [str(each.message) for each in ours]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GradAccumWarning)
        yield texts


# A step of the inner optimizer, and a second wrapper of it.


def test_inner_step_is_refused() -> None:
    """The wrapper's own updates go on."""
    model, opt = make(steps=2)
    train(model, opt, 3)
    before = values(model)
    with pytest.raises(
        UsageError, match=r"SGD\.step\(\)\. Write optimizer = gradaccum\.wrap\(SGD"
    ):
        opt.optimizer.step()
    assert same(model, before)
    train(model, opt, 1)
    assert opt.result.optimizer_step == 2


def test_base_optimizer_may_not_step() -> None:
    """As in SAM, whose own steps would bypass the window. An optimizer with groups of
    its own may.
    """
    inner: Any = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    inner.base = copy.copy(inner)
    inner.partner = torch.optim.SGD(nn.Linear(2, 1).parameters())
    opt = gradaccum.wrap(inner, steps=2)
    opt.partner.step()
    with pytest.raises(UsageError, match=r"inner optimizer's SGD.* such as SAM"):
        opt.base.step()


def test_inner_optimizer_is_free_again() -> None:
    """As a copy, or without its wrapper; a copy of the wrapper has its own."""
    model, opt = make()
    inner = opt.optimizer
    copied = copy.deepcopy(opt)
    copy.deepcopy(inner).step()
    with pytest.raises(UsageError, match="inner optimizer's SGD"):
        copied.optimizer.step()
    del opt
    inner.step()
    assert not inner._optimizer_step_pre_hooks
    assert not model[0].weight._post_accumulate_grad_hooks


def test_second_wrapper_is_refused() -> None:
    """Until the first one is gone, even if a caught error still refers to it."""
    model, opt = make()
    inner = opt.optimizer
    with pytest.raises(
        ArgumentTypeError, match=r"optimizer: .* not wrapped yet; got SGD"
    ):
        gradaccum.wrap(inner, steps=2)
    opt.itself = opt
    del opt
    again = gradaccum.wrap(inner, steps=2)
    train(model, again, 2)
    assert again.result.applied


# Backward passes and steps: none, and several.


@by_place
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [0, 1, 4])
def test_step_without_backward_is_refused(
    place: str, set_to_none: bool, micro_batches: int
) -> None:
    model, opt = make(place)
    for index in range(micro_batches):
        loss_of(model, rows_of(index)).backward()
        opt.step()
        opt.zero_grad(set_to_none)
    opt.zero_grad(set_to_none)
    with pytest.raises(UsageError, match=r"expected a backward pass.* CUDA graph"):
        opt.step()
    train(model, opt, 1)
    assert opt.result.micro_step == micro_batches % 4 + 1


WAYS: dict[str, Loop] = {
    "weight 0": lambda model, opt: opt.backward(loss_of(model), weight=0),
    "weigh": lambda model, opt: opt.weigh(1),
    "a loss of others": lambda model, opt: opt.backward(
        torch.ones((), requires_grad=True).square()
    ),
    "unfrozen": lambda model, opt: loss_of(model.requires_grad_(True)).backward(
        inputs=[model[0].weight]
    ),
}


@by_place
@pytest.mark.parametrize("way", WAYS)
def test_what_stands_for_a_backward_pass(place: str, way: str) -> None:
    model, opt = make(place)
    model[0].weight.requires_grad_(way != "unfrozen")
    for _ in range(4):
        WAYS[way](model, opt)
        opt.step()
    assert opt.result.optimizer_step + opt.result.skipped == 1


def test_closure_without_a_loss_is_left_out() -> None:
    """Lightning's closure returns None for a batch that `training_step` leaves out."""
    model, opt = make(steps=2)
    for x in opt.epoch([X[:1], X]):
        if len(x) == 1:
            opt.step(lambda: None)
        else:
            train(model, opt, 1)
    assert opt.result.optimizer_step == 1
    make(loss_scale=2.0)[1].step(lambda: None)
    with pytest.raises(UsageError, match="expected a backward pass"):
        opt.step(lambda: torch.ones(()))
    reference, other = make(steps=1)
    train(reference, other, 1)
    assert same(model, reference)


def test_pass_through_another_wrapper_stands_for_one() -> None:
    """One optimizer for each expert: a micro-batch may reach one of them only."""
    pairs = [make(steps=4) for _ in range(2)]
    for index in range(4):
        loss_of(pairs[index % 2][0]).backward()
        for _, opt in pairs:
            opt.step()
    for _, opt in pairs:
        assert opt.result.optimizer_step == 1
        with pytest.raises(UsageError, match="expected a backward pass"):
            opt.step()


@by_place
def test_leftovers_are_said_once(place: str, said: Said) -> None:
    """By the second step."""
    model, opt = make(place)
    for index in range(24):
        assert bool(said()) == (index >= 8)
        (loss_of(model, rows_of(index % 4)) / 4).backward()
        if (index + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
    (text,) = said()
    assert "`if (i + 1) % 4 == 0:`" in text
    assert "`loss / 4`" in text


def test_two_divided_losses_are_leftovers(said: Said) -> None:
    model, opt = make(steps=2)
    for _ in range(2):
        opt.backward(loss_of(model) / 2)
    opt.step()
    assert "`loss / 2`" in said()[0]


def losses(count: int, weighs: bool = False) -> Loop:
    """So many losses before each step, weighed before all of them."""

    def passes(model: nn.Module, opt: Any) -> None:
        if weighs:
            opt.weigh(2)
        for index in range(count):
            opt.backward(loss_of(model, rows_of(index)))

    return passes


def segments(model: nn.Module, opt: Any) -> None:
    """Each has a backward pass of its own inside the user's, and the first layer comes
    in two.
    """
    x = X.to(next(model.parameters()).dtype).requires_grad_()
    hidden, again = (checkpoint(model[0], each, use_reentrant=True) for each in (x, -x))
    checkpoint(model[2], hidden + again, use_reentrant=True).square().mean().backward()


SILENT_PASSES: dict[str, tuple[Any, Loop]] = {
    "two losses": (2, losses(2)),
    "segments of a checkpoint": (3, segments),
    "the caller's window": (None, losses(4)),
    "one weight for two losses": (None, losses(2, weighs=True)),
    "one weight for as many losses": (3, losses(3, weighs=True)),
}


@by_place
@pytest.mark.parametrize("kind", SILENT_PASSES)
def test_several_losses_of_a_micro_batch_say_nothing(
    place: str, kind: str, said: Said
) -> None:
    steps, passes = SILENT_PASSES[kind]
    model, opt = make(place, steps=steps)
    for _ in range(4):
        passes(model, opt)
        opt.step()
        opt.zero_grad()
    assert not said()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_two_weights_before_a_step_are_said_once(
    plain: bool, steps: int, said: Said
) -> None:
    """As of a service that has ``forward_backward`` n times for each ``step``."""
    model, opt = make(steps=steps, reduction="sum_per_item")
    for index in range(6):
        if plain:
            opt.weigh(2)
            loss_of(model).backward()
        else:
            opt.backward(loss_of(model), weight=2)
        if index % 2:
            opt.step()
    (text,) = said()
    assert "Each micro-batch needs its own step()" in text


# A loss that is still divided by the steps.


def squares(model: nn.Module) -> Tensor:
    return model(X).square()


def fourth_of_mean(model: nn.Module) -> Tensor:
    return loss_of(model) / 4


def fourth_of_sum(model: nn.Module) -> Tensor:
    return loss_of(model, reduction="sum") / 4


Divided = tuple[dict[str, Any], Callable[[nn.Module], Tensor]]
DIVIDED: dict[str, Divided] = {
    "a mean": ({}, fourth_of_mean),
    "multiplied": ({}, lambda model: 0.25 * loss_of(model)),
    "a sum per item": ({"reduction": "sum_per_item"}, fourth_of_sum),
}
NOT_DIVIDED: dict[str, Divided] = {
    "another number": ({}, lambda model: loss_of(model) / 8),
    "four items": ({}, fourth_of_sum),
    "a mean of four terms": (
        {},
        lambda model: sum(loss_of(model) for _ in range(4)) / 4,
    ),
    "before the mean": ({}, lambda model: (squares(model) / 4).mean()),
    "a sum": ({"reduction": "sum"}, fourth_of_mean),
    "a half square": ({"steps": 2}, lambda model: 0.5 * squares(model).mean()),
}


@pytest.mark.parametrize("kind", [*DIVIDED, *NOT_DIVIDED])
def test_division_by_the_steps_is_said_once(kind: str, said: Said) -> None:
    options, loss_fn = {**NOT_DIVIDED, **DIVIDED}[kind]
    model, opt = make(**options)
    for _ in range(8):
        opt.weigh(8)
        if kind == "multiplied":
            opt.scale(loss_fn(model)).backward()
        else:
            opt.backward(loss_fn(model))
        opt.step()
        assert len(said()) == (kind in DIVIDED)
    assert all("4 times too small:" in text for text in said())


# Schedulers and epochs.


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_ungated_scheduler_is_said_once(rate: Any, said: Said) -> None:
    model, opt = make(
        steps=2, inner=lambda ps: torch.optim.AdamW(ps, lr=rate, foreach=False)
    )
    scheduler = StepLR(opt, step_size=1, gamma=0.9)
    for _ in range(8):
        train(model, opt, 1)
        scheduler.step()
    (text,) = said()
    assert "gradaccum.wrap(scheduler)" in text


def test_rates_that_move_between_windows_say_nothing(said: Said) -> None:
    """A gated scheduler, one that is called late, once per epoch after a flush, and a
    loaded state.
    """
    model, opt = make(steps=2)
    scheduler = gradaccum.wrap(LinearLR(opt, total_iters=100))
    saved = copy.deepcopy(opt.state_dict())
    for _ in range(3):
        for x in opt.epoch([0, 1, 2]):
            train(model, opt, 1)
            if x:
                scheduler.step()
        opt.param_groups[0]["lr"] *= 0.9
    model, opt = make(steps=2)
    train(model, opt, 1)
    opt.load_state_dict(saved)
    train(model, opt, 2)
    assert not said()


def halving(opt: Any) -> Any:
    return gradaccum.wrap(StepLR(opt, step_size=1, gamma=0.5))


@pytest.mark.parametrize("replays", [True, False])
def test_scheduler_that_is_replayed_by_hand_is_said_once(
    replays: bool, said: Said
) -> None:
    """Its steps move nothing, and its own state would have brought 0.5 * 0.5^2. A
    schedule that begins anew is silent.
    """
    model, opt = make(steps=2)
    scheduler = halving(opt)
    for _ in range(4):
        train(model, opt, 1)
        scheduler.step()
    saved = copy.deepcopy([opt.state_dict(), scheduler.state_dict()])
    model, opt = make(steps=2)
    resumed = halving(opt)
    opt.load_state_dict(saved[0])
    if not replays:
        train(model, opt, 1)
        resumed.step()
        assert not said()
        return
    for _ in range(opt.result.optimizer_step):
        resumed.step()
    assert resumed.last_epoch == 0
    (text,) = said()
    assert "scheduler.load_state_dict(saved)" in text
    resumed.load_state_dict(saved[1])
    assert resumed.last_epoch == 2
    assert resumed.get_last_lr() == [0.5**3]


@pytest.mark.parametrize("weight", [None, 2])
def test_unequal_sizes_without_weights_are_said_once(
    weight: int | None, said: Said
) -> None:
    """Each counts the same: not the large batch, and nothing else would tell. A second
    pass says nothing, nor do sums or weights.
    """
    batches = [{"x": torch.ones(size, 3), "id": size} for size in (3, 3, 2)]
    for options, passed in (({}, 1), ({"reduction": "sum"}, weight), ({}, weight)):
        assert not said()
        model, opt = make(**options)
        for _ in range(2):
            for batch in opt.epoch(batches):
                opt.backward(model(batch["x"]).square().mean(), weight=passed)
                opt.step()
    (text,) = said()
    assert "3 and 2 items" in text
    assert ("number of keys" in text) == (weight == 2)


def test_updates_are_counted_from_here() -> None:
    model, opt = make(steps=[(0, 2), (2, 4)])
    train(model, opt, 5)
    assert (opt.updates_in(3), opt.updates_in(7)) == (1, 2), "one is there already"
