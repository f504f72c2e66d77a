"""The wrapper catches a change to ``.grad`` at the next ``step``, and never takes
autograd's own writes for one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_model import (
    CAUSES,
    PLACES,
    by_place,
    clear,
    clip,
    same,
    values,
    zero,
)
from gradaccum import UsageError


class Branches(nn.Module):
    """Two branches, of which a micro-batch uses one. The left one has the smallest
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 2)

    def forward(self, *sides: str) -> Tensor:
        return sum(getattr(self, side)(X).square().sum() for side in sides)


X = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def make(**options: Any) -> tuple[Branches, Any]:
    model = Branches()
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.01), **{"steps": 2, **options}
    )


def left_wrapper(model: Branches, **options: Any) -> Any:
    return gradaccum.wrap(
        torch.optim.SGD(model.left.parameters(), lr=0.5), **{"steps": 2, **options}
    )


by_buffer = pytest.mark.parametrize(
    "options", [PLACES[name] for name in ("in .grad", "in float64", "kept apart")]
)


@pytest.mark.parametrize("tamper", CAUSES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("counted", [1, 2])
def test_change_after_step_is_caught(
    tamper: Callable[[nn.Module], None], side: str, counted: int
) -> None:
    """The gradient of a single micro-batch is the window's: the user may clip it, or
    take another one, before the flush.
    """
    model, opt = make(steps=3)
    for _ in range(counted):
        model(side).backward()
        opt.step()
    tamper(model)
    calls = [opt.state_dict]
    if counted > 1 or tamper in (clear, zero):
        calls.append(opt.flush)
    for call in calls:
        with pytest.raises(UsageError, match=r"opt\.discard\(\)"):
            call()
    model(side).backward()
    with pytest.raises(UsageError, match=r"opt\.discard\(\)"):
        opt.step()


@pytest.mark.parametrize("options", [{"steps": 1}, {"reduction": "sum"}], ids=str)
def test_clipping_the_true_gradient_is_allowed(options: dict[str, Any]) -> None:
    model, opt = make(**options)
    before = values(model)
    if "reduction" in options:
        model("left", "right").backward()
        opt.step()
    model("left", "right").backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    assert opt.result.applied
    assert opt.result.grad_norm == pytest.approx(0.5, rel=1e-4)
    assert not any(map(torch.equal, values(model), before))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 1, "loss_scale": 2.0},
        {"steps": 2, "reduction": "sum", "accumulate_dtype": "float64"},
        {"steps": 2},
    ],
    ids=str,
)
def test_clipping_another_gradient_is_refused(options: dict[str, Any]) -> None:
    """``.grad`` holds a scaled gradient, a part of the sum, or a sum that is not
    divided yet.
    """
    model, opt = make(**options)
    for _ in range(options["steps"] - 1):
        opt.backward(model("left"))
        opt.step()
    opt.backward(model("left"))
    clip(model)
    with pytest.raises(UsageError, match="clip_norm="):
        opt.step()


def test_late_zero_grad_is_refused() -> None:
    """After the backward pass the micro-batch is in the sum, and zero_grad cannot take
    it out again.
    """
    model, opt = make(steps=3)
    model("left").backward()
    opt.step()
    model("left").backward()
    held = model.left.weight.grad.clone()
    for call in (opt.zero_grad, opt.flush, opt.state_dict):
        with pytest.raises(UsageError, match=r"opt\.step\(\)"):
            call()
    assert torch.equal(model.left.weight.grad, held)
    opt.step()
    assert opt.result.micro_step == 2


@pytest.mark.parametrize(
    ("place", "at"),
    [("in .grad", 0), ("in float64", 0), ("kept apart", 0), ("kept apart", 1)],
)
@pytest.mark.parametrize("by_model", [False, True])
def test_zero_grad_drops_a_micro_batch(place: str, at: int, by_model: bool) -> None:
    """The first, which alone is in ``.grad``; a later one where it stays apart from the
    sum until its step. The model may have cleared ``.grad`` before.
    """
    runs = [make(**PLACES[place]) for _ in range(2)]
    for number, (model, opt) in enumerate(runs):
        for index in range(2):
            if number and index == at:
                (1000 * model("left")).backward()
                if by_model:
                    model.zero_grad()
                opt.zero_grad()
            model("left").backward()
            opt.step()
    (model, opt), (reference, other) = runs
    assert opt.result == other.result
    assert same(model, reference)


@by_buffer
def test_autograd_makes_no_change(options: dict[str, Any]) -> None:
    model, opt = make(steps=None, **options)
    for sides in (
        ["left"],
        ["right"],
        ["left", "right"],
        ["right", "right"],
        [],
        ["left", "left", "left"],
    ):
        opt.weigh(1.0)
        for side in sides:
            model(side).backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    assert opt.result.applied


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@by_buffer
@pytest.mark.parametrize("power", [1, 2])
def test_create_graph_is_no_change(options: dict[str, Any], power: int) -> None:
    (model, opt), (reference, other) = make(**options), make(**options)
    for _ in range(2):
        for _ in range(2):
            (model.left(X) ** power).sum().backward(create_graph=True)
        opt.step()
        (2 * reference.left(X) ** power).sum().backward()
        other.step()
    assert opt.result.applied
    torch.testing.assert_close(values(model), values(reference))


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_gradients_sharing_memory_are_no_change(
    join: Callable[[list[Tensor]], Tensor],
) -> None:
    """Joined parameters get parts of one tensor as their gradients. Each takes a copy:
    additions count as versions of all parts.
    """
    q, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = gradaccum.wrap(torch.optim.SGD([q, v], lr=0.5), steps=3)
    for _ in range(6):
        (join([q, v]).square().sum() / 2).backward()
        memories = {each.grad.untyped_storage().data_ptr() for each in (q, v)}
        assert len(memories) == 2
        opt.step()
        opt.zero_grad()
    assert q.tolist() == v.tolist() == [0.25] * 3


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_before_wrapping_are_refused(sparse: bool) -> None:
    """They would be a part of the first window. Zeros are none."""
    table = nn.Embedding(4, 3, sparse=sparse)
    inner = torch.optim.SGD(table.parameters(), lr=0.5)
    table(torch.tensor([1, 2])).sum().backward()
    gradient = table.weight.grad
    with pytest.raises(
        UsageError,
        match=r"^\.grad: .* earlier backward passes\. Set \.grad to None first",
    ):
        gradaccum.wrap(inner, steps=2)
    assert table.weight.grad is gradient
    inner.zero_grad(set_to_none=False)
    opt = gradaccum.wrap(inner, steps=2)
    table(torch.tensor([1, 2])).sum().backward()
    opt.step()
    assert opt.result.micro_step == 1


def left_gradient(model: Branches, side: str = "left") -> Tensor:
    weight = getattr(model, side).weight
    return torch.autograd.grad(model(side), weight)[0]


@by_place
def test_gradients_in_a_new_group_are_refused(place: str) -> None:
    """As layers have them that were trained by nobody while others were."""
    model = Branches()
    opt = left_wrapper(model, **PLACES[place])
    for _ in range(3):
        model("left", "right").backward()
        opt.step()
        opt.zero_grad()
    with pytest.raises(UsageError, match=r"^\.grad: .* new to a wrapped"):
        opt.add_param_group({"params": model.right.parameters()})
    assert opt.result.micro_step == 1
    assert len(opt.param_groups) == 1
    model.right.zero_grad()
    opt.add_param_group({"params": model.right.parameters()})
    expected = model.right.weight.detach() - 0.5 * left_gradient(model, "right") / 2
    model("right").backward()
    opt.step()
    torch.testing.assert_close(model.right.weight.detach(), expected)


def test_open_window_of_another_wrapper_is_refused() -> None:
    """A notebook's cell that runs again builds the new one while the old one lives."""
    model = Branches()
    expected = model.left.weight.detach() - 0.5 * 2 * left_gradient(model)
    opt = left_wrapper(model)
    model("left").backward()
    opt.step()
    with pytest.raises(
        UsageError, match=r"^\.grad: .* window is open\. Call discard\(\)"
    ):
        opt = left_wrapper(model)
    assert opt.result.micro_step == 1
    with pytest.raises(gradaccum.ArgumentTypeError, match="living wrapper"):
        gradaccum.wrap(opt.optimizer, steps=2)
    opt.discard()
    opt = left_wrapper(model)
    for factor in (1.0, 3.0):
        (factor * model("left")).backward()
        opt.step()
    torch.testing.assert_close(model.left.weight.detach(), expected)


@pytest.mark.parametrize("in_cycle", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_sum_of_a_dead_wrapper_goes_with_it(in_cycle: bool, counted: bool) -> None:
    model = Branches()
    opt = left_wrapper(model)
    model("left").backward()
    if counted:
        opt.step()
    if in_cycle:
        opt.itself = opt
    del opt
    left_wrapper(model)
    assert model.left.weight.grad is None


def test_dead_wrapper_leaves_what_is_not_its_own() -> None:
    """What a user assigned or keeps apart, and the sum of a wrapper that lives."""
    model = Branches()
    apart = left_wrapper(model, separate_sums=True)
    model("left").backward()
    del apart
    assert model.left.weight.grad is not None
    model.zero_grad()
    first = left_wrapper(model)
    second = left_wrapper(model)
    first.itself = first
    model("left").backward()
    second.step()
    gradient = model.left.weight.grad
    del first
    gc.collect()
    assert model.left.weight.grad is gradient
    second.flush()
    assert second.result.applied
    assigned = torch.ones_like(model.left.weight)
    model.left.weight.grad = assigned
    del second
    assert model.left.weight.grad is assigned


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["step", "unscale_"])
@by_buffer
def test_foreign_grad_scaler_touches_no_gradient(
    fused: bool, call: str, options: dict[str, Any]
) -> None:
    """A scaler that `wrap` was not given is refused before it changes a gradient."""
    model = Branches()
    inner = torch.optim.AdamW(model.parameters(), fused=fused)
    opt = gradaccum.wrap(inner, steps=2, **options)
    model("left").backward()
    opt.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model("left")).backward()
    held = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=r"loss_scale=scaler"):
        getattr(scaler, call)(opt)
    assert all(
        p.grad is g or torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), held, strict=True)
    )
    assert opt.result.micro_step == 1
