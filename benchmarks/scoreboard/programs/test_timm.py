"""``train_one_epoch`` of timm's ``train.py``, which stands at the root of its repository:
the last window of an epoch is one update, with the gradient of all its micro-batches.
"""

from types import SimpleNamespace

import pytest
import torch
from timm.models import VisionTransformer
from timm.task import ClassificationTask
from torch import Tensor, nn

train = pytest.importorskip("train", reason="timm's train.py is not on the path")


def last_gradient(items: int, size: int, steps: int) -> Tensor:
    """Return the gradient of the epoch's last update; the learning rate is 0."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, num_classes=3, embed_dim=8, depth=1, num_heads=2
    ).double()
    images = torch.randn(items, 3, 8, 8, dtype=torch.float64)
    labels = torch.arange(items) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(model.head.weight.grad.clone())
    )
    arguments = SimpleNamespace(
        grad_accum_steps=steps,
        mixup_off_epoch=0,
        distributed=False,
        prefetcher=False,
        channels_last=False,
        synchronize_step=False,
        clip_grad=None,
        log_interval=100,
        rank=0,
        world_size=1,
        save_images=False,
        recovery_interval=0,
    )
    train.train_one_epoch(
        0,
        model,
        list(zip(images.split(size), labels.split(size), strict=True)),
        optimizer,
        arguments,
        model_dtype=torch.float64,
        task=ClassificationTask(model, nn.CrossEntropyLoss()),
        device=torch.device("cpu"),
    )
    return gradients[-1]


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_short_last_window(micro_batches: int) -> None:
    items = 8 + 2 * micro_batches
    accumulated = last_gradient(items, size=2, steps=4)
    torch.testing.assert_close(accumulated, last_gradient(items, size=8, steps=1))
