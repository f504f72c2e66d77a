"""The rows of torchtune: the training loop of its recipe for one device, without what
the recipe loads and logs.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torchtune.models.llama2 import llama2
from torchtune.modules.loss import CEWithChunkedOutputLoss

from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import FULL, STEPS, moved, sgd

LENGTH = 6


def recipe() -> Any:
    """An object of the recipe's class; it stands in the wheel as a script."""
    path = str(
        metadata.distribution("torchtune").locate_file(
            "recipes/full_finetune_single_device.py"
        )
    )
    spec: Any = importlib.util.spec_from_file_location("torchtune_recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullFinetuneRecipeSingleDevice.__new__(
        module.FullFinetuneRecipeSingleDevice
    )


def trained(micro: bool, even: bool, prompt: int) -> Gradients:
    """`prompt`: tokens at each item's beginning that are no labels."""
    torch.manual_seed(0)
    model = llama2(
        vocab_size=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        embed_dim=8,
        max_seq_len=LENGTH,
    ).double()
    tokens = torch.randint(0, 12, (FULL, LENGTH))
    labels = tokens.clone()
    labels[:, :prompt] = -100
    for at in range(FULL):
        labels[at, LENGTH if even else 2 + at % 5 :] = -100
    steps, run = STEPS if micro else 1, recipe()
    loss = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss.num_output_chunks)
    batches = [
        {"tokens": a, "labels": b}
        for a, b in zip(tokens.chunk(steps), labels.chunk(steps), strict=True)
    ]
    run._model, run._loss_fn, run._optimizer, run._dataloader = (
        model,
        loss,
        sgd(model),
        Batches(batches),
    )
    run._gradient_accumulation_steps, run._steps_per_epoch, run.max_steps_per_epoch = (
        steps,
        1,
        None,
    )
    run._compile = run._optimizer_in_bwd = run._log_peak_memory_stats = (
        run.profiler_profile_memory
    ) = False
    run._clip_grad_norm = run._lr_scheduler = None
    run.epochs_run, run.total_epochs, run.global_step, run._log_every_n_steps = (
        0,
        1,
        0,
        100,
    )
    run._device, run.activations_handling_ctx = torch.device("cpu"), nullcontext()
    run._profiler = SimpleNamespace(
        start=lambda: None, step=lambda: None, stop=lambda: None
    )
    run.ignore_labels_cache, run.save_checkpoint = (
        torch.full((FULL, 1), -100),
        lambda epoch: None,
    )
    return moved(model, run.train)


class Batches(list[Any]):
    """What the loop knows of a loader."""

    sampler = SimpleNamespace(set_epoch=lambda epoch: None)


def with_prompt(*, micro: bool, even: bool) -> Gradients:
    return trained(micro, even, 1)


def without_prompt(*, micro: bool, even: bool) -> Gradients:
    return trained(micro, even, 0)
