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
    furthest,
    halved,
    inner_of,
    large,
    loss_of,
    make_net,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]

CLIP = 0.05
SUMS = [{}, {"separate_sums": True}]


class Run:
    """A loop of Fabric's documentation, over micro-batches of two rows."""

    def __init__(
        self, net: nn.Module, precision: Any = None, gate: bool = False, **options: Any
    ) -> None:
        self.fabric = Fabric(
            accelerator="cpu", devices=1, **({} if precision is None else precision)
        )
        self.net, self.wrapped = (
            net,
            gradaccum.wrap(inner_of(net), **{"steps": 4, **options}),
        )
        self.scheduler = gradaccum.wrap(halved(self.wrapped)) if gate else None
        self.model, self.opt = self.fabric.setup(net, self.wrapped)

    def micro_batch(self, index: int, **clip: Any) -> None:
        rows = slice(2 * index, 2 * index + 2)
        self.opt.zero_grad()
        self.fabric.backward(
            loss_of(self.model, X[rows].to(self.dtype), Y[rows].to(self.dtype))
        )
        if clip:
            self.fabric.clip_gradients(self.model, self.opt, **clip)
        self.opt.step()
        if self.scheduler:
            self.scheduler.step()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    def epoch(self, start: int = 0, stop: int = 13, **clip: Any) -> None:
        for index in range(start, stop):
            self.micro_batch(index, **clip)
        if stop == 13:
            self.opt.flush()
            if self.scheduler:
                self.scheduler.step()


@pytest.mark.parametrize("options", [*SUMS, {"gate": True}], ids=str)
def test_training_equals_large_batches(options: dict[str, Any]) -> None:
    run = Run(make_net(), **options)
    run.epoch()
    run.epoch()
    assert furthest(run.net, large(gate=options.get("gate", False))) < 1e-12
    assert run.opt.result.optimizer_step == 8


@pytest.mark.parametrize("how", [{"max_norm": CLIP}, {"clip_val": CLIP}], ids=str)
def test_clipping_a_part_of_the_window_is_refused(how: dict[str, float]) -> None:
    run = Run(make_net())
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        run.epoch(**how)


def test_clipping_per_micro_batch_is_the_users_with_separate_sums() -> None:
    """Each micro-batch is clipped, as the loop says: the mean of four gradients."""
    run, net = Run(make_net(), separate_sums=True), make_net()
    run.epoch(stop=4, max_norm=CLIP)
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in zip(X[:8].split(2), Y[:8].split(2), strict=True):
        net.zero_grad()
        loss_of(net, x, y).backward()
        assert float(clip_grad_norm_(net.parameters(), CLIP)) > CLIP
        for total, p in zip(sums, net.parameters(), strict=True):
            total += p.grad / 4
    for total, p in zip(sums, net.parameters(), strict=True):
        p.grad = total
    inner_of(net).step()
    assert furthest(run.net, net) < 1e-12


@pytest.mark.parametrize("options", [*SUMS, {"gate": True}], ids=str)
@pytest.mark.parametrize("stop", [2, 6])
def test_saved_and_loaded_in_mid_window(
    stop: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole, first, second = (Run(make_net(), **options) for _ in range(3))
    whole.epoch()
    first.epoch(stop=stop)
    state = {
        "model": first.model,
        "opt": first.opt,
        **({"scheduler": first.scheduler} if first.scheduler else {}),
    }
    first.fabric.save(tmp_path / "state.ckpt", state)
    assert (
        torch.load(tmp_path / "state.ckpt", weights_only=True)["opt"]["gradaccum"][
            "micro_step"
        ]
        == stop % 4
    )
    other = {
        "model": second.model,
        "opt": second.opt,
        **({"scheduler": second.scheduler} if second.scheduler else {}),
    }
    second.fabric.load(tmp_path / "state.ckpt", other)
    second.epoch(start=stop)
    assert all(map(torch.equal, second.net.parameters(), whole.net.parameters()))
    assert second.wrapped.result == whole.wrapped.result


@pytest.mark.parametrize("options", SUMS, ids=str)
def test_bf16_mixed_equals_the_loop_without_fabric(options: dict[str, Any]) -> None:
    net = make_net().float()
    run = Run(make_net().float(), {"precision": "bf16-mixed"}, **options)
    run.epoch(stop=4)
    for x, y in zip(X[:8].float().split(2), Y[:8].float().split(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, x, y)
        (loss / 4).backward()
    inner_of(net).step()
    assert all(map(torch.equal, run.net.parameters(), net.parameters()))


def test_scaler_of_float16_is_the_windows() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = Run(
        make_net().float(),
        {"plugins": MixedPrecision("16-mixed", "cpu", scaler)},
        loss_scale=scaler,
    )
    run.epoch()
    assert (run.opt.result.optimizer_step, scaler.state_dict()["_growth_tracker"]) == (
        4,
        4,
    )
    assert furthest(run.net.double(), large(1)) < 2**-8
    foreign = Run(
        make_net().float(),
        {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))},
    )
    with pytest.raises(gradaccum.UsageError, match="loss_scale=scaler"):
        foreign.epoch()
