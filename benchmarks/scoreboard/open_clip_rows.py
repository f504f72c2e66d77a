"""The row of OpenCLIP: its training loop with ``--accum-freq``."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from open_clip import CLIP, ClipLoss, CLIPTextCfg, CLIPVisionCfg
from open_clip_train.train import train_one_epoch
from torch import Tensor

import gradaccum
from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import FULL, STEPS, moved, sgd

RATE = 1e-3
"""The loop clamps the scale: it must not move far."""


class Pairs(list[tuple[Tensor, Tensor]]):
    """What the loop knows of a loader."""

    num_batches, num_samples = STEPS, FULL


def clip() -> tuple[CLIP, Tensor, Tensor]:
    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=1, width=8, head_width=4, patch_size=4, image_size=8)
    model = CLIP(
        8,
        vision,
        CLIPTextCfg(context_length=4, vocab_size=11, width=8, heads=2, layers=1),
        output_dict=True,
    ).double()
    return (
        model,
        torch.randn(FULL, 3, 8, 8, dtype=torch.float64),
        torch.randint(1, 11, (FULL, 4)),
    )


def accum_freq(*, micro: bool, even: bool) -> Gradients:
    """With `even` the scale is no parameter."""
    model, images, texts = clip()
    model.logit_scale.requires_grad_(not even)
    steps = STEPS if micro else 1
    loader = Pairs(zip(images.chunk(steps), texts.chunk(steps), strict=True))
    plain = {
        "device": "cpu",
        "precision": "fp32",
        "distill": False,
        "skip_scheduler": True,
        "grad_clip_norm": None,
        "wandb": False,
    }
    place = {
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "log_every_n_steps": 100,
        "log_local": False,
        "batch_size": FULL // steps,
    }
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    arguments = SimpleNamespace(accum_freq=steps, horovod=False, **plain, **place)
    return moved(
        model,
        lambda: train_one_epoch(
            model, data, ClipLoss(), 0, sgd(model, RATE), None, None, None, arguments
        ),
        RATE,
    )


def _verified() -> gradaccum.VerificationReport:
    model, images, texts = clip()
    return gradaccum.verify(
        model,
        lambda model, images, texts: ClipLoss()(**model(images, texts)),
        (images, texts),
    )


VERIFIED = {"accum_freq": _verified}
