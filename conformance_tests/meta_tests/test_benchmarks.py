"""The benchmarks: rounds are interleaved, a ratio is the median of the rounds, and the
loops end where the page says. No time is compared with a limit here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.contestants import digits
from benchmarks.contestants.runs import GRADACCUM, LARGE
from benchmarks.questions import everyday
from benchmarks.questions.quality import FRAMEWORKS, curves
from benchmarks.rounds import WARM_UP, Plan, measure

ROOT = Path(__file__).parents[2]


def test_rounds_are_interleaved_and_rotate() -> None:
    order: list[str] = []
    contestants = {name: lambda name=name: order.append(name) for name in "abc"}
    measure(contestants, "a", Plan(rounds=3))
    assert order[: 3 * WARM_UP] == [*"aaa", *"bbb", *"ccc"]
    assert order[3 * WARM_UP :] == list("abcbcacab")


def test_ratio_is_median_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round the machine is ten times slower. In each round the contestant
    takes twice the baseline's time.
    """
    ticks = iter([0, 0, 1, 0, 2, 0, 20, 0, 10, 0, 1, 0, 2])
    monkeypatch.setattr("benchmarks.rounds.time.perf_counter", lambda: next(ticks))
    contestants = {"baseline": lambda: None, "contestant": lambda: None}
    timings = measure(contestants, "baseline", Plan(rounds=3, least=3))
    assert [timing.ratio for timing in timings] == [1.0, 2.0]
    assert [timing.median_ms for timing in timings] == [1000.0, 2000.0]


def printed_by(code: str) -> Any:
    """What `code` calls ``rows``, from a process of its own: MindSpore's compiler
    remembers the graphs of other tests, and JAX has one width of floats per process.
    """
    command = [sys.executable, "-c", f"{code}; import json; print(json.dumps(rows))"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def accuracy_curves(framework: str) -> list[Any]:
    """Of each contestant the accuracies, and how far it ends from the large batch."""
    runs = import_module(FRAMEWORKS[framework]).runs()
    made = curves(framework, runs, digits.load(), 2, seeds=1)
    return [
        [
            curve.contestant,
            curve.ys,
            curve.counts["largest distance to the large batch"],
        ]
        for curve in made
        if "accuracy" in curve.name
    ]


@pytest.mark.deep
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_gradaccum_matches_large_batch(framework: str) -> None:
    """Every contestant learns; guessing is right in one of ten. Dozens of updates in
    float32 leave a rounding below 1e-5.
    """
    pytest.importorskip(framework.lower())
    place = "conformance_tests.meta_tests.test_benchmarks"
    rows = printed_by(
        f"from {place} import accuracy_curves; rows = accuracy_curves({framework!r})"
    )
    assert all(accuracies[0] < 0.4 < 0.7 < accuracies[-1] for _, accuracies, _ in rows)
    distances = {contestant: distance for contestant, _, distance in rows}
    assert distances.pop(LARGE) == 0
    assert distances.pop(GRADACCUM) < 1e-5
    assert min(distances.values()) > 1e-3


class Row(NamedTuple):
    """One loop of the table in ``benchmarks/README.md``."""

    framework: str
    loop: str
    distances: tuple[float | None, ...]
    told: str


def rows_of_page() -> list[Row]:
    """The table of everyday loops, whose first cells are like ``torch, by hand``."""
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    section = page.partition("## Everyday loops")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]
    cells = [re.split(r" *\| *", line) for line in lines]
    return [
        Row(*loop.split(", ", 1), (number(short), number(counts)), told)
        for loop, short, counts, told in cells
    ]


def number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


def rows_measured(framework: str) -> list[Row]:
    rows = printed_by(
        "from importlib import import_module; from benchmarks.questions import everyday"
        f" as e; loops = import_module(e.FRAMEWORKS[{framework!r}]).loops(); rows ="
        " [[row.name, row.contestant, list(row.distances.values()), row.told] for row"
        f" in e.distances({framework!r}, loops)]"
    )
    return [Row(name, loop, tuple(ends), told) for name, loop, ends, told in rows]


def require_as_measured(page: list[Row], measured: list[Row]) -> None:
    """Raise unless the page has each measured loop in its order, with its distances to
    a fifth, or as rounding in float64.
    """
    assert [(row.loop, row.told) for row in page] == [
        (row.loop, row.told) for row in measured
    ]
    for row, measured_row in zip(page, measured, strict=True):
        for a, b in zip(row.distances, measured_row.distances, strict=True):
            if a is None or b is None:
                assert a == b, row
            else:
                assert abs(a - b) < 0.2 * b or 0 < max(a, b) < 1e-14, row


@pytest.mark.deep
@pytest.mark.parametrize("framework", everyday.FRAMEWORKS)
def test_everyday_loops_end_as_the_page_says(framework: str) -> None:
    """What is careful is the large batch; what is not is far from it. Accelerate's rows
    are compared where Accelerate is installed.
    """
    pytest.importorskip(framework.lower())
    measured = rows_measured(framework)
    page = [row for row in rows_of_page() if row.framework == framework]
    if not any("Accelerate" in row.loop for row in measured):
        page = [row for row in page if "Accelerate" not in row.loop]
    require_as_measured(page, measured)
    exact = {
        row.loop for row in page if row.distances[0] and max(row.distances) < 1e-14
    }
    assert "gradaccum, `epoch` and weights" in exact
    for row in page:
        assert row.loop in exact or row.told == "refused" or min(row.distances) > 1e-3
