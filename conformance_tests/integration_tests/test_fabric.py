"""Lightning Fabric over a wrapped optimizer: set up, differentiated, clipped, saved and
loaded by Fabric, as the large batches' run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gradaccum

from .lightning_model import WARNINGS, falling, inner_of, large
from .regression import X, Y, distance, make_net, mean_square

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


class Run:
    """A loop of Fabric's documentation, over 13 micro-batches of two rows."""

    def __init__(self, net: nn.Module, plugins: Any = None, **options: Any) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
        self.net = net
        self.dtype = next(net.parameters()).dtype
        wrapped = gradaccum.wrap(inner_of(net), steps=4, **options)
        self.schedule = gradaccum.wrap(falling(wrapped))
        self.model, self.opt = self.fabric.setup(net, wrapped)
        self.state = {"model": self.model, "opt": self.opt}

    def epoch(self, start: int = 0, stop: int = 13, **clip: Any) -> None:
        for index in range(start, stop):
            rows = slice(2 * index, 2 * index + 2)
            self.opt.zero_grad()
            loss = mean_square(
                self.model, X[rows].to(self.dtype), Y[rows].to(self.dtype)
            )
            self.fabric.backward(loss)
            if clip:
                self.fabric.clip_gradients(self.model, self.opt, **clip)
            self.opt.step()
            if index == 12:
                self.opt.flush()
            self.schedule.step()


def test_clipping_a_part_of_the_window_is_refused() -> None:
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        Run(make_net()).epoch(max_norm=0.05)


def test_clipping_where_the_sums_are_apart() -> None:
    """Each micro-batch is clipped, as in the loop without Fabric."""
    run = Run(make_net(), separate_sums=True)
    net = make_net()
    run.epoch(stop=4, max_norm=0.05)
    opt = gradaccum.wrap(inner_of(net), steps=4, separate_sums=True)
    for x, y in zip(X[:8].split(2), Y[:8].split(2), strict=True):
        opt.zero_grad()
        mean_square(net, x, y).backward()
        assert float(clip_grad_norm_(net.parameters(), 0.05)) > 0.05
        opt.step()
    assert opt.result.applied
    assert distance(run.net, net) < 1e-12


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}], ids=str)
def test_saved_and_loaded_in_mid_window(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The uninterrupted run is that of the large batches."""
    uninterrupted, stopped, resumed = (Run(make_net(), **options) for _ in range(3))
    uninterrupted.epoch()
    assert distance(uninterrupted.net, large(1)) < 1e-12
    stopped.epoch(stop=6)
    path = tmp_path / "state.ckpt"
    stopped.fabric.save(path, stopped.state)
    saved = torch.load(path, weights_only=True)["opt"]["gradaccum"]
    assert saved["micro_step"] == 2
    resumed.fabric.load(path, resumed.state)
    resumed.epoch(start=6)
    assert distance(resumed.net, uninterrupted.net) == 0
    assert resumed.opt.result == uninterrupted.opt.result


def test_scaler_of_float16_is_the_windows() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    run = Run(make_net().float(), plugin, loss_scale=scaler)
    run.epoch()
    assert run.opt.result.optimizer_step == 4
    assert scaler.state_dict()["_growth_tracker"] == 4
    assert distance(run.net.double(), large(1)) < 2**-8
