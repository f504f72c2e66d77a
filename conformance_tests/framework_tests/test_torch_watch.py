"""The wrapper watches every ``.grad``: changes that it notices, calls that change
nothing, and windows in which ``.grad`` may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import (
    X,
    assign,
    clip,
    make_model,
    values,
)

PLACES: dict[str, tuple[torch.dtype, dict]] = {
    "in .grad": (torch.float32, {}),
    "half precision": (torch.bfloat16, {}),
    "in float64": (torch.float32, {"accumulate_dtype": "float64"}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "kept apart": (torch.float32, {"on_overflow": "drop_micro_batch"}),
}
by_place = pytest.mark.parametrize("place", PLACES)
LIMIT = 2.0**-10


class Branches(nn.Module):
    """A body, a head, and a bias that no loss uses. This bias is the smallest
    parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))).float().square().mean()


def make(place: str, **options: Any) -> tuple[Branches, Any]:
    dtype, own = PLACES[place]
    model = Branches().to(dtype)
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), **{"steps": 3, **own, **options}
    )


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(X.to(next(model.parameters()).dtype)) * factor).backward()


def train(model: nn.Module, opt: Any, micro_batches: int) -> None:
    for _ in range(micro_batches):
        backward(model)
        opt.step()
        opt.zero_grad()


def limit(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def clip_body(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.body.weight, 1e-4)


def clip_head(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.head.weight, 1e-4)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize(
    ("place", "change"),
    [
        *product(PLACES, (clip, assign)),
        *product(("in .grad", "kept apart"), (clip_body, clip_head)),
    ],
)
def test_clip_is_seen_without_the_smallest(
    place: str, after: int, micro_batch: int, change: Callable[[nn.Module], None]
) -> None:
    """The smallest parameter has no gradient. What was accumulated stays until
    `discard`.
    """
    model, opt = make(place)
    train(model, opt, 3 * after + micro_batch)
    backward(model)
    change(model)
    before = opt.result
    with pytest.raises(gradaccum.UsageError):
        opt.step()
    assert opt.result == before
    opt.discard()
    train(model, opt, 3)
    assert opt.result.applied


@by_place
@pytest.mark.parametrize(
    ("change", "most"), [(limit, LIMIT), (nn.Module.zero_grad, 0.0)]
)
def test_steps_1_leaves_grad_alone(
    place: str, change: Callable[[nn.Module], None], most: float
) -> None:
    """The gradient is the user's, as in the bare loop: clipping and clearing do what
    they say.
    """
    model, opt = make(place, steps=1)
    before = values(model)
    for _ in range(2):
        backward(model, 1e3)
        change(model)
        opt.step()
        opt.zero_grad()
    moves = [p - q for p, q in zip(values(model), before, strict=True)]
    assert math.hypot(*(move.float().norm().item() for move in moves)) <= 1.1 * most


@by_place
def test_scheduled_steps_1_leaves_grad_alone(place: str) -> None:
    """The longer window that follows refuses a clip."""
    model, opt = make(place, steps=[(0, 2), (1, 1), (2, 2)])
    train(model, opt, 2)
    backward(model)
    limit(model)
    opt.step()
    assert opt.result.optimizer_step == 2
    assert opt.result.grad_norm <= LIMIT * 1.01
    backward(model)
    limit(model)
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        opt.step()


@pytest.mark.parametrize("place", ["half precision", "in float64", "masters"])
def test_norm_of_moved_gradients_is_refused(place: str) -> None:
    """It would be the norm of the few gradients that are still in ``.grad``."""
    model, opt = make(place)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    with pytest.raises(gradaccum.UsageError, match=r"opt\.result\.grad_norm"):
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
        hidden, shared = (
            torch.utils.checkpoint.checkpoint(model[0], each, use_reentrant=True)
            for each in (x, x * 2)
        )
        model[2](torch.tanh(hidden + shared)).square().mean().backward()
        opt.step()
        hidden = reference[0](X) + reference[0](X * 2)
        reference[2](torch.tanh(hidden)).square().mean().backward()
        other.step()
    assert opt.result.applied
    torch.testing.assert_close(values(model), values(reference))


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
