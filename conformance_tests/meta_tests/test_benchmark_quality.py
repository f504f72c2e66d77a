"""The questions about exactness.

quality: every contestant learns, and only gradaccum equals the large batch up to rounding.
everyday: the page's table of loops is what is measured.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.contestants import digits
from benchmarks.contestants.runs import GRADACCUM, LARGE
from benchmarks.questions import everyday
from benchmarks.questions.quality import FRAMEWORKS, curves
from gradaccum_conformance.deep import deep_but

ROOT = Path(__file__).parents[2]
MODULE = "conformance_tests.meta_tests.test_benchmark_quality"
EPOCHS = 2
ROUNDING = 1e-5
"""Of the parameters, which are of the order of 1, after some dozens of updates in float32."""
LEARNED = 0.7
"""Chance is 0.1."""
DISTANCE = "largest distance to the large batch"


def test_windows_hold_every_item() -> None:
    """The last window is short, and its two micro-batches differ in size."""
    train = digits.load().train
    windows = list(digits.windows(train, 0, 0))
    assert sum(len(labels) for window in windows for _, labels in window) == len(train[1])
    assert [len(labels) for _, labels in windows[-1]] == [16, 12]
    assert {len(window) for window in windows[:-1]} == {digits.STEPS}


def test_known_network_loss_and_accuracy() -> None:
    pixels, labels = np.zeros((4, 64), np.float32), np.array([0, 0, 0, 1])
    zeros = [np.zeros(shape, np.float32) for shape in ((64, 2), (2,), (2, 10), (10,))]
    accuracy, loss = digits.held_out(zeros, (pixels, labels))
    assert accuracy == 0.75
    assert loss == pytest.approx(np.log(10))


def learned(framework: str) -> list[dict[str, Any]]:
    """The curves of accuracy, and how far each contestant ends from the large batch."""
    found = curves(framework, import_module(FRAMEWORKS[framework]).runs(), digits.load(), EPOCHS, seeds=1)
    accuracies = (curve for curve in found if "accuracy" in curve.name)
    return [{"contestant": curve.contestant, "xs": curve.xs, "ys": curve.ys, "distance": curve.counts[DISTANCE]} for curve in accuracies]


@pytest.mark.parametrize("framework", deep_but((next(iter(FRAMEWORKS)),), FRAMEWORKS))
def test_only_gradaccum_matches_large_batch(framework: str) -> None:
    """Every contestant learns. In a process of its own, as a benchmark runs: MindSpore's compiler remembers other tests' graphs."""
    pytest.importorskip(framework.lower())
    code = (
        f"import json; from conformance_tests.meta_tests.test_benchmark_quality import learned; print(json.dumps(learned({framework!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(curve["ys"][0] < 0.4 < LEARNED < curve["ys"][-1] for curve in found)
    assert [curve["xs"] for curve in found] == [[0.0, 23.0, 46.0]] * len(found)
    far = {curve["contestant"]: curve["distance"] for curve in found}
    assert far.pop(LARGE) == 0
    assert far.pop(GRADACCUM) < ROUNDING
    assert far
    assert all(distance > 100 * ROUNDING for distance in far.values())


class Row(NamedTuple):
    """One loop of the table in ``benchmarks/README.md``."""

    framework: str
    loop: str
    distances: tuple[float | None, ...]
    told: str


def rows_of_page() -> list[Row]:
    """The table of everyday loops, whose first cells are like ``torch, by hand``."""
    section = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8").partition("## Everyday loops")[2].partition("\n## ")[0]
    lines = [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines() if line.startswith("|")][2:]
    return [Row(*loop.split(", ", 1), (number(short), number(counts)), told) for loop, short, counts, told in lines]


def number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


def rows_measured(framework: str) -> list[Row]:
    """The same rows from a process of its own: JAX's float64 is of the whole process."""
    code = (
        "import json; from importlib import import_module; from benchmarks.questions.everyday import FRAMEWORKS, distances; "
        f"found = distances({framework!r}, import_module(FRAMEWORKS[{framework!r}]).loops()); "
        "print(json.dumps([[each.name, each.contestant, list(each.distances.values()), each.told] for each in found]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Row(name, loop, tuple(ends), told) for name, loop, ends, told in json.loads(done.stdout.splitlines()[-1])]


def require_as_measured(page: list[Row], measured: list[Row]) -> None:
    """Raise unless the page tells of each measured loop, in its order, what was measured: to a fifth, or as rounding in float64."""
    assert [row.loop for row in page] == [row.loop for row in measured]
    for told, found in zip(page, measured, strict=True):
        assert told.told == found.told, told.loop
        for a, b in zip(told.distances, found.distances, strict=True):
            assert a == b is None or (a and b and (abs(a - b) < 0.2 * b or max(a, b) < 1e-14)), (told, found)


@pytest.mark.parametrize("framework", everyday.FRAMEWORKS)
def test_everyday_loops_end_as_the_page_says(framework: str) -> None:
    """What is careful is the large batch; what is not is far from it. Accelerate's rows are held where Accelerate is installed."""
    pytest.importorskip(framework.lower())
    page, measured = [row for row in rows_of_page() if row.framework == framework], rows_measured(framework)
    if not any("Accelerate" in row.loop for row in measured):
        page = [row for row in page if "Accelerate" not in row.loop]
    require_as_measured(page, measured)
    exact = {row.loop for row in page if row.distances[0] and max(row.distances) < 1e-14}
    assert "gradaccum, `epoch` and weights" in exact
    assert all(min(row.distances) > 1e-3 for row in page if row.loop not in exact and row.told != "refused")
