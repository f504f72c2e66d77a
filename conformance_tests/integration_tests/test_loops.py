"""Loops that keep ``.grad`` for themselves: DCGAN's, forward gradients, gradients per
item. They need torch alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import Items, Regressor, distance
from gradaccum import UsageError

MICRO, STEPS, WINDOWS = 2, 4, 3
DTYPE = torch.float64
criterion = nn.BCELoss()
Wrap = Callable[..., torch.optim.Optimizer]


class Gan(NamedTuple):
    """Both networks of DCGAN without their normalization over the batch, which would
    see micro-batches.
    """

    netD: nn.Module
    netG: nn.Module
    optimizerD: torch.optim.Optimizer
    optimizerG: torch.optim.Optimizer


def gan(wrap: Wrap) -> Gan:
    torch.manual_seed(0)
    netD = nn.Sequential(
        nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1), nn.Sigmoid()
    ).to(DTYPE)
    netG = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh()).to(
        DTYPE
    )
    optimizers = [
        torch.optim.Adam(net.parameters(), lr=0.02, betas=(0.5, 0.999))
        for net in (netD, netG)
    ]
    return Gan(netD, netG, *map(wrap, optimizers))


def wrapped(
    optimizer: torch.optim.Optimizer, separate: bool = True
) -> torch.optim.Optimizer:
    opt: torch.optim.Optimizer = gradaccum.wrap(
        optimizer, steps=STEPS, separate_sums=separate
    )
    return opt


Batch = tuple[Tensor, Tensor]
"""Real items and noise."""


def batches(size: int) -> list[Batch]:
    count = MICRO * STEPS * WINDOWS
    noise = torch.randn(
        count, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(3)
    )
    return list(zip(Items(count).x.split(size), noise.split(size), strict=True))


def dcgan(run: Gan, real_cpu: Tensor, noise: Tensor) -> None:
    """The body of the loop in PyTorch's own example, word for word but for its
    printing.
    """
    netD, netG, optimizerD, optimizerG = run
    real_label, fake_label, b_size = 1.0, 0.0, len(real_cpu)

    netD.zero_grad()
    label = torch.full((b_size,), real_label, dtype=DTYPE)
    output = netD(real_cpu).view(-1)
    errD_real = criterion(output, label)
    errD_real.backward()
    fake = netG(noise)
    label.fill_(fake_label)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    errD_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    label.fill_(real_label)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    errG.backward()
    optimizerG.step()


def loss_of_discriminator(netD: nn.Module, netG: nn.Module, batch: Batch) -> Tensor:
    real, fake = netD(batch[0]), netD(netG(batch[1]).detach())
    total: Tensor = criterion(real, torch.ones_like(real)) + criterion(
        fake, torch.zeros_like(fake)
    )
    return total


def loss_of_generator(netD: nn.Module, netG: nn.Module, batch: Batch) -> Tensor:
    output = netD(netG(batch[1]))
    loss: Tensor = criterion(output, torch.ones_like(output))
    return loss


def test_dcgan_word_for_word() -> None:
    """The discriminator's window is the large batch. Its update comes before the
    generator's last micro-batch, which sees it.
    """
    run, bare = gan(wrapped), gan(lambda optimizer: optimizer)
    for batch in batches(MICRO):
        dcgan(run, *batch)
    for large, parts in zip(
        batches(MICRO * STEPS), torch.arange(STEPS * WINDOWS).split(STEPS), strict=True
    ):
        old = copy.deepcopy(bare.netD)
        update(bare.optimizerD, [loss_of_discriminator(bare.netD, bare.netG, large)])
        micro = [batches(MICRO)[int(part)] for part in parts]
        seen = [old, old, old, bare.netD]
        update(
            bare.optimizerG,
            [
                loss_of_generator(netD, bare.netG, part)
                for netD, part in zip(seen, micro, strict=True)
            ],
        )
    assert distance(run.netD, bare.netD) < 1e-12
    assert distance(run.netG, bare.netG) < 1e-12


def update(optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    mean = torch.stack(losses).mean()
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(mean, parameters), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()


def test_gan_by_turns_equals_large_batch() -> None:
    """A whole window for the discriminator, then one for the generator on the same
    items.
    """
    run, large = gan(wrapped), gan(lambda optimizer: optimizer)
    for start in range(0, STEPS * WINDOWS, STEPS):
        window = batches(MICRO)[start : start + STEPS]
        for net, optimizer, loss in (
            (run.netD, run.optimizerD, loss_of_discriminator),
            (run.netG, run.optimizerG, loss_of_generator),
        ):
            for batch in window:
                net.zero_grad()
                loss(run.netD, run.netG, batch).backward()
                optimizer.step()
    for batch in batches(MICRO * STEPS):
        dcgan(large, *batch)
    assert distance(run.netD, large.netD) < 1e-12
    assert distance(run.netG, large.netG) < 1e-12


def test_dcgan_is_refused_by_default() -> None:
    """What the generator's backward pass left in the discriminator would be summed."""
    run = gan(lambda optimizer: wrapped(optimizer, separate=False))
    with refused(UsageError, "separate_sums=True"):
        for batch in batches(MICRO):
            dcgan(run, *batch)


Named = dict[str, Tensor]


def squares(model: nn.Module, parameters: Named, x: Tensor, y: Tensor) -> Tensor:
    return (
        (torch.func.functional_call(model, parameters, x)["logits"] - y).square().mean()
    )


def forward_gradients(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> Named:
    """The slope along one random direction, times that direction; no backward pass
    (Baydin et al., 2022).
    """
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    along = {
        name: torch.randn(each.shape, dtype=each.dtype, generator=generator)
        for name, each in parameters.items()
    }
    _, slope = torch.func.jvp(
        lambda named: squares(model, named, x, y), (parameters,), (along,)
    )
    return {name: slope * each for name, each in along.items()}


def gradients_of_func(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> Named:
    found: Named = torch.func.grad(lambda named: squares(model, named, x, y))(
        {k: v.detach() for k, v in model.named_parameters()}
    )
    return found


def clipped_per_item(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> Named:
    """The mean of each item's gradient, clipped to 0.5, as in private training."""
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    each_item = torch.func.vmap(
        torch.func.grad(lambda named, a, b: squares(model, named, a, b)), (None, 0, 0)
    )(parameters, x, y)
    norms = torch.stack(
        [each.flatten(1).norm(dim=1) for each in each_item.values()]
    ).norm(dim=0)
    factors = (0.5 / norms).clamp(max=1)
    assert bool((factors < 1).any())
    return {
        name: torch.einsum("i,i...->...", factors, each) / len(x)
        for name, each in each_item.items()
    }


KINDS = [forward_gradients, gradients_of_func, clipped_per_item]


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)
@pytest.mark.parametrize("gradients", KINDS, ids=lambda kind: kind.__name__)
def test_assigned_gradients_equal_large_batch(gradients: Callable[..., Named]) -> None:
    """Of the same direction in all micro-batches of a window."""

    def train(size: int, wrap: Wrap) -> nn.Module:
        items = Items(MICRO * STEPS * WINDOWS)
        model: Any = Regressor()
        opt = wrap(torch.optim.Adam(model.parameters(), lr=0.05))
        for index, (x, y) in enumerate(
            zip(items.x.split(size), items.labels.split(size), strict=True)
        ):
            for name, gradient in gradients(
                model, x, y, seed=index * size // (MICRO * STEPS)
            ).items():
                model.get_parameter(name).grad = gradient
            opt.step()
        return model

    assert (
        distance(
            train(MICRO, wrapped), train(MICRO * STEPS, lambda optimizer: optimizer)
        )
        < 1e-12
    )
