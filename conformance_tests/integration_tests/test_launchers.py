"""The launchers of Fabric, Lightning and Accelerate, each with two workers: their
windows are the large batch's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from conformance_tests.framework_tests.recipes import Recipe, run_recipe

COMMON = """
from conformance_tests.integration_tests import torchvision_ops  # before a trainer looks for it
import torch
import gradaccum

items = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).double()

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2).eval()).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def require_large(model, opt, *windows):
    large, bare = build()
    alone = gradaccum.wrap(bare, steps=1, clip_norm=1.0)
    for x in windows:
        alone.backward(large(x).square().mean())
        alone.step()
        alone.zero_grad()
    assert opt.result.optimizer_step == len(windows)
    for p, q in zip(model.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
"""
UNEQUAL = """
shares = items[:28].split((6, 6, 6, 6, 4)), items[28:].split((4, 4, 4))
windows = torch.cat([*shares[0][:4], *shares[1]]), shares[0][4]

def train(model, inner, rank, prepare):
    opt = gradaccum.wrap(inner, steps=4, clip_norm=1.0, module=model)
    prepared = prepare(opt)
    for x in shares[rank]:
        opt.backward(model(x).square().mean(), weight=len(x))
        prepared.step()
        prepared.zero_grad()
    opt.flush()
    require_large(model, opt, *windows)
"""
FABRIC = """
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model, inner = build()
train(fabric.setup_module(model), inner, fabric.global_rank, fabric.setup_optimizers)
"""
ACCELERATE = """
from accelerate import Accelerator, debug_launcher

def worker():
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    model, inner = build()
    train(accelerator.prepare(model), inner, accelerator.process_index, accelerator.prepare)
    accelerator.end_training()

debug_launcher(worker, num_processes=2)  # without a GPU `accelerate launch` starts one process
"""
LIGHTNING = """
import os
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
from gradaccum_torch.integrations.lightning import AccumulationCallback

class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers, _ = build()

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return gradaccum.wrap(torch.optim.AdamW(self.parameters(), lr=0.1), steps=4, clip_norm=1.0, separate_sums=True)

# Lightning's launcher starts this file a second time, and says there which worker it is.
own = range(int(os.environ.get("LOCAL_RANK", 0)), 40, 2)
loader = DataLoader(TensorDataset(items), batch_size=2, sampler=own)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", callbacks=[AccumulationCallback()], use_distributed_sampler=False, **quiet
)
model = Regressor()
trainer.fit(model, loader)
require_large(model, trainer.optimizers[0], *items.split(16))
"""
JOBS = {
    "Fabric": UNEQUAL + FABRIC,
    "Lightning": LIGHTNING,
    "Accelerate": UNEQUAL + ACCELERATE,
}


@pytest.mark.parametrize("name", JOBS)
def test_two_workers(name: str, tmp_path: Path) -> None:
    run_recipe(
        Recipe(name, COMMON + JOBS[name], "python train.py"),
        tmp_path,
        OMP_NUM_THREADS="1",
    )
