"""OpenCLIP's ``--accum-freq``: one epoch of it moves the model, its logit scale too, as
one batch of all pairs does.
"""

from types import SimpleNamespace

import torch
from open_clip import CLIP, ClipLoss, CLIPTextCfg, CLIPVisionCfg
from open_clip_train.train import train_one_epoch
from torch import Tensor


class Pairs(list[tuple[Tensor, Tensor]]):
    num_batches, num_samples = 4, 8


def test_accum_freq() -> None:
    images = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    texts = torch.randint(1, 11, (8, 4))
    scales = []
    for steps in (1, 4):
        torch.manual_seed(0)
        model = CLIP(
            8,
            CLIPVisionCfg(layers=1, width=8, head_width=4, patch_size=4, image_size=8),
            CLIPTextCfg(context_length=4, vocab_size=11, width=8, heads=2, layers=1),
            output_dict=True,
        ).double()
        pairs = Pairs(zip(images.chunk(steps), texts.chunk(steps), strict=True))
        loader = SimpleNamespace(dataloader=pairs, set_epoch=lambda epoch: None)
        arguments = SimpleNamespace(
            accum_freq=steps,
            batch_size=8 // steps,
            device="cpu",
            precision="fp32",
            distill=False,
            skip_scheduler=True,
            grad_clip_norm=None,
            wandb=False,
            horovod=False,
            rank=0,
            local_rank=0,
            world_size=1,
            log_every_n_steps=100,
            log_local=False,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = model.logit_scale.item()
        data = {"train": loader}
        train_one_epoch(
            model, data, ClipLoss(), 0, optimizer, None, None, None, arguments
        )
        scales.append(model.logit_scale.item() - before)
    torch.testing.assert_close(scales[1], scales[0], rtol=1e-6, atol=0)
