"""The GPU checks also run on a CPU, with small sizes. Without a GPU the script says
so.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.contestants.gpu_problem import Problem, distance

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.questions.gpu_mixed_precision",
        *arguments,
    ]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_checks_pass_on_a_cpu() -> None:
    ran = run("--device", "cpu")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    machine, *checks = ran.stdout.splitlines()
    assert f"torch {torch.__version__.split('+')[0]}" in machine
    assert len(checks) >= 9
    assert all(line.startswith("ok ") for line in checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_cuda_is_reported() -> None:
    ran = run()
    assert ran.returncode == 0
    assert "No CUDA device" in ran.stdout


def test_distance_is_relative_to_the_move() -> None:
    problem = Problem("cpu", width=2, items=4)
    start, end, other = problem.model(), problem.model(), problem.model()
    with torch.no_grad():
        for p, q in zip(end.parameters(), other.parameters(), strict=True):
            p.add_(1.0)
            q.add_(1.5)
    assert distance(other, end, start) == pytest.approx(0.5)
