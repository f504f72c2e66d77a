"""The everyday mistakes of a torch loop are refused by name, or said once, and loops
that look alike stay as they are.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
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
from conformance_tests.framework_tests.torch_model import (
    CAUSES,
    X,
    Y,
    by_place,
    clip,
    loss_of,
    make,
    make_model,
    rows_of,
    same,
    train,
    values,
    zero,
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
        own = [
            each
            for each in caught
            if issubclass(each.category, gradaccum.GradAccumWarning)
        ]
        assert not any("gradaccum_torch" in Path(each.filename).parts for each in own)
        return [str(each.message) for each in own]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gradaccum.GradAccumWarning)
        yield texts


# A step of the inner optimizer, and a second wrapper of it.


@pytest.mark.parametrize("fused", [False, True])
def test_inner_step_is_refused(fused: bool) -> None:
    """The wrapper's own updates go on, and keep the kernel that divides by itself."""
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.5, fused=fused)
    opt = gradaccum.wrap(inner, steps=2)
    train(model, opt, 3)
    before = values(model)
    scheduler = StepLR(inner, 1)
    for call in (
        inner.step,
        lambda: inner.step(lambda: 1.0),
        lambda: torch.amp.GradScaler("cpu", enabled=False).step(inner),
    ):
        with pytest.raises(
            gradaccum.UsageError,
            match=r"AdamW\.step\(\)\. Write optimizer = gradaccum\.wrap\(AdamW",
        ):
            call()
    assert same(model, before)
    train(model, opt, 1)
    assert opt.result.optimizer_step == 2
    del scheduler


class HandedOn(torch.optim.SGD):
    """An optimizer whose state is everything that it has, hooks too."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.mark.parametrize("kind", [torch.optim.SGD, HandedOn])
def test_inner_optimizer_is_free_again(kind: type[torch.optim.SGD]) -> None:
    """Without its wrapper, or as a copy; a copy of the wrapper has an inner optimizer
    of its own.
    """
    inner = kind(make_model().parameters(), lr=0.5)
    opt = gradaccum.wrap(inner, steps=2)
    for other in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        other.step()
    copied = copy.deepcopy(opt)
    with pytest.raises(gradaccum.UsageError, match="inner optimizer's own"):
        copied.optimizer.step()
    del opt
    inner.step()
    assert not inner._optimizer_step_pre_hooks


def test_second_wrapper_is_refused() -> None:
    """Until the first one is gone, even if a caught error still refers to it."""
    model, opt = make()
    inner = opt.optimizer
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"optimizer: .* living wrapper .* SGD"
    ):
        gradaccum.wrap(inner, steps=2)
    train(model, opt, 4)
    assert opt.result.applied
    opt.itself = opt
    gc.disable()
    try:
        del opt
        again = gradaccum.wrap(inner, steps=2)
    finally:
        gc.enable()
    train(model, again, 2)
    assert again.result.applied


# Backward passes and steps: none, and several.


class Failing(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError


@by_place
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("before", [0, 1])
def test_step_after_a_backward_pass_that_raised_is_refused(
    place: str, reentrant: bool, before: int
) -> None:
    """It would count a micro-batch without its gradient, or with a part of it. The
    segment of a reentrant checkpoint that came first has ended its own pass.
    """
    model, opt = make(place)
    train(model, opt, before)
    hidden = model[:2](X.clone().requires_grad_())
    out = checkpoint(model[2], Failing.apply(hidden), use_reentrant=reentrant)
    with pytest.raises(MemoryError):
        opt.backward(nn.functional.cross_entropy(out, Y))
    with pytest.raises(gradaccum.UsageError, match="backward"):
        opt.step()
    assert opt.result.micro_step == before


@by_place
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [0, 1, 4, 5])
def test_step_without_backward_is_refused(
    place: str, set_to_none: bool, micro_batches: int
) -> None:
    model, opt = make(place)
    for index in range(micro_batches):
        loss_of(model, rows_of(index % 4)).backward()
        opt.step()
        opt.zero_grad(set_to_none)
    opt.zero_grad(set_to_none)
    before = opt.result
    with pytest.raises(
        gradaccum.UsageError, match=r"step\(\): expected a backward pass"
    ):
        opt.step()
    assert opt.result == before
    train(model, opt, 1)
    assert opt.result.micro_step == micro_batches % 4 + 1


def by_unfrozen(model: nn.Module, opt: Any) -> None:
    model[0].weight.requires_grad_(True)
    loss_of(model).backward(inputs=[model[0].weight])


WAYS: dict[str, Loop] = {
    "weight 0": lambda model, opt: opt.backward(loss_of(model), weight=0),
    "weigh": lambda model, opt: opt.weigh(1),
    "a loss of others": lambda model, opt: opt.backward(
        torch.ones((), requires_grad=True).square()
    ),
    "unfrozen": by_unfrozen,
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
    opt.step(lambda: None)
    train(model, opt, 1)
    assert opt.result.applied
    reference = make_model()
    loss_of(reference, rows_of(0)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    assert same(model, reference)
    with pytest.raises(gradaccum.UsageError, match="expected a backward pass"):
        opt.step(lambda: torch.ones(()))


@pytest.mark.parametrize("how", ["assigned", "written", "of zeros"])
@pytest.mark.parametrize("options", [{"separate_sums": True}, {"steps": 1}], ids=str)
def test_gradients_of_ones_own_count(how: str, options: dict[str, Any]) -> None:
    """With separate sums they may be assigned or written into the same memory; with one
    step they may be assigned.
    """
    model, opt = make(**options)
    for index in range(5):
        gradients = torch.autograd.grad(
            loss_of(model, rows_of(index % 4)), list(model.parameters())
        )
        if how == "written":
            opt.zero_grad(set_to_none=False)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            if how == "written" and p.grad is not None:
                p.grad.data.copy_(gradient)
            else:
                p.grad = gradient * (how != "of zeros")
        opt.step()
    assert opt.result.optimizer_step == (5 if "steps" in options else 1)


def test_pass_through_another_wrapper_stands_for_one() -> None:
    """One optimizer for each expert: a micro-batch may reach one of them only."""
    experts = [nn.Linear(3, 1) for _ in range(2)]
    opts = [
        gradaccum.wrap(torch.optim.SGD(expert.parameters(), lr=0.5), steps=4)
        for expert in experts
    ]
    for index in range(4):
        experts[index % 2](X).sum().backward()
        for opt in opts:
            opt.step()
    assert [opt.result.optimizer_step for opt in opts] == [1, 1]
    for opt in opts:
        with pytest.raises(gradaccum.UsageError, match="expected a backward pass"):
            opt.step()


@by_place
@pytest.mark.parametrize("own", [False, True])
def test_leftovers_are_said_once(place: str, own: bool, said: Said) -> None:
    """By the second step."""
    model, opt = make(place)
    for index in range(40):
        assert bool(said()) == (index >= 8)
        loss = loss_of(model, rows_of(index % 4)) / 4
        opt.backward(loss) if own else loss.backward()
        if (index + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
    (text,) = said()
    assert "`if (i + 1) % 4 == 0:`" in text
    assert "`loss / 4`" in text


@by_place
@pytest.mark.parametrize("passes", [1, 4])
def test_segments_of_a_reentrant_checkpoint_are_one_pass(
    place: str, passes: int, said: Said
) -> None:
    """Each segment has a backward pass of its own inside the user's, of which four for
    each step are leftovers all the same.
    """
    model, opt = make(place)
    for index in range(16):
        rows = rows_of(index % 4)
        x = X[rows].clone().requires_grad_()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True)
        nn.functional.cross_entropy(x, Y[rows]).backward()
        if index % passes == passes - 1:
            opt.step()
            opt.zero_grad()
    assert [text[:52] for text in said()] == (
        ["gradaccum: each step() came after 4 backward passes "] if passes == 4 else []
    )


def each_of(count: int, way: Callable[[Any, Tensor], object]) -> Loop:
    """`way`, with the optimizer and a loss, for so many losses before each step."""

    def passes(model: nn.Module, opt: Any) -> None:
        for index in range(count):
            way(opt, loss_of(model, rows_of(index)))

    return passes


def plain(opt: Any, loss: Tensor) -> None:
    loss.backward()


SILENT_PASSES: dict[str, tuple[Any, Loop]] = {
    "two losses": (2, each_of(2, plain)),
    "a window of one": (1, each_of(4, plain)),
    "the caller's window": (None, each_of(4, plain)),
    "one weight for two losses": (
        None,
        lambda model, opt: (
            opt.weigh(2),
            each_of(2, lambda opt, loss: opt.backward(loss))(model, opt),
        ),
    ),
    "a weight and none": (
        None,
        lambda model, opt: (
            opt.backward(loss_of(model), weight=2),
            opt.backward(loss_of(model), weight=None),
        ),
    ),
    "one weight, said before and with": (
        None,
        lambda model, opt: (opt.weigh(2), opt.backward(loss_of(model), weight=2)),
    ),
    "one weight, said with and after": (
        None,
        lambda model, opt: (opt.backward(loss_of(model), weight=2), opt.weigh(2)),
    ),
    "a batch that is dropped, and the next": (
        None,
        lambda model, opt: (
            opt.backward(loss_of(model), weight=2),
            opt.discard(),
            opt.backward(loss_of(model), weight=2),
        ),
    ),
}


@by_place
@pytest.mark.parametrize("kind", SILENT_PASSES)
def test_several_losses_of_a_micro_batch_say_nothing(
    place: str, kind: str, said: Said
) -> None:
    steps, passes = SILENT_PASSES[kind]
    model, opt = make(place, steps=steps)
    for _ in range(8):
        passes(model, opt)
        opt.step()
        opt.zero_grad()
    assert not said()


def test_pass_whose_gradients_are_dropped_is_no_leftover(said: Said) -> None:
    """Of every four batches the loop leaves out three."""
    model, opt = make("kept apart")
    for index in range(16):
        loss_of(model, rows_of(index % 4)).backward()
        if index % 4 == 3:
            opt.step()
        opt.zero_grad()
    assert not said()


WEIGHED_TWICE: dict[str, Loop] = {
    "with the loss": each_of(2, lambda opt, loss: opt.backward(loss, weight=2)),
    "before it": each_of(2, lambda opt, loss: (opt.weigh(2), opt.backward(loss))),
    "before and with": each_of(
        2, lambda opt, loss: (opt.weigh(2), opt.backward(loss, weight=2))
    ),
    "scaled": each_of(2, lambda opt, loss: (opt.weigh(2), opt.scale(loss).backward())),
    "plain": each_of(2, lambda opt, loss: (opt.weigh(2), loss.backward())),
}


@by_place
@pytest.mark.parametrize("kind", WEIGHED_TWICE)
@pytest.mark.parametrize("steps", [1, None, 4])
def test_two_weights_before_a_step_are_said_once(
    place: str, kind: str, steps: Any, said: Said
) -> None:
    """As of a service that has ``forward_backward`` n times for each ``step``."""
    reduction = "sum_per_item" if kind == "plain" else "mean"
    model, opt = make(place, steps=steps, reduction=reduction)
    for _ in range(3):
        WEIGHED_TWICE[kind](model, opt)
        opt.step()
        opt.zero_grad()
    (text,) = said()
    assert "Each micro-batch needs a step() of its own" in text


# A loss that is still divided by the steps.


def cross_entropy(model: nn.Module, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(model(X), Y, **options)


def squares(model: nn.Module) -> Tensor:
    return model(X).square()


def fourth_of_mean(model: nn.Module) -> Tensor:
    return cross_entropy(model) / 4


def fourth_of_sum(model: nn.Module) -> Tensor:
    return cross_entropy(model, reduction="sum") / 4


Divided = tuple[dict[str, Any], Callable[[nn.Module], Tensor]]
DIVIDED: dict[str, Divided] = {
    "a mean": ({}, fourth_of_mean),
    "in place": ({}, lambda model: cross_entropy(model).div_(4)),
    "multiplied": ({}, lambda model: 0.25 * cross_entropy(model)),
    "several terms": (
        {},
        lambda model: (cross_entropy(model) + squares(model).mean()) / 4,
    ),
    "a mean by hand": (
        {},
        lambda model: cross_entropy(model, reduction="sum") / len(X) / 4,
    ),
    "a sum per item": ({"reduction": "sum_per_item"}, fourth_of_sum),
    "a schedule": ({"steps": [(0, 4), (1, 2)]}, fourth_of_mean),
}
NOT_DIVIDED: dict[str, Divided] = {
    "another number": ({}, lambda model: cross_entropy(model) / 8),
    "a tensor": ({}, lambda model: cross_entropy(model) / torch.tensor(4.0)),
    "four items": ({}, fourth_of_sum),
    "four rows": ({}, lambda model: squares(model).sum() / 4),
    "half a square": ({}, lambda model: 0.5 * squares(model).sum() / 4),
    "sums of two kinds": (
        {},
        lambda model: (
            (cross_entropy(model, reduction="sum") - squares(model).sum()) / 4
        ),
    ),
    "a mean of four terms": (
        {},
        lambda model: sum(cross_entropy(model) for _ in range(4)) / 4,
    ),
    "before the mean": ({}, lambda model: (squares(model) / 4).mean()),
    "a term": ({}, lambda model: cross_entropy(model) + squares(model).mean() / 4),
    "no graph": ({}, lambda model: torch.ones((), requires_grad=True)),
    "a sum": ({"reduction": "sum"}, fourth_of_mean),
    "a window of one": ({"steps": 1}, fourth_of_mean),
    "the caller's window": ({"steps": None}, fourth_of_mean),
    "a short window first": ({"steps": [(0, 2), (1, 4)]}, fourth_of_mean),
    "a window of two": ({"steps": 2}, fourth_of_mean),
    "a half square": ({"steps": 2}, lambda model: 0.5 * squares(model).mean()),
    "a GAN's two losses": (
        {"steps": 2},
        lambda model: (cross_entropy(model) + squares(model).mean()) / 2,
    ),
}


@pytest.mark.parametrize("call", ["backward", "scale"])
@pytest.mark.parametrize("kind", [*DIVIDED, *NOT_DIVIDED])
def test_division_by_the_steps_is_said_once(kind: str, call: str, said: Said) -> None:
    options, loss_fn = {**NOT_DIVIDED, **DIVIDED}[kind]
    model, opt = make(**options)
    for _ in range(8):
        opt.weigh(8)
        if call == "backward":
            opt.backward(loss_fn(model))
        else:
            opt.scale(loss_fn(model)).backward()
        opt.step()
        assert len(said()) == (kind in DIVIDED)
    for text in said():
        assert "delete the division" in text
        assert "4 times too small" in text


def test_division_is_not_looked_for_after_the_first_window(said: Said) -> None:
    model, opt = make()
    for index in range(8):
        loss = cross_entropy(model)
        opt.backward(loss / 4 if index > 3 else loss)
        opt.step()
    assert not said()


# Parameters that change inside a window.


def load_others(model: nn.Module, opt: Any) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def each_parameter(change: Callable[[Tensor], object]) -> Loop:
    @torch.no_grad()
    def loop(model: nn.Module, opt: Any) -> None:
        for parameter in model.parameters():
            change(parameter)

    return loop


CHANGES = [load_others, each_parameter(lambda p: p.mul_(1 - 1e-4))]


@by_place
@pytest.mark.parametrize("change", CHANGES, ids=["loaded", "decayed"])
@pytest.mark.parametrize("end", ["step", "flush"])
def test_change_of_the_model_in_a_window_is_said_once(
    place: str, change: Loop, end: str, said: Said
) -> None:
    model, opt = make(place)
    for _ in range(2):
        train(model, opt, 2)
        change(model, opt)
        train(model, opt, 2 if end == "step" else 1)
        opt.flush()
    assert opt.result.optimizer_step == 2
    (text,) = said()
    assert "parameters changed inside a window" in text


@pytest.mark.parametrize("masters", [False, True])
def test_change_of_a_half_precision_model_is_said(masters: bool, said: Said) -> None:
    model = make_model().bfloat16()
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), steps=2, master_weights=masters
    )
    for change in (False, True):
        for index in range(2):
            if change and index:
                load_others(model, opt)
            model(X.bfloat16()).square().sum().backward()
            opt.step()
        assert len(said()) == change


def test_change_is_said_of_a_model_whose_memory_was_replaced(said: Said) -> None:
    """As ``model.to(device)`` does."""
    model, opt = make()
    train(model, opt, 4)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    train(model, opt, 6)
    assert not said()
    load_others(model, opt)
    train(model, opt, 2)
    assert len(said()) == 1


def in_and_out(change: Loop, back: Loop) -> Loop:
    """Validation with other values, as with averaged weights or schedulefree's."""

    def loop(model: nn.Module, opt: Any) -> None:
        change(model, opt)
        model(X)
        back(model, opt)

    return loop


@torch.no_grad()
def average_in_and_out(model: nn.Module, opt: Any) -> None:
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({k: 0.9 * v for k, v in own.items()})
    model(X)
    model.load_state_dict(own)


def resume(model: nn.Module, opt: Any) -> None:
    saved = copy.deepcopy(opt.state_dict())
    load_others(model, opt)
    opt.load_state_dict(saved)


KEEPS: dict[str, Loop] = {
    "average": average_in_and_out,
    "round": in_and_out(
        each_parameter(lambda p: p.mul_(0.7)), each_parameter(lambda p: p.div_(0.7))
    ),
    "perturb": in_and_out(
        each_parameter(lambda p: p.add_(0.05)), each_parameter(lambda p: p.sub_(0.05))
    ),
    "clamp": each_parameter(lambda p: p.clamp_(-0.3, 0.3)),
    "roll back": lambda model, opt: (load_others(model, opt), opt.discard()),
    "resume": resume,
    "close": lambda model, opt: (opt.flush(), load_others(model, opt)),
}


@by_place
@pytest.mark.parametrize("change", KEEPS)
def test_model_that_is_itself_again_says_nothing(
    place: str, change: str, said: Said
) -> None:
    model, opt = make(place)
    for _ in range(8):
        train(model, opt, 1)
        KEEPS[change](model, opt)
    opt.flush()
    assert opt.result.optimizer_step or change == "roll back"
    assert not said()


@pytest.mark.parametrize("steps", [1, 4])
def test_model_that_changes_itself_says_nothing(steps: int, said: Said) -> None:
    """An embedding that normalizes the rows it reads, a weight norm, a parametrization
    and a recomputed layer.
    """
    torch.manual_seed(0)
    table = nn.Embedding(8, 3, max_norm=0.5)
    model = nn.Sequential(
        table,
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1)),
    )
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=steps)
    for rows in torch.arange(8).repeat(3).split(2):
        hidden = checkpoint(model[1], table(rows), use_reentrant=False)
        model[2:](hidden).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert opt.result.optimizer_step == 12 // steps
    assert not said()


# Schedulers and epochs.


@pytest.mark.parametrize("in_tensor", [False, True])
@pytest.mark.parametrize("on", ["wrapper", "inner", "by hand"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_ungated_scheduler_is_said_once(in_tensor: bool, on: str, said: Said) -> None:
    model = make_model()
    rate = torch.tensor(0.5) if in_tensor else 0.5
    inner = torch.optim.AdamW(
        model.parameters(), lr=rate, foreach=False, capturable=False
    )
    opt = gradaccum.wrap(inner, steps=2)

    def by_hand() -> None:
        opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"] * 0.9

    move = by_hand
    if on != "by hand":
        move = StepLR(opt if on == "wrapper" else inner, step_size=1, gamma=0.9).step
    for _ in range(8):
        train(model, opt, 1)
        move()
    (text,) = said()
    assert "gradaccum.wrap(scheduler)" in text


def test_rates_that_move_between_windows_say_nothing(said: Said) -> None:
    """A gated scheduler, one that is called late, once per epoch after a flush, a new
    group, and a loaded state.
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
    train(model, opt, 1)
    scheduler.step()
    train(model, opt, 2)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 7.0})
    train(model, opt, 2)
    other_model, other = make(steps=2)
    train(other_model, other, 1)
    other.load_state_dict(saved)
    train(other_model, other, 2)
    assert not said()


def halving(opt: Any) -> Any:
    return gradaccum.wrap(StepLR(opt, step_size=1, gamma=0.5))


@pytest.mark.parametrize("built", ["before the load", "after it"])
def test_scheduler_that_is_replayed_by_hand_is_said_once(
    built: str, said: Said
) -> None:
    """Its steps move nothing, and its own state would have brought 0.5 * 0.5^4."""
    model, opt = make(steps=2)
    scheduler = halving(opt)
    for _ in range(8):
        train(model, opt, 1)
        scheduler.step()
    saved = copy.deepcopy([opt.state_dict(), scheduler.state_dict()])
    _, other = make(steps=2)
    if built == "before the load":
        resumed = halving(other)
    other.load_state_dict(saved[0])
    if built == "after it":
        resumed = halving(other)
    for _ in range(other.result.optimizer_step):
        resumed.step()
    assert resumed.last_epoch == 0
    (text,) = said()
    assert "scheduler.load_state_dict(saved)" in text
    resumed.load_state_dict(saved[1])
    assert (resumed.last_epoch, resumed.get_last_lr()) == (4, [0.5**5])


@pytest.mark.parametrize("loads", ["both", "gate first", "optimizer", "before updates"])
@pytest.mark.parametrize("first", ["optimizer", "scheduler"])
def test_resumed_loop_with_a_scheduler_says_nothing(
    loads: str, first: str, said: Said
) -> None:
    """With its state; and with a schedule that begins anew, stepped after the
    optimizer.
    """
    model, opt = make(steps=2)
    scheduler = halving(opt)
    for _ in range(0 if loads == "before updates" else 5):
        train(model, opt, 1)
        scheduler.step()
    saved = copy.deepcopy([opt.state_dict(), scheduler.state_dict()])
    model, opt = make(steps=2)
    scheduler = halving(opt)
    if loads == "gate first":
        scheduler.load_state_dict(saved[1])
    opt.load_state_dict(saved[0])
    if loads == "both":
        scheduler.load_state_dict(saved[1])
    comes_first = first == "scheduler" and loads != "optimizer"
    for _ in range(5):
        if comes_first:
            scheduler.step()
        train(model, opt, 1)
        if not comes_first:
            scheduler.step()
    assert not said()


def test_unequal_sizes_without_weights_are_said_once(said: Said) -> None:
    """Each counts the same: not the large batch, and nothing else would tell. A second
    pass says nothing, nor do sums or weights.
    """
    model = nn.Linear(2, 1)
    for options, weight in (({}, 1), ({"reduction": "sum"}, None), ({}, None)):
        assert not said()
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1), steps=4, **options
        )
        for _ in range(2):
            for batch in opt.epoch([{"x": torch.ones(size, 2)} for size in (3, 3, 2)]):
                opt.backward(model(batch["x"]).square().mean(), weight=weight)
                opt.step()
        del opt
    (text,) = said()
    assert "3 and 2 items" in text


def test_updates_are_counted_from_here() -> None:
    model, opt = make(steps=[(0, 2), (2, 4)])
    assert opt.updates_in(range(10)) == 2 + 2
    assert opt.updates_in(10, epochs=2) == 2 + 2 + 3
    for _ in opt.epoch(range(10)):
        train(model, opt, 1)
    assert opt.result.optimizer_step == 4
    assert opt.updates_in(10) == 3
    for _ in opt.epoch(range(1), carry=True):
        train(model, opt, 1)
    assert opt.result.micro_step == 1
    assert (opt.updates_in(3), opt.updates_in(4)) == (1, 2), "one is there already"
    with pytest.raises(gradaccum.ArgumentTypeError, match="steps: expected"):
        make(steps=None)[1].updates_in(10)
    with pytest.raises(
        gradaccum.ArgumentTypeError, match="progress: expected True or False"
    ):
        opt.epoch([], progress=1)


# The likeliest cause of a changed gradient.


FIXES = {*CAUSES.values(), "parameters of its own", "module="}


@pytest.mark.parametrize("change", CAUSES)
@pytest.mark.parametrize("then", ["nothing", "a backward pass"])
def test_change_of_grad_names_its_likeliest_cause(
    change: Callable[..., None], then: str
) -> None:
    """After zeros that autograd has added to, nobody can tell a clear from a clip."""
    model, opt = make()
    train(model, opt, 1)
    loss_of(model).backward()
    opt.step()
    change(model)
    if then != "nothing":
        loss_of(model).backward()
    with pytest.raises(gradaccum.UsageError) as caught:
        opt.step() if then != "nothing" else opt.flush()
    named = {fix for fix in FIXES if re.search(fix, str(caught.value))}
    assert named == {CAUSES[clip if change is zero and then != "nothing" else change]}
    assert len(str(caught.value)) < 550


def test_two_optimizers_over_the_same_parameters_are_named() -> None:
    """The update of the first frees the gradients that the second has summed."""
    model = make_model()
    first = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    second = gradaccum.wrap(torch.optim.AdamW(model.parameters(), lr=0.5), steps=4)
    for index in range(2):
        loss_of(model, rows_of(index)).backward()
        if index == 0:
            second.step()
        first.step()
    with pytest.raises(gradaccum.UsageError, match="another wrapped optimizer has too"):
        second.step()
