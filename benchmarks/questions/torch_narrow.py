"""torch, bfloat16 gradients: what summing them in float32 costs beside autograd's own
sum in bfloat16, and beside a buffer kept by hand.

Counted are the bytes of gradients and sums that live at once, at the worst moment of a
backward pass, and how far the gradient that the optimizer gets is from the float64 sum
of the same micro-batches. Autograd's sum is the smallest and the least right; a full
float32 buffer beside full gradients is the largest; gradients that leave ``.grad`` one
by one need the buffer and one parameter's gradient. ``benchmarks/README.md`` says why
no bar of 1.00 holds here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import gradaccum
from benchmarks.case import Case

BASELINE = "hand-written loop, sums in bfloat16"
STEPS = 32
ITEMS = 8
LAYERS = 8
SIZES = {"0.5 M parameters": 256, "8 M parameters": 1024}
"""Width of an MLP of square layers."""


class Contestant(NamedTuple):
    """One way to run a window."""

    window: Callable[[], None]
    sums: Callable[[], Iterable[Tensor | None]]
    """What it holds beside ``.grad``."""
    optimizer: torch.optim.Optimizer
    """The one that gets the gradient."""


def cases(quick: bool) -> Iterator[Case]:
    for name, width in list(SIZES.items())[: 1 if quick else None]:
        torch.manual_seed(0)
        xs = list(torch.randn(STEPS, ITEMS, width, dtype=torch.bfloat16))
        recipes = {
            BASELINE: _in_grad,
            "hand-written loop, float32 buffers": _in_buffers,
            "gradaccum": _wrapped,
        }
        models = {label: _model(width) for label in recipes}
        contestants = {
            label: recipe(models[label], xs) for label, recipe in recipes.items()
        }
        true = _true_gradient(_model(width), xs)
        counts = {
            label: _counts(models[label], contestant, true)
            for label, contestant in contestants.items()
        }
        yield Case(
            name,
            BASELINE,
            {label: contestant.window for label, contestant in contestants.items()},
            counts,
        )


def _model(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
    ).to(torch.bfloat16)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def _in_grad(model: nn.Module, xs: list[Tensor]) -> Contestant:
    optimizer = _optimizer(model)

    def window() -> None:
        for x in xs:
            (_loss(model, x) / STEPS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(window, lambda: (), optimizer)


def _in_buffers(model: nn.Module, xs: list[Tensor]) -> Contestant:
    optimizer, parameters = _optimizer(model), list(model.parameters())
    sums = [
        torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters
    ]

    def window() -> None:
        for x in xs:
            _loss(model, x).backward()  # type: ignore[no-untyped-call]
            for total, parameter in zip(sums, parameters, strict=True):
                total.add_(parameter.grad)  # type: ignore[arg-type]
                parameter.grad = None
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = (total / STEPS).to(parameter.dtype)
            total.zero_()
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(window, lambda: sums, optimizer)


def _wrapped(model: nn.Module, xs: list[Tensor]) -> Contestant:
    inner = _optimizer(model)
    optimizer = gradaccum.wrap(inner, steps=STEPS)

    def window() -> None:
        for x in xs:
            _loss(model, x).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    def sums() -> list[Tensor]:
        return list(optimizer._window.saved_sums().values())

    return Contestant(window, sums, inner)


def _true_gradient(model: nn.Module, xs: list[Tensor]) -> Tensor:
    """The float64 mean of the micro-batches' bfloat16 gradients."""
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(_loss(model, x), parameters) for x in xs]
    return torch.stack(
        [torch.cat([g.double().flatten() for g in each]) for each in gradients]
    ).mean(0)


def _counts(model: nn.Module, contestant: Contestant, true: Tensor) -> dict[str, float]:
    parameters, peak, got = list(model.parameters()), 0, list[Tensor]()

    def note(*_: object) -> None:
        nonlocal peak
        peak = max(
            peak,
            _bytes([*contestant.sums(), *(parameter.grad for parameter in parameters)]),
        )

    def take(*_: object) -> None:
        got.append(
            torch.cat(
                [
                    parameter.grad.double().flatten()
                    for parameter in parameters
                    if parameter.grad is not None
                ]
            )
        )

    handles = [
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]
    handles.append(contestant.optimizer.register_step_pre_hook(take))
    contestant.window()
    for handle in handles:
        handle.remove()
    size = sum(parameter.numel() for parameter in parameters)
    return {
        "peak bytes per parameter": peak / size,
        "relative error": float((got[0] - true).norm() / true.norm()),
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Each storage once."""
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors
            if t is not None
        }.values()
    )
