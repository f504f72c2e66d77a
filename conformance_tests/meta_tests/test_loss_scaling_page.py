"""The page on loss scaling has the code's constants: its table is compared with the signatures of the installed packages."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import gradaccum

PAGE = (Path(gradaccum.__file__).parent / "LOSS_SCALING.md").read_text(encoding="utf-8")


def row(name: str) -> list[str]:
    line = next(line for line in PAGE.splitlines() if line.startswith("|") and name in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def number(cell: str) -> float:
    base, _, power = cell.partition("^")
    return float(base) ** float(power) if power else float(cell)


def test_page_has_our_defaults() -> None:
    defaults = {field.name: field.default for field in fields(gradaccum.DynamicLossScale)}
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale")
    assert [number(cell) for cell in row("gradaccum.DynamicLossScale")[1:6]] == [defaults[name] for name in names]


def test_page_has_grad_scaler_defaults() -> None:
    amp = pytest.importorskip("torch.amp", reason="torch is not installed")
    parameters = inspect.signature(amp.GradScaler.__init__).parameters
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    assert [number(cell) for cell in row("torch.amp.GradScaler")[1:5]] == [parameters[name].default for name in names]


def test_our_defaults_equal_grad_scaler() -> None:
    assert row("gradaccum.DynamicLossScale")[1:5] == row("torch.amp.GradScaler")[1:5]
