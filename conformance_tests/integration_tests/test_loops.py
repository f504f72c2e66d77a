"""Loops of others that keep ``.grad`` for themselves or accumulate by themselves: a
generative adversarial network's, nanoGPT's, torchtitan's, and gradients per item.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import X, Y, distance, make_net


def test_adversarial_loop_is_refused_by_default() -> None:
    """What the generator's backward pass left in the discriminator would be summed."""
    critic = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())
    generator = nn.Linear(3, 5)
    critic_opt, generator_opt = (
        gradaccum.wrap(torch.optim.Adam(net.parameters()), steps=4)
        for net in (critic, generator)
    )
    with refused(gradaccum.UsageError, "separate_sums=True"):
        for real in X[:8].float().split(2):
            critic.zero_grad()
            critic(real).log().mean().neg().backward()
            fake = generator(torch.randn(2, 3))
            (1 - critic(fake.detach())).log().mean().neg().backward()
            critic_opt.step()
            generator.zero_grad()
            critic(fake).log().mean().neg().backward()
            generator_opt.step()


Named = dict[str, Tensor]


def loss(net: nn.Module, parameters: Named, x: Tensor, y: Tensor) -> Tensor:
    return (torch.func.functional_call(net, parameters, x) - y).square().mean()


def slope_times_direction(net: nn.Module, named: Named, x: Tensor, y: Tensor) -> Named:
    """A forward gradient, without a backward pass (Baydin et al., 2022)."""
    direction = {name: torch.ones_like(p).cumsum(0) for name, p in named.items()}
    _, slope = torch.func.jvp(
        lambda named: loss(net, named, x, y), (named,), (direction,)
    )
    return {name: slope * tangent for name, tangent in direction.items()}


def gradient(net: nn.Module, named: Named, x: Tensor, y: Tensor) -> Named:
    gradients: Named = torch.func.grad(loss, 1)(net, named, x, y)
    return gradients


def clipped_per_item(net: nn.Module, named: Named, x: Tensor, y: Tensor) -> Named:
    """The mean of each item's gradient, clipped to 0.5, as in private training."""
    of_items = torch.func.vmap(partial(gradient, net), (None, 0, 0))(named, x, y)
    norms = [rows.flatten(1).norm(dim=1) for rows in of_items.values()]
    factors = (0.5 / torch.stack(norms).norm(dim=0)).clamp(max=1)
    return {
        name: torch.einsum("i,i...->...", factors, rows) / len(x)
        for name, rows in of_items.items()
    }


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
@pytest.mark.parametrize("kind", [slope_times_direction, gradient, clipped_per_item])
def test_assigned_gradients_equal_large_batch(kind: Callable[..., Named]) -> None:
    def train(rows: int, wrap: Callable[..., Any]) -> nn.Module:
        net = make_net()
        opt = wrap(torch.optim.Adam(net.parameters(), lr=0.05))
        for x, y in zip(X[:24].split(rows), Y[:24].split(rows), strict=True):
            named = {name: p.detach() for name, p in net.named_parameters()}
            for name, assigned in kind(net, named, x, y).items():
                net.get_parameter(name).grad = assigned
            opt.step()
        return net

    wrapped = partial(gradaccum.wrap, steps=4, separate_sums=True)
    large = train(8, lambda optimizer: optimizer)
    assert distance(train(2, wrapped), large) < 1e-12


class OptimizersContainer(torch.optim.Optimizer):
    """torchtitan's: an optimizer for each part of a model, behind the interface of
    one.
    """

    def __init__(self, net: Any) -> None:
        parts = (net[0], net[2])
        self.optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
        super().__init__(net.parameters(), {})

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "make", [lambda net: torch.optim.AdamW(net.parameters()), OptimizersContainer]
)
def test_loop_that_accumulates_is_refused(make: Any, enabled: bool) -> None:
    """nanoGPT's, as it stands: a second window around its own would hold sixteen
    micro-batches.
    """
    net = make_net()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    scale = scaler if enabled else None
    opt = gradaccum.wrap(make(net), 4, clip_norm=1.0, loss_scale=scale)
    for x, y in zip(X[:8].split(2), Y[:8].split(2), strict=True):
        scaler.scale((net(x) - y).square().mean() / 4).backward()
    with refused(gradaccum.UsageError, "clip_norm="):
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
    assert distance(net, make_net()) == 0
