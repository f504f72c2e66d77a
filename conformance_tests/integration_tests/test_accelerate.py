"""A wrapped optimizer that Accelerate prepares, in Accelerate's own loop, beside the
large batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("accelerate", reason="needs accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import (
    Items,
    Regressor,
    distance,
    loss_of,
)
from conformance_tests.meta_tests.test_benchmarks import (
    require_as_measured,
    rows_measured,
    rows_of_page,
)
from gradaccum import UsageError
from gradaccum_torch.optimizer import AccumulatingOptimizer

MICRO, STEPS = 2, 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    forget_settings()


def forget_settings() -> None:
    """Accelerate keeps them for the process."""
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


class Prepared(NamedTuple):
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    """Accelerate's own, around `opt`."""
    loader: Any
    scheduler: Any
    opt: AccumulatingOptimizer


def prepared(
    count: int = 20,
    scaler: torch.amp.GradScaler | None = None,
    wrap: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Prepared:
    accelerator, model = Accelerator(cpu=True, **options), Regressor(dtype)
    accelerator.scaler = scaler
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    opt = gradaccum.wrap(inner, **{"steps": STEPS, "clip_norm": 1.0, **(wrap or {})})
    scheduler, loader = (
        gradaccum.wrap(falling(opt)),
        DataLoader(Items(count, dtype), batch_size=MICRO),
    )
    return Prepared(
        accelerator, *accelerator.prepare(model, opt, loader, scheduler), opt
    )


def falling(opt: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(opt, lambda update: 1 / (1 + update))


def epoch(run: Prepared) -> None:
    for batch in run.loader:
        micro_batch(run, batch)
    run.opt.flush()
    run.scheduler.step()


def large(count: int = 20, epochs: int = 2, size: int = MICRO * STEPS) -> nn.Module:
    model = Regressor()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    opt = gradaccum.wrap(inner, steps=1, clip_norm=1.0)
    scheduler = falling(inner)
    for batch in [*DataLoader(Items(count), batch_size=size)] * epochs:
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
    return model


@pytest.mark.parametrize("separate", [False, True])
def test_loop_equals_large_batch(separate: bool) -> None:
    """Windows of four, four and two micro-batches, twice."""
    run = prepared(wrap={"separate_sums": separate})
    for _ in range(2):
        epoch(run)
    assert distance(run.model, large()) < 1e-12
    assert run.opt.result.optimizer_step == 6
    assert run.scheduler.get_last_lr() == pytest.approx([0.1 / 7])


def test_scaler_equals_large_batch() -> None:
    """Accelerate hands the wrapper to the scaler that it made for fp16, in each
    micro-batch. Another one is refused.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = prepared(scaler=scaler, wrap={"loss_scale": scaler})
    for _ in range(2):
        epoch(run)
    assert distance(run.model, large()) < 1e-12
    assert scaler.state_dict()["_growth_tracker"] == 6
    with refused(UsageError, "loss_scale=scaler"):
        epoch(prepared(scaler=scaler))


@pytest.mark.parametrize("after", [6, 10], ids=["mid-window", "open short window"])
def test_state_saved_in_mid_window(tmp_path: Path, after: int) -> None:
    whole = prepared()
    for index, batch in enumerate(whole.loader, 1):
        micro_batch(whole, batch)
        if index == after:
            whole.accelerator.save_state(str(tmp_path))
    epoch(whole)
    forget_settings()

    resumed = prepared()
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.opt.result.micro_step == 2
    for batch in resumed.accelerator.skip_first_batches(resumed.loader, after):
        micro_batch(resumed, batch)
    epoch(resumed)
    assert distance(resumed.model, whole.model) == 0
    assert resumed.opt.result == whole.opt.result
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def micro_batch(run: Prepared, batch: Any) -> None:
    """Of Accelerate's loop, without its accumulation and its clipping."""
    run.accelerator.backward(loss_of(run.model, batch))
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()


def test_accumulate_nests() -> None:
    """``accumulate`` makes one micro-batch of two, and a window is four of those:
    sixteen items.
    """
    run = prepared(32, gradient_accumulation_steps=2)
    for batch in run.loader:
        with run.accelerator.accumulate(run.model):
            micro_batch(run, batch)
    assert run.opt.result.optimizer_step == 2
    assert distance(run.model, large(32, epochs=1, size=16)) < 1e-12
    assert run.scheduler.get_last_lr() == [0.1 / 3]


def test_equals_own_accumulation_bit_for_bit() -> None:
    """Full windows in bfloat16: Accelerate divides each loss by the 4 that the window
    divides by at its end.
    """
    options = {"dtype": torch.float32, "mixed_precision": "bf16"}
    run = prepared(16, wrap={"clip_norm": None}, **options)
    epoch(run)
    own = Regressor(torch.float32)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    inner = torch.optim.AdamW(own.parameters(), lr=0.1)
    data = DataLoader(Items(16, torch.float32), batch_size=MICRO)
    made = accelerator.prepare(own, inner, data, falling(inner))
    alone = Prepared(accelerator, *made, run.opt)
    for batch in alone.loader:
        with accelerator.accumulate(alone.model):
            micro_batch(alone, batch)
    assert distance(run.model, own) == 0


def test_everyday_loops_end_as_the_page_says() -> None:
    """The benchmarks' page has Accelerate's loops by its guide beside ours."""
    measured = rows_measured("torch")
    assert any("Accelerate" in row.loop for row in measured)
    require_as_measured(
        [row for row in rows_of_page() if row.framework == "torch"], measured
    )
