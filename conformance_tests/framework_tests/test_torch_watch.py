"""The wrapper watches every ``.grad``: changes that it notices, calls that change
nothing, and windows in which ``.grad`` may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import X, assign, clip, make_model

PLACES: dict[str, tuple[torch.dtype, dict]] = {
    "in .grad": (torch.float32, {}),
    "half precision": (torch.bfloat16, {}),
    "in float64": (torch.float32, {"accumulate_dtype": "float64"}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "kept apart": (torch.float32, {"on_overflow": "drop_micro_batch"}),
}
by_place = pytest.mark.parametrize("place", PLACES)


class Branches(nn.Module):
    """A body, a head, and a bias that no loss uses. This bias is the smallest
    parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.unused = (
            nn.Linear(3, 6),
            nn.Linear(6, 4),
            nn.Parameter(torch.zeros(1)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))).float().square().mean()


def make(place: str, **options: Any) -> tuple[Branches, Any]:
    dtype, own = PLACES[place]
    model = Branches().to(dtype)
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), **{"steps": 3, **own, **options}
    )


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return model(X.to(next(model.parameters()).dtype)) * factor


def windows(model: nn.Module, opt: Any, number: int) -> None:
    for _ in range(3 * number):
        loss_of(model).backward()
        opt.step()
        opt.zero_grad()


@by_place
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("change", [clip, assign])
def test_clip_is_seen_without_the_smallest(
    place: str, after: int, micro_batch: int, change: Callable[[nn.Module], None]
) -> None:
    """The smallest parameter has no gradient. What was accumulated stays until
    `discard`.
    """
    model, opt = make(place)
    windows(model, opt, after)
    for _ in range(micro_batch):
        loss_of(model).backward()
        opt.step()
    loss_of(model).backward()
    change(model)
    before = opt.result
    with pytest.raises(gradaccum.UsageError):
        opt.step()
    assert opt.result == before
    opt.discard()
    windows(model, opt, 1)
    assert opt.result.applied


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("part", ["body", "head"])
@pytest.mark.parametrize("place", ["in .grad", "kept apart"])
def test_clip_of_one_part_is_seen(place: str, part: str, after: int) -> None:
    model, opt = make(place)
    windows(model, opt, after)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(getattr(model, part).weight, 1e-4)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        opt.step()


@by_place
def test_steps_1_leaves_grad_alone(place: str) -> None:
    """The gradient is the user's, as in the bare loop: clipping and clearing do what
    they say.
    """
    for change, most in (
        (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 2.0**-10), 2.0**-10),
        (nn.Module.zero_grad, 0.0),
    ):
        model, opt = make(place, steps=1)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            loss_of(model, 1e3).backward()
            change(model)
            opt.step()
            opt.zero_grad()
        moved = math.hypot(
            *(
                (p.detach() - q).float().norm().item()
                for p, q in zip(model.parameters(), before, strict=True)
            )
        )
        assert moved <= 1.1 * most


@by_place
def test_scheduled_steps_1_leaves_grad_alone(place: str) -> None:
    """The longer window that follows refuses a clip."""
    model, opt = make(place, steps=[(0, 2), (1, 1), (2, 2)])
    for _ in range(2):
        loss_of(model).backward()
        opt.step()
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0**-10)
    opt.step()
    assert opt.result.optimizer_step == 2
    assert opt.result.grad_norm <= 2.0**-10 * 1.01
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0**-10)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        opt.step()


@pytest.mark.parametrize("place", ["half precision", "in float64", "masters"])
def test_norm_of_moved_gradients_is_refused(place: str) -> None:
    """It would be the norm of the few gradients that are still in ``.grad``."""
    model, opt = make(place)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    with pytest.raises(gradaccum.UsageError, match=r"opt\.result\.grad_norm"):
        opt.step()


@pytest.mark.parametrize("place", ["in .grad", "half precision"])
def test_new_branch_is_watched(place: str) -> None:
    dtype, options = PLACES[place]
    layers = [nn.Linear(3, 1).to(dtype) for _ in range(9)]
    opt: Any = gradaccum.wrap(
        torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.01),
        steps=3,
        **options,
    )
    for _ in range(3):
        layers[0](X.to(dtype)).sum().backward()
        opt.step()
    layers[4](X.to(dtype)).sum().backward()
    nn.utils.clip_grad_norm_(layers[4].parameters(), 1e-3)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        opt.step()


def test_checkpointed_layers_are_no_change() -> None:
    """Reentrant checkpointing nests backward passes. A shared layer gets two gradients
    in one of them.
    """
    model, reference = make_model(), make_model()
    opt, other = (
        gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5), steps=2)
        for m in (model, reference)
    )
    for _ in range(4):
        x = X.clone().requires_grad_(True)
        hidden = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=True)
        shared = torch.utils.checkpoint.checkpoint(model[0], x * 2, use_reentrant=True)
        model[2](torch.tanh(hidden + shared)).square().mean().backward()
        opt.step()
        reference[2](
            torch.tanh(reference[0](X) + reference[0](X * 2))
        ).square().mean().backward()
        other.step()
    assert opt.result.applied
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_replaced_gradient_is_caught_beside_a_write_to_the_old_one() -> None:
    """The old tensor was written into once, as by an addition of autograd, which added
    to the copy. Their versions are equal.
    """
    weight = nn.Parameter(torch.ones(3))
    opt = gradaccum.wrap(torch.optim.SGD([weight]), steps=2)
    weight.sum().backward()
    opt.step()
    held = weight.grad
    weight.grad = held.clone().mul_(1)
    held.mul_(2)
    weight.sum().backward()
    assert weight.grad._version == held._version
    with pytest.raises(gradaccum.UsageError, match=r"torch\.autograd\.backward"):
        opt.step()
