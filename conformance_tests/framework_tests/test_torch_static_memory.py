"""Memory that the next micro-batch writes over, as the replay of a CUDA graph does:
gradients, outputs, losses and buffers as aux.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradaccum
from gradaccum_torch import backward, coupled_backward
from gradaccum_torch.torch_private.names import keep_own

from .torch_model import X, Y, make_model
from .torch_versions import has_torch

STEPS = 4


class Static(torch.autograd.Function):
    """`x`, and its gradient, in the same two tensors of `memory` each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        ctx.memory = memory
        return memory[0].data.copy_(x).detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.memory[1].data.copy_(upstream[0]).detach(), None


def moved(coupled: bool, is_wrapped: bool, is_static: bool) -> list[Any]:
    """How far two updates moved the parameter, and their losses."""
    weight = nn.Parameter(torch.linspace(-1, 1, 6).double().reshape(3, 2))
    memories: dict[Any, Tensor] = {}

    def static(x: Tensor, key: str) -> Any:
        shape = (2, *x.shape)
        memory = memories.setdefault((key, shape), torch.zeros(shape).double())
        return Static.apply(x, memory) if is_static else x  # type: ignore[no-untyped-call]

    def outputs(x: Tensor) -> Any:
        return static(x.double() @ static(weight, "weight"), "outputs")

    def loss_of(outputs: Tensor, y: Tensor = Y) -> Any:
        return static(nn.functional.cross_entropy(outputs, y), "loss")

    inner = SGD([weight], lr=0.1)
    opt: Any = gradaccum.wrap(inner, steps=None) if is_wrapped else None
    before = weight.detach().clone()
    losses = []
    for _ in range(2):
        options: Any = {"steps": STEPS, "optimizer": opt}
        if coupled:
            losses.append(coupled_backward(outputs, loss_of, X, **options))
        else:
            losses.append(
                backward(lambda x, y: loss_of(outputs(x), y), X, Y, **options)
            )
        if opt is None:
            inner.step()
            inner.zero_grad()
    return [before - weight, *losses]


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
def test_large_batch(coupled: bool, is_wrapped: bool) -> None:
    """The very bits that ordinary gradients give."""
    got = moved(coupled, is_wrapped, is_static=True)
    expected = moved(coupled, is_wrapped, is_static=False)
    assert expected[0].abs().max() > 1e-4
    assert all(map(torch.equal, got, expected))


def test_aux_is_copied() -> None:
    """A buffer that each micro-batch counts up."""
    weight = nn.Parameter(torch.ones(3))
    count = torch.zeros(1)

    def loss_fn(x):
        count.add_(1)
        return (x * weight).mean(), {"all": count}

    options: Any = {"steps": STEPS, "has_aux": True, "merge_aux": "concatenate"}
    _, aux = backward(loss_fn, X, **options)
    assert aux["all"].tolist() == [1, 2, 3, 4]


@pytest.mark.skipif(
    not has_torch("2.8"),
    reason=(
        "torch before 2.8 counts one or two users more of each storage: gradaccum"
        " copies"
    ),
)
def test_ordinary_gradients_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the backward pass returns one tensor for two parameters, which autograd
    copies itself.
    """
    model = make_model()
    shift = nn.Parameter(torch.zeros(2))
    opt = gradaccum.wrap(SGD([*model.parameters(), shift]), steps=STEPS)
    monkeypatch.setattr(Tensor, "clone", None)
    for _ in range(2 * STEPS):
        opt.backward((model(X) + shift).square().mean())
        opt.step()
    assert opt.result.applied


def test_gradients_on_a_device_whose_graphs_torch_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch.compile warms up or records looks like ordinary memory. So all is
    copied once its graphs are in use.
    """

    class Leaf:
        class grad(nn.Parameter):
            is_cuda = True

    leaf = Leaf()
    leaf.grad = gradient = Leaf.grad(torch.ones(2), requires_grad=False)
    trees = "torch._inductor.cudagraph_trees"
    monkeypatch.setitem(sys.modules, trees, ModuleType("trees"))
    keep_own(leaf)
    assert leaf.grad is not gradient
    assert torch.equal(leaf.grad, gradient)
