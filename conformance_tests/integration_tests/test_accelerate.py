"""A wrapped optimizer that Accelerate prepares, in Accelerate's own loop, beside the
large batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.amp import GradScaler
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import gradaccum
from conformance_tests.meta_tests.test_benchmarks import (
    require_as_measured,
    rows_measured,
    rows_of_page,
)

from .regression import Items, Regressor, distance


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    forget_settings()


def forget_settings() -> None:
    """Accelerate keeps them for the process."""
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def falling(opt: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(opt, lambda update: 1 / (1 + update))


class Run:
    """Accelerate's loop over micro-batches of two items: of ten, in windows of four,
    four and two.
    """

    def __init__(
        self,
        items: int = 20,
        accumulation_of_accelerate: int = 1,
        scaler: GradScaler | None = None,
        **options: Any,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation_of_accelerate
        )
        self.accelerator.scaler = scaler
        model = Regressor()
        inner = AdamW(model.parameters(), lr=0.1)
        self.opt = gradaccum.wrap(inner, steps=4, **options)
        scheduler = gradaccum.wrap(falling(self.opt))
        loader = DataLoader(Items(items), batch_size=2)
        prepared = self.accelerator.prepare(model, self.opt, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def micro_batch(self, batch: Any) -> None:
        self.accelerator.backward(self.model(**batch)["loss"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def epoch(self) -> None:
        for batch in self.loader:
            self.micro_batch(batch)
        self.opt.flush()
        self.scheduler.step()


def large(items: int = 20, epochs: int = 2, size: int = 8) -> nn.Module:
    model = Regressor()
    inner = AdamW(model.parameters(), lr=0.1)
    opt = gradaccum.wrap(inner, steps=1, clip_norm=1.0)
    scheduler = falling(inner)
    for batch in [*DataLoader(Items(items), batch_size=size)] * epochs:
        model(**batch)["loss"].backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
    return model


@pytest.mark.parametrize("sums", ["in .grad", "separate", "scaled"])
def test_loop_equals_large_batch(sums: str) -> None:
    """Accelerate hands the wrapper to the scaler that it made for fp16, in each
    micro-batch.
    """
    scaler = None
    if sums == "scaled":
        scaler = GradScaler("cpu", init_scale=2.0**10)
    options = {"loss_scale": scaler, "separate_sums": sums == "separate"}
    run = Run(scaler=scaler, clip_norm=1.0, **options)
    run.epoch()
    run.epoch()
    assert distance(run.model, large()) < 1e-12
    assert run.opt.result.optimizer_step == 6
    assert run.scheduler.get_last_lr() == pytest.approx([0.1 / 7])
    assert scaler is None or scaler.state_dict()["_growth_tracker"] == 6


@pytest.mark.parametrize("after", [6, 10], ids=["mid-window", "open short window"])
def test_state_saved_in_mid_window(tmp_path: Path, after: int) -> None:
    uninterrupted = Run()
    for index, batch in enumerate(uninterrupted.loader, 1):
        uninterrupted.micro_batch(batch)
        if index == after:
            uninterrupted.accelerator.save_state(str(tmp_path))
    uninterrupted.epoch()
    forget_settings()

    resumed = Run()
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.opt.result.micro_step == 2
    for batch in resumed.accelerator.skip_first_batches(resumed.loader, after):
        resumed.micro_batch(batch)
    resumed.epoch()
    assert distance(resumed.model, uninterrupted.model) == 0
    assert resumed.opt.result == uninterrupted.opt.result
    last_rates = uninterrupted.scheduler.get_last_lr()
    assert resumed.scheduler.get_last_lr() == last_rates


def test_accumulate_nests() -> None:
    """``accumulate`` makes one micro-batch of two, and a window is four of those:
    sixteen items.
    """
    run = Run(32, accumulation_of_accelerate=2, clip_norm=1.0)
    for batch in run.loader:
        with run.accelerator.accumulate(run.model):
            run.micro_batch(batch)
    assert run.opt.result.optimizer_step == 2
    assert distance(run.model, large(32, epochs=1, size=16)) < 1e-12
    assert run.scheduler.get_last_lr() == [0.1 / 3]


def test_everyday_loops_end_as_the_page_says() -> None:
    """The benchmarks' page has Accelerate's loops by its guide beside ours."""
    measured = rows_measured("torch")
    assert any("Accelerate" in loop for loop, *_ in measured)
    require_as_measured(rows_of_page("torch"), measured)
