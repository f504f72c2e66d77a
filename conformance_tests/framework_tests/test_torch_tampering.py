"""The wrapper catches a change to ``.grad`` at the next ``step``, never takes
autograd's own writes for one, and leaves ``.grad`` alone where it may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradaccum
from gradaccum import UsageError

from .torch_model import (
    MAKERS,
    PLACES,
    assign,
    by_place,
    clear,
    clip,
    same,
    values,
    zero,
)

X = torch.arange(6, dtype=torch.float32).reshape(2, 3)
LIMIT = 1.0
WATCHED = [place for place in PLACES if place != "separate"]
Change = Callable[[Any], object]
CHANGED = r"opt\.discard\(\).*clip_norm=.*opt\.result\.grad_norm.*opt\.zero_grad\(\)"


class Branches(nn.Module):
    """Two branches, of which a micro-batch uses one. The left one has the smallest
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(3, 1)
        self.right = nn.Linear(3, 2)

    def forward(self, *sides: str) -> Tensor:
        x = X.to(self.left.weight.dtype)
        return sum(getattr(self, side)(x).float().square().sum() for side in sides)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(MAKERS["sgd"](model.parameters()), **{"steps": 2, **options})


def make(place: str = "in .grad", **options: Any) -> tuple[Branches, Any]:
    options = {**PLACES[place], **options}
    model = Branches().to(options.pop("dtype", torch.float32))
    return model, wrapped(model, **options)


def train(model: nn.Module, opt: Any, micro_batches: int) -> None:
    for _ in range(micro_batches):
        (model("left", "right") * 0.01).backward()
        opt.step()
        opt.zero_grad()


def limit(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), LIMIT)


def log_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), math.inf)


def clip_weight(model: Any) -> None:
    clip_grad_norm_(model.right.weight, 1e-4)


def clip_bias(model: Any) -> None:
    clip_grad_norm_(model.right.bias, 1e-4)


# Changes.


@pytest.mark.parametrize("windows", [0, 2])
@pytest.mark.parametrize("micro_batches", [0, 2])
@pytest.mark.parametrize(
    ("place", "change"),
    [
        *product(WATCHED, (clip, assign, log_norm)),
        *product(("in .grad", "kept apart"), (clip_weight, clip_bias)),
    ],
)
def test_change_before_step_is_caught(
    place: str, windows: int, micro_batches: int, change: Change
) -> None:
    """Also where the smallest parameter has no gradient. What was accumulated stays
    until `discard`.
    """
    model, opt = make(place, steps=3)
    model("left").backward()
    opt.discard()
    train(model, opt, 3 * windows + micro_batches)
    for _ in range(1 + micro_batches):  # Of one or three losses.
        model("right").backward()
    change(model)
    with pytest.raises(UsageError, match=CHANGED):
        opt.step()
    opt.discard()
    train(model, opt, 3)
    assert opt.result.applied


@pytest.mark.parametrize("change", [clip, clear, zero, assign])
@pytest.mark.parametrize("side", ["left", "right"])
def test_change_after_step_is_caught(change: Change, side: str) -> None:
    model, opt = make(steps=3)
    model(side).backward()
    opt.step()
    change(model)
    calls = [opt.state_dict, opt.flush]
    if change is not clear:  # Then no gradient is left to see.
        calls.append(opt.step)
    for call in calls:
        with pytest.raises(UsageError, match=CHANGED):
            call()
    model(side).backward()
    with pytest.raises(UsageError, match=CHANGED):
        opt.step()


@pytest.mark.parametrize(
    "options",
    [{"loss_scale": 2.0, "steps": 1}, {"steps": gradaccum.until_weight(2)}],
    ids=str,
)
def test_clipping_another_gradient_is_refused(options: dict[str, Any]) -> None:
    """``.grad`` holds a scaled gradient, or one of a window that ends only perhaps."""
    model, opt = make(**options)
    opt.backward(model("left"), weight=1)
    clip(model)
    with pytest.raises(UsageError, match="clip_norm="):
        opt.step()


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_foreign_grad_scaler_touches_no_gradient(call: str) -> None:
    """A scaler that `wrap` was not given is refused before it changes a gradient."""
    model, opt = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model("left")).backward()
    before = model.left.weight.grad.clone()
    with pytest.raises(UsageError, match=r"loss_scale=scaler"):
        getattr(scaler, call)(opt)
    assert torch.equal(model.left.weight.grad, before)


# What is the user's to change.


@by_place
@pytest.mark.parametrize(
    ("change", "most"), [(limit, LIMIT), (nn.Module.zero_grad, 0.0)]
)
def test_steps_1_leaves_grad_alone(place: str, change: Change, most: float) -> None:
    """The gradient is the user's, as in the bare loop: clipping and clearing do what
    they say.
    """
    model, opt = make(place, steps=[(0, 2), (1, 1)])
    train(model, opt, 2)
    before = values(model)
    for _ in range(2):
        model("right").backward()
        change(model)
        opt.step()
        opt.zero_grad()
    moves = [p - q for p, q in zip(values(model), before, strict=True)]
    assert math.hypot(*(move.float().norm().item() for move in moves)) <= 1.1 * most


@pytest.mark.parametrize(
    ("place", "at"),
    [("in .grad", 0), ("in float64", 0), ("kept apart", 0), ("kept apart", 1)],
)
@pytest.mark.parametrize("by_model", [False, True])
def test_zero_grad_drops_a_micro_batch(place: str, at: int, by_model: bool) -> None:
    """The first, which alone is in ``.grad``; a later one where it stays apart from the
    sum until its step. The model may have cleared ``.grad`` before.
    """
    (model, opt), (reference, other) = make(place), make(place)
    for index in range(2):
        if index == at:
            opt.backward(model("left"), weight=1000)
            if by_model:
                model.zero_grad()
            opt.zero_grad()
        for each, wrapper in ((model, opt), (reference, other)):
            each("left").backward()
            wrapper.step()
    assert opt.result == other.result
    assert same(model, reference)


# What autograd does.


# Gradients from before, or of another wrapper.


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_before_wrapping_are_refused(sparse: bool) -> None:
    """They would be a part of the first window. Zeros are none."""
    table = nn.Embedding(4, 3, sparse=sparse)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        UsageError, match=r"^\.grad: .* earlier backward passes.* Set \.grad to None"
    ):
        wrapped(table)
    table.zero_grad(set_to_none=False)
    opt = wrapped(table.bfloat16())
    assert table.weight.grad is not None
    del opt


def test_gradients_in_a_new_group_are_refused() -> None:
    """As layers have them that were trained by nobody while others were."""
    model = Branches()
    opt = wrapped(model.left)
    model("left", "right").backward()
    opt.step()
    with pytest.raises(UsageError, match=r"^\.grad: .* added to a wrapped"):
        opt.add_param_group({"params": model.right.parameters()})
    assert len(opt.param_groups) == 1
    model.right.zero_grad()
    opt.add_param_group({"params": model.right.parameters()})
    model("right").backward()
    opt.step()
    assert opt.result.applied


def test_changed_window_can_be_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the norm could not be computed, for example because memory ran out."""
    weight = torch.ones(2, requires_grad=True)
    opt = gradaccum.wrap(torch.optim.SGD([weight], lr=1.0), steps=1)
    opt.backward(weight.sum())
    clip_grad_norm_([weight], 0.5)
    with monkeypatch.context() as patch:
        patch.setattr("gradaccum_torch.window.measure", lambda sums: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.step()
    opt.flush()
    assert opt.result.applied
    assert float((1 - weight.detach()).norm()) == pytest.approx(0.5, rel=1e-4)
