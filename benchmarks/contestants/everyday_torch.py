"""The everyday question's torch loops."""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradaccum
from benchmarks.contestants.runs import CLIP, EPOCHS, LARGE, RATE, STEPS, UPDATES
from benchmarks.questions.everyday import IGNORED, Arrays, Batch, Loop

Training = tuple[nn.Module, Any, Any]
"""A model, its optimizer and its schedule."""


def loops() -> dict[str, Loop]:
    """By name; the large batch is the first."""
    found: dict[str, Loop] = {
        LARGE: large,
        "by hand: `loss / accum`, `if (i + 1) % accum == 0`": by_hand,
        "gradaccum, the old loop left in": leftovers,
        "gradaccum, `clip_grad_norm_` left in": clipped_by_hand,
        "gradaccum, stepping the inner optimizer": inner_stepped,
        "gradaccum, no `epoch`, no weights, scheduler not wrapped": plain,
        "gradaccum, `epoch`, no weights": unweighted,
        "gradaccum, `epoch` and weights": careful,
    }
    guides: dict[str, Loop] = {
        "Accelerate, `accumulate`": accelerate,
        "Accelerate, its guide's loop for token counts": accelerate_counts,
    }
    return found | (guides if find_spec("accelerate") else {})


def start(first: Arrays) -> tuple[nn.Module, torch.optim.Optimizer]:
    (inputs, hidden), (_, classes) = first[0].shape, first[2].shape
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes)
    ).double()
    for parameter, value in zip(model.parameters(), first, strict=True):
        parameter.data = torch.tensor(value.T).contiguous()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def falling(optimizer: Any, updates: int = UPDATES) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)


def end(model: nn.Module) -> Arrays:
    return [parameter.detach().numpy().T.copy() for parameter in model.parameters()]


def tensors(batches: list[Batch]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in batches]


def items(y: Tensor) -> int:
    return int((y != IGNORED).sum())


def update(model: nn.Module, optimizer: Any, schedule: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def large(batches: list[Batch], first: Arrays) -> Arrays:
    model, optimizer = start(first)
    schedule = falling(optimizer)
    for _, begin in itertools.product(range(EPOCHS), range(0, len(batches), STEPS)):
        window = tensors(batches)[begin : begin + STEPS]
        cross_entropy(
            model(torch.cat([x for x, _ in window])), torch.cat([y for _, y in window])
        ).backward()  # type: ignore[no-untyped-call]
        update(model, optimizer, schedule)
    return end(model)


def by_hand(batches: list[Batch], first: Arrays) -> Arrays:
    model, optimizer = start(first)
    schedule = falling(optimizer)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(tensors(batches)):
            (cross_entropy(model(x), y) / STEPS).backward()  # type: ignore[no-untyped-call]
            if (i + 1) % STEPS == 0:
                update(model, optimizer, schedule)
    return end(model)


def leftovers(batches: list[Batch], first: Arrays) -> Arrays:
    model, inner = start(first)
    optimizer = gradaccum.wrap(inner, steps=STEPS, clip_norm=CLIP)
    schedule = gradaccum.wrap(falling(optimizer))
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(tensors(batches)):
            (cross_entropy(model(x), y) / STEPS).backward()  # type: ignore[no-untyped-call]
            if (i + 1) % STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return end(model)


def clipped_by_hand(batches: list[Batch], first: Arrays) -> Arrays:
    model, inner = start(first)
    optimizer = gradaccum.wrap(inner, steps=STEPS)
    schedule = gradaccum.wrap(falling(optimizer))
    for x, y in tensors(batches):
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        update(model, optimizer, schedule)
    return end(model)


def inner_stepped(batches: list[Batch], first: Arrays) -> Arrays:
    model, inner = start(first)
    optimizer = gradaccum.wrap(inner, steps=STEPS, clip_norm=CLIP)
    for x, y in tensors(batches):
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        inner.step()
        optimizer.zero_grad()
    return end(model)


def plain(batches: list[Batch], first: Arrays) -> Arrays:
    model, inner = start(first)
    optimizer = gradaccum.wrap(inner, steps=STEPS, clip_norm=CLIP)
    schedule = falling(optimizer, EPOCHS * len(batches))
    for _ in range(EPOCHS):
        for x, y in tensors(batches):
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return end(model)


def unweighted(batches: list[Batch], first: Arrays) -> Arrays:
    return by_epoch(batches, first, lambda y: None)


def careful(batches: list[Batch], first: Arrays) -> Arrays:
    return by_epoch(batches, first, items)


def by_epoch(batches: list[Batch], first: Arrays, weight: Any) -> Arrays:
    model, inner = start(first)
    optimizer = gradaccum.wrap(inner, steps=STEPS, clip_norm=CLIP)
    schedule = gradaccum.wrap(
        falling(optimizer, optimizer.updates_in(batches, epochs=EPOCHS))
    )
    for _ in range(EPOCHS):
        for x, y in optimizer.epoch(tensors(batches)):
            optimizer.backward(cross_entropy(model(x), y), weight=weight(y))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return end(model)


def prepared(
    batches: list[Batch], first: Arrays, **options: Any
) -> tuple[Any, Training, Any]:
    """Accelerate's accelerator, training and loader."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = start(first)
    loader = torch.utils.data.DataLoader(tensors(batches), batch_size=None)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, loader, falling(optimizer)
    )
    return accelerator, (model, optimizer, schedule), loader


def accelerate(batches: list[Batch], first: Arrays) -> Arrays:
    """https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, its
    first loop, with a clipped norm.
    """
    accelerator, (model, optimizer, schedule), loader = prepared(
        batches, first, gradient_accumulation_steps=STEPS
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return end(model)


def accelerate_counts(batches: list[Batch], first: Arrays) -> Arrays:
    """The same page's loop for windows of different numbers of items: it reads a window
    ahead and divides sums by its count.
    """
    accelerator, (model, optimizer, schedule), loader = prepared(batches, first)
    for _ in range(EPOCHS):
        batch = iter(loader)
        for _ in range(math.ceil(len(loader) / STEPS)):
            window = list(itertools.islice(batch, STEPS))
            count = sum(items(y) for _, y in window)
            for x, y in window:
                accelerator.backward(
                    cross_entropy(model(x), y, reduction="sum") / count
                )
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return end(model)
