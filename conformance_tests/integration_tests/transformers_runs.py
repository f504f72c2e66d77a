"""A small Trainer of transformers in three kinds: over a bare optimizer, over a large
batch, and over a wrapped optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments

import gradaccum
from conformance_tests.integration_tests.regression import Items, Regressor
from gradaccum_torch.integrations.transformers import AccumulationCallback

COUNT, MICRO, STEPS, EPOCHS = 20, 2, 4, 2
"""Ten micro-batches an epoch: windows of four, four and two."""


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    sizes = {"per_device_train_batch_size": MICRO, "num_train_epochs": EPOCHS}
    return TrainingArguments(str(folder), **{**plain, **sizes, **options})


def falling(opt: torch.optim.Optimizer) -> LambdaLR:
    """A rate of its own for each update."""
    return LambdaLR(opt, lambda update: 1 / (1 + update))


def bare(
    folder: Path, model: nn.Module | None = None, data: Any = None, **options: Any
) -> Trainer:
    model = Regressor() if model is None else model
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = Items(COUNT) if data is None else data
    return Trainer(
        model,
        arguments(folder, **options),
        train_dataset=data,
        optimizers=(opt, falling(opt)),
    )


def large(folder: Path, **options: Any) -> Trainer:
    return bare(folder, **{"per_device_train_batch_size": MICRO * STEPS, **options})


def wrapped(
    folder: Path,
    model: nn.Module | None = None,
    data: Any = None,
    wrap: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    model = Regressor() if model is None else model
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    opt = gradaccum.wrap(
        inner,
        **{"steps": STEPS, "separate_sums": True, "clip_norm": 1.0, **(wrap or {})},
    )
    data, scheduler = (
        Items(COUNT) if data is None else data,
        gradaccum.wrap(falling(opt)),
    )
    trainer = Trainer(
        model,
        arguments(folder, **options),
        train_dataset=data,
        optimizers=(opt, scheduler),
    )
    trainer.add_callback(AccumulationCallback(trainer))
    return trainer


def trained(trainer: Trainer) -> Trainer:
    """On one thread: others wait longer for each other than so small a model takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer.train()
    finally:
        torch.set_num_threads(threads)
    return trainer


def logged(trainer: Trainer, name: str, every: int = 1) -> list[float]:
    """The values of `name`, of an epoch's micro-batches only those that end a window;
    `every`: micro-batches of a window.
    """
    lines = [line for line in trainer.state.log_history if name in line]
    size = len(lines) // EPOCHS
    return [
        line[name]
        for at, line in enumerate(lines)
        if (at % size + 1) % every == 0 or at % size == size - 1
    ]
