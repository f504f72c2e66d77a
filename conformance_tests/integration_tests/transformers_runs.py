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

COUNT, STEPS = 20, 4
"""Two epochs of ten micro-batches of two items: windows of four, four and two."""


def trainer_of(
    folder: Path,
    model: nn.Module | None,
    data: Any,
    wrap: dict[str, Any] | None,
    options: dict[str, Any],
) -> Trainer:
    """With a rate of its own for each update; `wrap` None leaves the optimizer bare."""
    model = Regressor() if model is None else model
    opt: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if wrap is not None:
        opt = gradaccum.wrap(opt, **wrap)
    scheduler: Any = LambdaLR(opt, lambda update: 1 / (1 + update))
    if wrap is not None:
        scheduler = gradaccum.wrap(scheduler)
    defaults: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
    }
    return Trainer(
        model,
        TrainingArguments(str(folder), **{**defaults, **options}),
        train_dataset=Items(COUNT) if data is None else data,
        optimizers=(opt, scheduler),
    )


def bare(
    folder: Path, model: nn.Module | None = None, data: Any = None, **options: Any
) -> Trainer:
    return trainer_of(folder, model, data, None, options)


def large(
    folder: Path, model: nn.Module | None = None, data: Any = None, **options: Any
) -> Trainer:
    size = {"per_device_train_batch_size": 8}
    return trainer_of(folder, model, data, None, {**size, **options})


def wrapped(
    folder: Path,
    model: nn.Module | None = None,
    data: Any = None,
    wrap: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    defaults = {"steps": STEPS, "separate_sums": True, "clip_norm": 1.0}
    trainer = trainer_of(folder, model, data, {**defaults, **(wrap or {})}, options)
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
