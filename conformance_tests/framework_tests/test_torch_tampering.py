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
    clear,
    clip,
    zero,
)


class Branches(nn.Module):
    """Two branches, of which a micro-batch uses one. The left one has the smallest
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 2)

    def forward(self, x: Tensor, side: str) -> Tensor:
        return (self.left(x) if side == "left" else self.right(x)).square().sum()


X = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def make(**options: object) -> tuple[Branches, gradaccum.kit.Backend]:
    model = Branches()
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.01), **{"steps": 2, **options}
    )


BUFFERS: list[dict] = [
    {},
    {"accumulate_dtype": "float64"},
    {"on_overflow": "drop_micro_batch"},
]


@pytest.mark.parametrize("tamper", CAUSES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("counted", [1, 2])
def test_change_after_step_is_caught(
    tamper: Callable[[nn.Module], None], side: str, counted: int
) -> None:
    model, opt = make(steps=3)
    for _ in range(counted):
        model(X, side).backward()
        opt.step()
    tamper(model)
    # The gradient of a single micro-batch is the window's: the user may clip it, or
    # take another one, before the flush.
    for call in (
        (opt.flush, opt.state_dict)
        if counted > 1 or tamper in (clear, zero)
        else (opt.state_dict,)
    ):
        with pytest.raises(gradaccum.UsageError, match=r"opt\.discard\(\)"):
            call()
    model(X, side).backward()
    with pytest.raises(gradaccum.UsageError, match=r"opt\.discard\(\)"):
        opt.step()


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [({"steps": 1}, 1), ({"steps": 2, "reduction": "sum"}, 2)],
)
def test_clipping_the_true_gradient_is_allowed(
    options: dict, micro_batches: int
) -> None:
    model, opt = make(**options)
    before = [p.detach().clone() for p in model.parameters()]
    for index in range(micro_batches):
        (model(X, "left") + model(X, "right")).backward()
        if index == micro_batches - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    assert opt.result.applied
    assert opt.result.grad_norm == pytest.approx(0.5, rel=1e-4)
    assert not any(
        torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 1, "loss_scale": 2.0},
        {"steps": 2, "reduction": "sum", "accumulate_dtype": "float64"},
        {"steps": 2},
    ],
)
def test_clipping_another_gradient_is_refused(options: dict) -> None:
    """``.grad`` holds a scaled gradient, a part of the sum, or a sum that is not
    divided yet.
    """
    model, opt = make(**options)
    for _ in range(options["steps"] - 1):
        opt.backward(model(X, "left"))
        opt.step()
    opt.backward(model(X, "left"))
    clip(model)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        opt.step()


def test_late_zero_grad_is_refused() -> None:
    """After the backward pass the micro-batch is in the sum, and zero_grad cannot take
    it out again.
    """
    model, opt = make(steps=3)
    model(X, "left").backward()
    opt.step()
    model(X, "left").backward()
    held = model.left.weight.grad.clone()
    for call in (opt.zero_grad, opt.flush, opt.state_dict):
        with pytest.raises(gradaccum.UsageError, match=r"opt\.step\(\)"):
            call()
    assert torch.equal(model.left.weight.grad, held)
    opt.step()
    assert opt.result.micro_step == 2


@pytest.mark.parametrize(
    ("options", "at"), [*((options, 0) for options in BUFFERS), (BUFFERS[2], 1)]
)
def test_zero_grad_drops_a_micro_batch(options: dict, at: int) -> None:
    """The first, which alone is in ``.grad``; a later one where it stays apart from the
    sum until its step.
    """
    (model, opt), (reference, other) = make(**options), make(**options)
    for m, o in ((model, opt), (reference, other)):
        for index in range(2):
            if o is opt and index == at:
                (1000 * m(X, "left")).backward()
                o.zero_grad()
            m(X, "left").backward()
            o.step()
    assert opt.result == other.result
    assert torch.equal(model.left.weight, reference.left.weight)


@pytest.mark.parametrize("options", BUFFERS)
def test_autograd_makes_no_change(options: dict) -> None:
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
            model(X, side).backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    assert opt.result.applied


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("options", BUFFERS)
@pytest.mark.parametrize("power", [1, 2])
def test_create_graph_is_no_change(options: dict, power: int) -> None:
    model, opt = make(steps=2, **options)
    reference, other = make(steps=2, **options)
    for _ in range(2):
        (model.left(X) ** power).sum().backward(create_graph=True)
        (model.left(X) ** power).sum().backward(create_graph=True)
        opt.step()
        (2 * reference.left(X) ** power).sum().backward()
        other.step()
    assert opt.result.applied
    torch.testing.assert_close(model.left.weight, reference.left.weight)


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
        assert (
            q.grad.untyped_storage().data_ptr() != v.grad.untyped_storage().data_ptr()
        )
        opt.step()
        opt.zero_grad()
    assert torch.equal(q, torch.full((3,), 0.25))
    assert torch.equal(v, q)


def left_wrapper(model: nn.Module, **options: Any) -> Any:
    return gradaccum.wrap(
        torch.optim.SGD(model.left.parameters(), lr=0.5), **{"steps": 2, **options}
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_before_wrapping_are_refused(sparse: bool) -> None:
    """They would be a part of the first window. Zeros are none."""
    table = nn.Embedding(4, 3, sparse=sparse)
    inner = torch.optim.SGD(table.parameters(), lr=0.5)
    table(torch.tensor([1, 2])).sum().backward()
    gradient = table.weight.grad
    with pytest.raises(
        gradaccum.UsageError,
        match=r"^\.grad: .* earlier backward passes\. Set \.grad to None first",
    ):
        gradaccum.wrap(inner, steps=2)
    assert table.weight.grad is gradient
    inner.zero_grad(set_to_none=False)
    opt = gradaccum.wrap(inner, steps=2)
    table(torch.tensor([1, 2])).sum().backward()
    opt.step()
    assert opt.result.micro_step == 1


@pytest.mark.parametrize("place", PLACES)
def test_gradients_in_a_new_group_are_refused(place: str) -> None:
    """As layers have them that were trained by nobody while others were."""
    model = Branches()
    opt = left_wrapper(model, **PLACES[place])
    for _ in range(3):
        (model(X, "left") + model(X, "right")).backward()
        opt.step()
        opt.zero_grad()
    with pytest.raises(gradaccum.UsageError, match=r"^\.grad: .* new to a wrapped"):
        opt.add_param_group({"params": model.right.parameters()})
    assert opt.result.micro_step == 1
    assert len(opt.param_groups) == 1
    model.right.zero_grad()
    opt.add_param_group({"params": model.right.parameters()})
    before = model.right.weight.detach().clone()
    (gradient,) = torch.autograd.grad(model(X, "right"), model.right.weight)
    model(X, "right").backward()
    opt.step()
    torch.testing.assert_close(model.right.weight.detach(), before - 0.5 * gradient / 2)


def test_open_window_of_another_wrapper_is_refused() -> None:
    """A notebook's cell that runs again builds the new one while the old one lives."""
    model = Branches()
    before = model.left.weight.detach().clone()
    opt = left_wrapper(model)
    model(X, "left").backward()
    opt.step()
    with pytest.raises(
        gradaccum.UsageError, match=r"^\.grad: .* window is open\. Call discard\(\)"
    ):
        opt = left_wrapper(model)
    assert opt.result.micro_step == 1
    with pytest.raises(gradaccum.ArgumentTypeError, match="living wrapper"):
        gradaccum.wrap(opt.optimizer, steps=2)
    opt.discard()
    opt = left_wrapper(model)
    (gradient,) = torch.autograd.grad(model(X, "left"), model.left.weight)
    for factor in (1.0, 3.0):
        (factor * model(X, "left")).backward()
        opt.step()
    torch.testing.assert_close(model.left.weight.detach(), before - 0.5 * 2 * gradient)


@pytest.mark.parametrize("in_cycle", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_sum_of_a_dead_wrapper_goes_with_it(in_cycle: bool, counted: bool) -> None:
    model = Branches()
    opt = left_wrapper(model)
    model(X, "left").backward()
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
    model(X, "left").backward()
    del apart
    assert model.left.weight.grad is not None
    model.zero_grad()
    first = left_wrapper(model)
    second = left_wrapper(model)
    first.itself = first
    model(X, "left").backward()
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


@pytest.mark.parametrize(
    "inner", [torch.optim.SGD, lambda ps: torch.optim.AdamW(ps, fused=True)]
)
@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("options", BUFFERS)
def test_foreign_grad_scaler_touches_no_gradient(
    inner: Callable[..., object], call: str, options: dict
) -> None:
    """A scaler that `wrap` was not given is refused before it changes a gradient."""
    model = Branches()
    opt = gradaccum.wrap(inner(model.parameters()), steps=2, **options)
    model(X, "left").backward()
    opt.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(X, "left")).backward()
    held = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(gradaccum.UsageError, match=r"loss_scale=scaler"):
        getattr(scaler, call)(opt)
    assert all(
        p.grad is g or torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), held, strict=True)
    )
    assert opt.result.micro_step == 1
