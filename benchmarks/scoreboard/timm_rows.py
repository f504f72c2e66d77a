"""The rows of timm: ``train_one_epoch`` of its training script, which is in the
repository and not in the wheel.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from timm.models import VisionTransformer
from timm.task import ClassificationTask
from torch import Tensor, nn
from torch.optim import Optimizer

import gradaccum
from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import FULL, MICRO, STEPS, sgd


def script() -> Any:
    spec: Any = importlib.util.spec_from_file_location(
        "timm_train", Path(sys.prefix) / "train.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(count: int, micro: bool) -> Gradients:
    """The gradient of the last update of an epoch of two windows, the second short. The
    script's own loader drops a short batch.
    """
    model = transformer()
    optimizer, found = sgd(model, 0.0), dict[str, Any]()
    optimizer.register_step_pre_hook(
        lambda *_: found.update(
            (name, each.grad.numpy().copy()) for name, each in model.named_parameters()
        )
    )
    train(model, optimizer, batches(count, MICRO if micro else FULL), micro)
    return found


def transformer() -> Any:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=8, patch_size=4, num_classes=3, embed_dim=8, depth=1, num_heads=2
    ).double()


def batches(count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=generator)
    labels = torch.arange(count) % 3
    return list(zip(torch.split(images, size), torch.split(labels, size), strict=True))


def train(model: Any, optimizer: Optimizer, loader: Any, micro: bool) -> None:
    plain: dict[str, Any] = {
        "mixup_off_epoch": 0,
        "distributed": False,
        "prefetcher": False,
        "channels_last": False,
        "synchronize_step": False,
    }
    plain |= {
        "clip_grad": None,
        "log_interval": 100,
        "rank": 0,
        "world_size": 1,
        "save_images": False,
        "recovery_interval": 0,
    }
    arguments = SimpleNamespace(grad_accum_steps=STEPS if micro else 1, **plain)
    run: dict[str, Any] = {
        "task": ClassificationTask(model, nn.CrossEntropyLoss()),
        "device": torch.device("cpu"),
    }
    script().train_one_epoch(
        0, model, loader, optimizer, arguments, model_dtype=torch.float64, **run
    )


def window_of_two(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL + (FULL if even else 2 * MICRO), micro)


def window_of_three(*, micro: bool, even: bool) -> Gradients:
    """With `even` the last window has two micro-batches."""
    return trained(FULL + (2 if even else 3) * MICRO, micro)


def check(count: int) -> gradaccum.LoopReport:
    model = transformer()
    optimizer = sgd(model)
    micro_batches = batches(count, MICRO)
    return gradaccum.check_loop(
        lambda: train(model, optimizer, micro_batches, True),
        optimizer,
        lambda x, labels: nn.functional.cross_entropy(model(x), labels),
        micro_batches,
        steps=STEPS,
    )


CHECKED = {
    "window_of_two": lambda: check(FULL + 2 * MICRO),
    "window_of_three": lambda: check(FULL + 3 * MICRO),
}
