"""Loops of others that keep ``.grad`` for themselves or accumulate by themselves:
DCGAN's, nanoGPT's, torchtitan's, and gradients per item. They need torch alone.
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
from conformance_tests.integration_tests.regression import Items, Regressor, distance

MICRO, STEPS, WINDOWS = 2, 4, 3
criterion = nn.BCELoss()
wrapped = partial(gradaccum.wrap, steps=STEPS, separate_sums=True)


class Gan:
    """Both networks of DCGAN."""

    def __init__(self) -> None:
        self.netD: nn.Module = nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())
        self.netG: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.optimizerD, self.optimizerG = (
            gradaccum.wrap(torch.optim.Adam(net.parameters()), steps=STEPS)
            for net in (self.netD, self.netG)
        )

    def step(self, real_cpu: Tensor, noise: Tensor) -> None:
        """The body of the loop in PyTorch's own example, word for word but for its
        printing and its ``self``.
        """
        real_label, fake_label, b_size = 1.0, 0.0, len(real_cpu)

        self.netD.zero_grad()
        label = torch.full((b_size,), real_label)
        output = self.netD(real_cpu).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        fake = self.netG(noise)
        label.fill_(fake_label)
        output = self.netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        self.optimizerD.step()

        self.netG.zero_grad()
        label.fill_(real_label)
        output = self.netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        self.optimizerG.step()


def test_dcgan_is_refused_by_default() -> None:
    """What the generator's backward pass left in the discriminator would be summed."""
    run = Gan()
    with refused(gradaccum.UsageError, "separate_sums=True"):
        for _ in range(STEPS):
            run.step(torch.randn(MICRO, 5), torch.randn(MICRO, 3))


Named = dict[str, Tensor]


def squares(model: nn.Module, parameters: Named, x: Tensor, y: Tensor) -> Tensor:
    found = torch.func.functional_call(model, parameters, x)["logits"]
    return (found - y).square().mean()


def forward_gradients(model: nn.Module, named: Named, x: Tensor, y: Tensor) -> Named:
    """The slope along one direction, times that direction; no backward pass (Baydin et
    al., 2022).
    """
    along = {name: torch.ones_like(each).cumsum(0) for name, each in named.items()}
    _, slope = torch.func.jvp(
        lambda named: squares(model, named, x, y), (named,), (along,)
    )
    return {name: slope * each for name, each in along.items()}


def gradients(model: nn.Module, named: Named, x: Tensor, y: Tensor) -> Named:
    found: Named = torch.func.grad(squares, 1)(model, named, x, y)
    return found


def clipped_per_item(model: nn.Module, named: Named, x: Tensor, y: Tensor) -> Named:
    """The mean of each item's gradient, clipped to 0.5, as in private training."""
    of_item = torch.func.vmap(partial(gradients, model), (None, 0, 0))
    each_item = of_item(named, x, y)
    norms = [each.flatten(1).norm(dim=1) for each in each_item.values()]
    factors = (0.5 / torch.stack(norms).norm(dim=0)).clamp(max=1)
    assert bool((factors < 1).any())
    return {
        name: torch.einsum("i,i...->...", factors, each) / len(x)
        for name, each in each_item.items()
    }


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
@pytest.mark.parametrize("kind", [forward_gradients, gradients, clipped_per_item])
def test_assigned_gradients_equal_large_batch(kind: Callable[..., Named]) -> None:
    def train(size: int, wrap: Callable[..., Any]) -> nn.Module:
        items, model = Items(MICRO * STEPS * WINDOWS), Regressor()
        opt = wrap(torch.optim.Adam(model.parameters(), lr=0.05))
        for x, y in zip(items.x.split(size), items.labels.split(size), strict=True):
            named = {name: each.detach() for name, each in model.named_parameters()}
            for name, gradient in kind(model, named, x, y).items():
                model.get_parameter(name).grad = gradient
            opt.step()
        return model

    large = train(MICRO * STEPS, lambda optimizer: optimizer)
    assert distance(train(MICRO, wrapped), large) < 1e-12


CLIP = 1.0


def nanogpt(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
    """The body of nanoGPT's loop, word for word but for its evaluation, its rate and
    DDP. The page has it carried over.
    """
    items, gradient_accumulation_steps, grad_clip = Items(24), STEPS, CLIP
    batches = zip(items.x.split(MICRO), items.labels.split(MICRO), strict=True)
    for _iter_num in range(WINDOWS):
        for _micro_step in range(gradient_accumulation_steps):
            X, Y = next(batches)
            loss = model(X, Y)["loss"]
            loss = loss / gradient_accumulation_steps
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


class OptimizersContainer(torch.optim.Optimizer):
    """torchtitan's: an optimizer for each part of a model, behind the interface of
    one.
    """

    def __init__(self, model_parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters()) for part in model_parts]
        super().__init__([p for part in model_parts for p in part.parameters()], {})

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)


def of_parts(model: Regressor) -> torch.optim.Optimizer:
    return OptimizersContainer([model.layers[0], model.layers[2]])


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "make", [lambda model: torch.optim.AdamW(model.parameters()), of_parts]
)
def test_loop_that_accumulates_is_refused(make: Any, enabled: bool) -> None:
    """A second window around its own would hold sixteen micro-batches."""
    model, scaler = Regressor(), torch.amp.GradScaler("cpu", enabled=enabled)
    scale = scaler if enabled else None
    opt = gradaccum.wrap(make(model), STEPS, clip_norm=CLIP, loss_scale=scale)
    with refused(gradaccum.UsageError, "clip_norm="):
        nanogpt(model, opt, scaler)
    assert distance(model, Regressor()) == 0
