"""The benchmarks' own arithmetic and pages. No time is compared with a limit here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answers import Answers, duration
from benchmarks.case import QUESTIONS, Case, Curve
from benchmarks.readme import PLOT, write_readme
from benchmarks.report import write_report
from benchmarks.rounds import WARM_UP, Plan, measure
from benchmarks.run_question import _drawn, _timed

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"


def clock(monkeypatch: pytest.MonkeyPatch, *ticks: float) -> None:
    """Let the clock show `ticks`, one at each reading."""
    following = iter(ticks)
    monkeypatch.setattr("benchmarks.rounds.time.perf_counter", lambda: next(following))


def timed(question: str, ratio: float, **fields: Any) -> dict[str, Any]:
    """A record as a question's process writes it."""
    rows = [
        {
            "contestant": name,
            "median_ms": 1.5,
            "ratio": r,
            "ratio_low": 0.9 * r,
            "ratio_high": 1.1 * r,
            "rounds": 9,
            "counts": {"buffers": 1},
        }
        for name, r in (("theirs", 1.0), ("gradaccum", ratio))
    ]
    return {"kind": "case", "question": question, "case": "4 x <256>^2", "baseline": "theirs", "x": None, "rows": rows} | fields


def test_rounds_are_interleaved_and_rotate() -> None:
    order: list[str] = []
    contestants = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = measure(contestants, "a", Plan(rounds=3))
    assert order[: 3 * WARM_UP] == [*"aaa", *"bbb", *"ccc"]
    assert order[3 * WARM_UP :] == list("abcbcacab")
    assert [timing.contestant for timing in timings] == list("abc")
    assert timings[0].ratio == timings[0].ratio_low == timings[0].ratio_high == 1.0


def test_ratio_is_median_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round the machine is ten times slower. In each round the contestant takes twice the baseline's time."""
    cost = [1.0, 2.0, 20.0, 10.0, 1.0, 2.0]
    clock(monkeypatch, 0.0, *(tick for seconds in cost for tick in (0.0, seconds)))
    timings = measure({"baseline": lambda: None, "contestant": lambda: None}, "baseline", Plan(rounds=3, least=3))
    assert [timing.ratio for timing in timings] == [1.0, 2.0]
    assert [timing.median_ms for timing in timings] == [1000.0, 2000.0]


def test_short_work_repeats_within_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline takes 0.25 s and a turn should last 1 s. So each turn has four runs, and a run's time is a quarter of the turn's."""
    calls: list[str] = []
    clock(monkeypatch, 0.0, 0.25, 0.0, 0.0, 1.0, 1.0, 3.0)
    contestants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timings = measure(contestants, "a", Plan(rounds=1, turn=1.0))
    assert calls[2 * WARM_UP :] == [*"a", *"aaaa", *"bbbb"]
    assert [timing.median_ms for timing in timings] == [250.0, 500.0]


def test_rounds_end_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least number of rounds is run in any case."""
    clock(monkeypatch, 0.0, *range(100))
    (timing,) = measure({"a": lambda: None}, "a", Plan(rounds=9, least=2, seconds=5.5))
    assert timing.rounds == 3


def test_records_hold_counts_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 0.0, 0.0, 0.5)
    case = Case("add", "a", {"a": lambda: None}, counts={"a": {"buffers": 2}}, x=4, rates={"a": {"GB/s": 3}})
    record = json.loads(json.dumps(_timed(case, Plan(rounds=1))))
    assert record["x"] == 4
    assert record["rows"][0]["counts"] == {"buffers": 2, "GB/s": 6.0}


def test_report_shows_every_measurement(tmp_path: Path) -> None:
    curve = {"kind": "case", "question": "jax_streaming"} | _drawn(Curve("digits", "ours", [1, 2], [0.5, 0.75], "updates", "accuracy"))
    records = [timed("jax_streaming", 0.5), curve, timed("jax_streaming", 0.5, x=2.0)]
    write_report(tmp_path, [Answers("jax_streaming", records)])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "4 x &lt;256&gt;^2" in page
    assert "0.450 to 0.550" in page
    assert "buffers: 1" in page
    assert "0.75" in page
    assert page.count("data:image/png") == 3
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.glob("*.png"))
    assert len(list(tmp_path.glob("*.png"))) == 3
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["cases"] == records


def test_readme_gets_table_and_plot(tmp_path: Path) -> None:
    readme = tmp_path / "benchmarks" / "README.md"
    readme.parent.mkdir()
    readme.write_text("before\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\nafter\n", encoding="utf-8")
    write_readme([Answers("jax_streaming", [timed("jax_streaming", 0.5), timed("jax_streaming", 0.25, x=1.0)])], tmp_path)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "; baseline: theirs**" in text
    assert "| 4 x <256>^2 | 1.5 ms | **0.50** | 0.45 to 0.55 |" in text
    assert "0.25" not in text, "a point of a line is no row of the table"
    assert (tmp_path / PLOT).read_bytes().startswith(PNG)


def test_readme_keeps_unmeasured_tables(tmp_path: Path) -> None:
    readme = tmp_path / "benchmarks" / "README.md"
    readme.parent.mkdir()
    readme.write_text("<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\n", encoding="utf-8")
    with pytest.raises(ValueError, match="cases"):
        write_readme([Answers("jax_streaming", [])], tmp_path)
    assert "old" in readme.read_text(encoding="utf-8")


@pytest.mark.parametrize(("milliseconds", "text"), [(0.0034, "3.4 us"), (1.0, "1 ms"), (12.345, "12.3 ms"), (1500.0, "1.5 s")])
def test_durations_have_fitting_units(milliseconds: float, text: str) -> None:
    assert duration(milliseconds) == text


def test_every_question_has_a_file() -> None:
    assert all((ROOT / "benchmarks" / "questions" / f"{name}.py").is_file() for name in QUESTIONS)


def test_unknown_question_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "jax_streaming", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
