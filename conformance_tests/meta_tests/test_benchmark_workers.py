"""The benchmark of two workers counts reductions: one a window for gradaccum, however long the window is."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SECONDS = 240


@pytest.mark.deep
@pytest.mark.skipif(not find_spec("torch"), reason="needs PyTorch")
def test_reductions_stay_as_windows_grow(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "benchmarks.run_question", "torch_workers", "--quick", "--results", str(results)]
    subprocess.run(command, check=True, timeout=SECONDS, cwd=Path(__file__).parents[2], capture_output=True)
    cases = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    counted = {case["case"]: {row["contestant"]: row["counts"]["reductions"] for row in case["rows"]} for case in cases}
    for steps in (1, 4, 16):
        of_each = counted[f"66 k parameters, windows of {steps}"]
        assert of_each["gradaccum"] == of_each["no_sync by hand"] == 1
        assert of_each["reduced in each backward pass"] == steps
