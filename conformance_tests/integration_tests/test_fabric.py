"""Lightning Fabric over a wrapped optimizer: set up, differentiated, clipped, saved and
loaded by Fabric, as the large batches' run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

pytest.importorskip("lightning", reason="needs Lightning")

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gradaccum
from conformance_tests.integration_tests.lightning_model import (
    WARNINGS,
    X,
    Y,
    halved,
    inner_of,
    large,
    loss_of,
    make_net,
)
from conformance_tests.integration_tests.regression import distance

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]

CLIP = 0.05
SUMS = [{}, {"separate_sums": True}]


class Run:
    """A loop of Fabric's documentation, over micro-batches of two rows."""

    def __init__(
        self, net: nn.Module, plugins: Any = None, gate: bool = False, **options: Any
    ) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
        self.net, self.dtype = net, next(net.parameters()).dtype
        self.wrapped = gradaccum.wrap(inner_of(net), steps=4, **options)
        self.scheduler = gradaccum.wrap(halved(self.wrapped)) if gate else None
        self.model, self.opt = self.fabric.setup(net, self.wrapped)

    @property
    def state(self) -> dict[str, Any]:
        kept = {"scheduler": self.scheduler} if self.scheduler else {}
        return {"model": self.model, "opt": self.opt, **kept}

    def epoch(self, start: int = 0, stop: int = 13, **clip: Any) -> None:
        for index in range(start, stop):
            x, y = (each[2 * index : 2 * index + 2].to(self.dtype) for each in (X, Y))
            self.opt.zero_grad()
            self.fabric.backward(loss_of(self.model, x, y))
            if clip:
                self.fabric.clip_gradients(self.model, self.opt, **clip)
            self.opt.step()
            if index == 12:
                self.opt.flush()
            if self.scheduler:
                self.scheduler.step()


@pytest.mark.parametrize("how", [{"max_norm": CLIP}, {"clip_val": CLIP}], ids=str)
def test_clipping_a_part_of_the_window(how: dict[str, float]) -> None:
    """Each micro-batch is clipped where the sums are apart, as the loop says: the mean
    of four gradients.
    """
    run, net = Run(make_net(), separate_sums=True), make_net()
    run.epoch(stop=4, max_norm=CLIP)
    parameters = list(net.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for x, y in zip(X[:8].split(2), Y[:8].split(2), strict=True):
        net.zero_grad()
        loss_of(net, x, y).backward()
        assert float(clip_grad_norm_(parameters, CLIP)) > CLIP
        for total, p in zip(sums, parameters, strict=True):
            total += p.grad / 4
    for total, p in zip(sums, parameters, strict=True):
        p.grad = total
    inner_of(net).step()
    assert distance(run.net, net) < 1e-12
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        Run(make_net()).epoch(**how)


@pytest.mark.parametrize("options", [*SUMS, {"gate": True}], ids=str)
def test_training_equals_large_batches(options: dict[str, Any]) -> None:
    run = Run(make_net(), **options)
    run.epoch()
    run.epoch()
    assert distance(run.net, large(gate=options.get("gate", False))) < 1e-12
    assert run.opt.result.optimizer_step == 8


@pytest.mark.parametrize("options", [*SUMS, {"gate": True}], ids=str)
@pytest.mark.parametrize("stop", [2, 6])
def test_saved_and_loaded_in_mid_window(
    stop: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole, first, second = (Run(make_net(), **options) for _ in range(3))
    whole.epoch()
    first.epoch(stop=stop)
    path = tmp_path / "state.ckpt"
    first.fabric.save(path, first.state)
    saved = torch.load(path, weights_only=True)["opt"]["gradaccum"]
    assert saved["micro_step"] == stop % 4
    second.fabric.load(path, second.state)
    second.epoch(start=stop)
    assert all(map(torch.equal, second.net.parameters(), whole.net.parameters()))
    assert second.wrapped.result == whole.wrapped.result


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_bf16_mixed_equals_the_loop_without_fabric(options: dict[str, Any]) -> None:
    net, autocast = make_net().float(), torch.autocast("cpu", dtype=torch.bfloat16)
    plugin = MixedPrecision("bf16-mixed", "cpu")
    run = Run(make_net().float(), plugin, **options)
    run.epoch(stop=4)
    for x, y in zip(X[:8].float().split(2), Y[:8].float().split(2), strict=True):
        with autocast:
            loss = loss_of(net, x, y)
        (loss / 4).backward()
    inner_of(net).step()
    assert all(map(torch.equal, run.net.parameters(), net.parameters()))


def test_scaler_of_float16_is_the_windows() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    run = Run(make_net().float(), plugin, loss_scale=scaler)
    run.epoch()
    assert run.opt.result.optimizer_step == 4
    assert scaler.state_dict()["_growth_tracker"] == 4
    assert distance(run.net.double(), large(1)) < 2**-8
    with pytest.raises(gradaccum.UsageError, match="loss_scale=scaler"):
        Run(make_net().float(), plugin).epoch()
