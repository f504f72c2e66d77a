"""The pages for coding assistants: their programs give the large batch's updates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import gradaccum

ROOT = Path(__file__).parents[2]
PAGES = ("AGENTS.md", "llms.txt")
SIZES = (6, 6, 6, 3, 6, 6)
"""Items of the micro-batches: the last window is short, and so is one of them."""


def names_of_a_run() -> dict[str, Any]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3).double()
    x = torch.randn(sum(SIZES), 3, dtype=torch.float64)
    y = torch.randn(sum(SIZES), 3, dtype=torch.float64)
    return {
        "gradaccum": gradaccum,
        "torch": torch,
        "model": model,
        "loader": list(zip(x.split(SIZES), y.split(SIZES), strict=True)),
        "loss_fn": torch.nn.functional.mse_loss,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }


LARGE = """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for window in (loader[:4], loader[4:]):
    x, y = map(torch.cat, zip(*window))
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    {clip}
    optimizer.step()
    {schedule}
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize("page", PAGES)
def test_programs_make_the_large_batches_updates(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = names_of_a_run()
    for program in programs:
        exec(program, names)
    large = names_of_a_run()
    clip = CLIP if "clip_norm" in programs[0] else ""
    schedule = "scheduler.step()" if "scheduler" in programs[0] else ""
    exec(LARGE.format(clip=clip, schedule=schedule), large)
    assert names["optimizer"].result.optimizer_step == 2
    names["torch"].testing.assert_close(
        names["model"].weight, large["model"].weight, rtol=1e-6, atol=1e-12
    )
    if len(programs) > 1:
        printed = capsys.readouterr().out
        assert "Accumulation is right for this loss" in printed
        assert "StepResult(applied=True" in printed
