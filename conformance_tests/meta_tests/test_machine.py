"""The machine in a report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.machine import machine


def test_machine_without_gpu_names_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It names the versions of the packages."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine()
    assert found["numpy"] == np.__version__
    assert "gpu" not in found


def test_machine_names_every_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "One, 5.1"\necho "Two, 5.1"\n', encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine()["gpu"] == "One, 5.1 and Two, 5.1"
