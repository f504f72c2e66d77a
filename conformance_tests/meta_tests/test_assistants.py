"""The pages for coding assistants: their programs and commands run, and give the large
batch's updates.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradaccum

ROOT = Path(__file__).parents[2]
PAGES = ("AGENTS.md", "llms.txt")
SIZES = (6, 6, 6, 3, 6, 6)
"""Items of the micro-batches: the last window is short, and so is one of them."""


def blocks_of(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def inline_code_of(page: str) -> set[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return set(re.findall(r"`([^`]+)`", without_blocks))


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
    programs = blocks_of(page, "python")
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


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    commands = [
        *"".join(blocks_of(page, "bash")).splitlines(),
        *(code for code in inline_code_of(page) if code.startswith("gradaccum ")),
    ]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "gradaccum"
        done = subprocess.run(
            [sys.executable, "-m", program, *arguments],
            cwd=tmp_path,
            env=os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_page_is_short_and_its_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 28
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert links
    assert all((ROOT / link).exists() for link in links)
