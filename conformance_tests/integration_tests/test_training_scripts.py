"""The loops of nanoGPT and torchtitan: as they stand they are refused, and less some
lines they equal the large batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import (
    Items,
    Regressor,
    distance,
    loss_of,
)
from gradaccum import UsageError

MICRO, STEPS, WINDOWS, CLIP = 2, 4, 3, 1.0


def data(size: int = MICRO) -> Iterator[dict[str, Tensor]]:
    return iter(DataLoader(Items(MICRO * STEPS * WINDOWS), batch_size=size))


def rate(update: int) -> float:
    return 0.1 / (1 + update)


def clip(parameters: list[nn.Parameter]) -> None:
    """As torch does, less its 1e-6."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    factor = min(1.0, CLIP / float(torch.nn.utils.get_total_norm(gradients)))
    for gradient in gradients:
        gradient *= factor


def large() -> nn.Module:
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters())
    for update, batch in enumerate(data(MICRO * STEPS)):
        optimizer.param_groups[0]["lr"] = rate(update)
        loss_of(model, batch).backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return model


def nanogpt(model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
    """The body of nanoGPT's loop, word for word but for its evaluation and DDP."""
    batches, gradient_accumulation_steps, grad_clip = data(), STEPS, CLIP
    for iter_num in range(WINDOWS):
        lr = rate(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        for _micro_step in range(gradient_accumulation_steps):
            loss = loss_of(model, next(batches))
            loss = loss / gradient_accumulation_steps
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def nanogpt_carried_over(
    model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler
) -> None:
    """The division and the clipping are the wrapper's; the four last lines stand in the
    inner loop.
    """
    batches, gradient_accumulation_steps = data(), STEPS
    for iter_num in range(WINDOWS):
        lr = rate(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        for _micro_step in range(gradient_accumulation_steps):
            loss = loss_of(model, next(batches))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


def scalers() -> list[torch.amp.GradScaler]:
    """The second is nanoGPT's for bfloat16."""
    return [
        torch.amp.GradScaler("cpu", init_scale=2.0**10),
        torch.amp.GradScaler("cpu", enabled=False),
    ]


@pytest.mark.parametrize("scaler", scalers(), ids=["enabled", "disabled"])
def test_nanogpt_carried_over_equals_large_batch(scaler: torch.amp.GradScaler) -> None:
    model = Regressor()
    given = scaler if scaler.is_enabled() else None
    optimizer = gradaccum.wrap(
        torch.optim.AdamW(model.parameters()),
        steps=STEPS,
        clip_norm=CLIP,
        loss_scale=given,
    )
    nanogpt_carried_over(model, optimizer, scaler)
    assert distance(model, large()) < 1e-12
    assert optimizer.result.optimizer_step == WINDOWS


@pytest.mark.parametrize("scaler", scalers(), ids=["enabled", "disabled"])
def test_nanogpt_as_it_stands_is_refused(scaler: torch.amp.GradScaler) -> None:
    """It accumulates by itself: a second window around its own would hold sixteen
    micro-batches.
    """
    model = Regressor()
    given = scaler if scaler.is_enabled() else None
    optimizer = gradaccum.wrap(
        torch.optim.AdamW(model.parameters()),
        steps=STEPS,
        clip_norm=CLIP,
        loss_scale=given,
    )
    with refused(UsageError, "clip_norm="):
        nanogpt(model, optimizer, scaler)
    assert distance(model, Regressor()) == 0


class OptimizersContainer(torch.optim.Optimizer):
    """torchtitan's: an optimizer for each part of a model, behind the interface of
    one.
    """

    def __init__(self, model_parts: list[nn.Module], **optimizer_kwargs: Any) -> None:
        self.optimizers = [
            torch.optim.AdamW(part.parameters(), **optimizer_kwargs)
            for part in model_parts
        ]
        super().__init__(
            [each for part in model_parts for each in part.parameters()],
            optimizer_kwargs,
        )

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {
            str(index): optimizer.state_dict()
            for index, optimizer in enumerate(self.optimizers)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for index, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(index)])


class Titan:
    """A trainer of a model in two parts, as torchtitan's; `wrap` are the options of
    `gradaccum.wrap`.
    """

    def __init__(self, **wrap: Any) -> None:
        self.model = Regressor()
        self.model_parts: list[nn.Module] = [self.model.layers[0], self.model.layers[2]]
        container = OptimizersContainer(self.model_parts, lr=0.1)
        self.lr_schedulers = [
            LambdaLR(optimizer, lambda update: rate(update) / 0.1)
            for optimizer in container
        ]
        self.optimizers: Any = gradaccum.wrap(container, **wrap)
        self.parameters = [
            each for part in self.model_parts for each in part.parameters()
        ]

    def step_as_it_stands(self, batches: Iterator[dict[str, Tensor]]) -> None:
        self.optimizers.zero_grad()
        for _microbatch in range(STEPS):
            (loss_of(self.model, next(batches)) / STEPS).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizers.step()
        for scheduler in self.lr_schedulers:
            scheduler.step()

    def micro_batch(self, batch: dict[str, Tensor]) -> None:
        """Less the division and the clipping; the schedulers, which are the parts' own,
        follow the window's result.
        """
        self.optimizers.zero_grad()
        loss_of(self.model, batch).backward()
        self.optimizers.step()
        if self.optimizers.result.applied:
            for scheduler in self.lr_schedulers:
                scheduler.step()


def test_torchtitan_carried_over_equals_large_batch() -> None:
    """Wrapped is the container: the norm is that of all parts."""
    trainer = Titan(steps=STEPS, clip_norm=CLIP)
    for batch in data():
        trainer.micro_batch(batch)
    assert distance(trainer.model, large()) < 1e-12
    assert trainer.optimizers.result.optimizer_step == WINDOWS


def test_torchtitan_resumes_in_mid_window() -> None:
    whole, resumed = (
        Titan(steps=STEPS, clip_norm=CLIP),
        Titan(steps=STEPS, clip_norm=CLIP),
    )
    for index, batch in enumerate(data()):
        if index == 6:
            resumed.model.load_state_dict(whole.model.state_dict())
            resumed.optimizers.load_state_dict(
                copy.deepcopy(whole.optimizers.state_dict())
            )
            for mine, theirs in zip(
                resumed.lr_schedulers, whole.lr_schedulers, strict=True
            ):
                mine.load_state_dict(theirs.state_dict())
        whole.micro_batch(batch)
        if index >= 6:
            resumed.micro_batch(batch)
    assert distance(resumed.model, whole.model) == 0


def test_torchtitan_as_it_stands_is_refused() -> None:
    trainer, batches = Titan(steps=STEPS, clip_norm=CLIP), data()
    with refused(UsageError, "clip_norm="):
        trainer.step_as_it_stands(batches)
    assert distance(trainer.model, Regressor()) == 0
