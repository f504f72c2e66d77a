"""The benchmarks: rounds are interleaved, a ratio is the median of the rounds, and the
loops end where the page says. No time is compared with a limit here.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.questions import everyday
from benchmarks.rounds import WARM_UP, Plan, measure
from conformance_tests.programs import ROOT, run_python


def test_rounds_are_interleaved_and_rotate() -> None:
    order = []
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
    program = f"{code}; import json; print(json.dumps(rows))"
    done = run_python("-c", program, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def rows_of_page(framework: str) -> list[Any]:
    """The loop, distances and words of each row of the table of everyday loops, whose
    first cells are like ``torch, by hand``.
    """
    page = (ROOT / "benchmarks/README.md").read_text("utf-8")
    section = page.partition("## Everyday loops")[2].partition("\n## ")[0]
    lines = re.findall(rf"^\| {framework}, (.*) \|$", section, re.MULTILINE)
    rows = [re.split(r" *\| *", line) for line in lines]
    return [
        [loop, [number(short), number(counts)], told]
        for loop, short, counts, told in rows
    ]


def number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


def rows_measured(framework: str) -> list[Any]:
    rows: list[Any] = printed_by(
        "from importlib import import_module; from benchmarks.questions import everyday"
        f" as e; loops = import_module(e.FRAMEWORKS[{framework!r}]).loops(); rows ="
        " [[row.contestant, list(row.distances.values()), row.told] for row in"
        f" e.distances({framework!r}, loops)]"
    )
    return rows


def require_as_measured(page: list[Any], measured: list[Any]) -> None:
    """Raise unless the page has each measured loop in its order, with its distances to
    a fifth, or as rounding in float64.
    """
    for row, measured_row in zip(page, measured, strict=True):
        loop, distances, told = row
        assert [loop, told] == [measured_row[0], measured_row[2]]
        for a, b in zip(distances, measured_row[1], strict=True):
            if a is None or b is None:
                assert a == b, loop
            else:
                assert abs(a - b) < 0.2 * b or 0 < max(a, b) < 1e-14, loop


@pytest.mark.deep
@pytest.mark.parametrize("framework", everyday.FRAMEWORKS)
def test_everyday_loops_end_as_the_page_says(framework: str) -> None:
    """With the page's distances to a fifth, or as rounding in float64. What is careful
    is the large batch; what is not is far from it. Accelerate's rows are compared where
    Accelerate is installed.
    """
    pytest.importorskip(framework.lower())
    measured = rows_measured(framework)
    page = rows_of_page(framework)
    if not any("Accelerate" in loop for loop, *_ in measured):
        page = [row for row in page if "Accelerate" not in row[0]]
    require_as_measured(page, measured)
    exact = []
    for loop, distances, told in page:
        if distances[0] and max(distances) < 1e-14:
            exact.append(loop)
        else:
            assert told == "refused" or min(distances) > 1e-3
    assert "gradaccum, `epoch` and weights" in exact
