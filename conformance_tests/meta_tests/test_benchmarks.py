"""The benchmarks' own arithmetic, pages and questions. No time is compared with a limit
here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks import peak
from benchmarks.answers import Answers
from benchmarks.axes import STEPS
from benchmarks.case import Case, Curve
from benchmarks.contestants import digits
from benchmarks.contestants.bert import LARGE as LARGE_BERT
from benchmarks.contestants.bert import WAYS
from benchmarks.contestants.runs import GRADACCUM, LARGE
from benchmarks.memory_time import largest_under, limit_of
from benchmarks.questions import everyday
from benchmarks.questions.quality import FRAMEWORKS, curves
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
    row = {"median_ms": 1.5, "rounds": 9, "counts": {"buffers": 1}}
    of_ratio = [
        {"contestant": name, "ratio": r, "ratio_low": 0.9 * r, "ratio_high": 1.1 * r}
        for name, r in (("theirs", 1.0), ("gradaccum", ratio))
    ]
    rows = [row | each for each in of_ratio]
    return {
        "kind": "case",
        "question": question,
        "case": "4 x <256>^2",
        "baseline": "theirs",
        "x": None,
        "rows": rows,
    } | fields


def test_rounds_are_interleaved_and_rotate() -> None:
    order: list[str] = []
    contestants = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = measure(contestants, "a", Plan(rounds=3))
    assert order[: 3 * WARM_UP] == [*"aaa", *"bbb", *"ccc"]
    assert order[3 * WARM_UP :] == list("abcbcacab")
    assert [timing.contestant for timing in timings] == list("abc")
    assert timings[0].ratio == timings[0].ratio_low == timings[0].ratio_high == 1.0


def test_ratio_is_median_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round the machine is ten times slower. In each round the contestant
    takes twice the baseline's time.
    """
    cost = [1.0, 2.0, 20.0, 10.0, 1.0, 2.0]
    clock(monkeypatch, 0.0, *(tick for seconds in cost for tick in (0.0, seconds)))
    timings = measure(
        {"baseline": lambda: None, "contestant": lambda: None},
        "baseline",
        Plan(rounds=3, least=3),
    )
    assert [timing.ratio for timing in timings] == [1.0, 2.0]
    assert [timing.median_ms for timing in timings] == [1000.0, 2000.0]


def test_short_work_repeats_within_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline takes 0.25 s and a turn should last 1 s. So each turn has four runs,
    and a run's time is a quarter of the turn's.
    """
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
    case = Case(
        "add",
        "a",
        {"a": lambda: None},
        counts={"a": {"buffers": 2}},
        x=4,
        rates={"a": {"GB/s": 3}},
    )
    record = json.loads(json.dumps(_timed(case, Plan(rounds=1))))
    assert record["x"] == 4
    assert record["rows"][0]["counts"] == {"buffers": 2, "GB/s": 6.0}


def test_report_shows_every_measurement(tmp_path: Path) -> None:
    curve = {"kind": "case", "question": "jax_streaming"} | _drawn(
        Curve("digits", "ours", [1, 2], [0.5, 0.75], "updates", "accuracy")
    )
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
    assert (
        json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["cases"]
        == records
    )


def test_readme_gets_table_and_plot(tmp_path: Path) -> None:
    readme = tmp_path / "benchmarks" / "README.md"
    readme.parent.mkdir()
    readme.write_text(
        "before\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\nafter\n",
        encoding="utf-8",
    )
    write_readme(
        [
            Answers(
                "jax_streaming",
                [timed("jax_streaming", 0.5), timed("jax_streaming", 0.25, x=1.0)],
            )
        ],
        tmp_path,
    )
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "; baseline: theirs**" in text
    assert "| 4 x <256>^2 | 1.5 ms | **0.50** | 0.45 to 0.55 |" in text
    assert "0.25" not in text, "a point of a line is no row of the table"
    assert (tmp_path / PLOT).read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="cases"):
        write_readme([Answers("jax_streaming", [])], tmp_path)
    assert readme.read_text(encoding="utf-8") == text, (
        "what was not measured again stays"
    )


# Counts of memory, against what is known by hand.


def test_saved_bytes_of_a_known_graph() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, w = torch.ones(8, 4), torch.ones(4, 4, requires_grad=True)

    def run() -> None:
        # keeps x, which is beside, and its own result: 8 x 4 floats
        hidden = torch.tanh(x @ w)
        hidden.square().sum().backward()  # keeps the same result

    assert peak.saved_bytes(run, [x, w]) == 128
    assert peak.saved_bytes(run) == 256


def test_peak_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fills 64 MiB more than it keeps."""
    questions = tmp_path / "benchmarks" / "questions"
    questions.mkdir(parents=True)
    code = (
        "import numpy as np\ndef window(way, items):\n    return lambda: np.ones(items"
        " * 2**17).sum()\n"
    )
    (questions / "filling.py").write_text(code, encoding="utf-8")
    bootstrap = (
        f"import benchmarks.questions as q; q.__path__.append({str(questions)!r}); from"
        " benchmarks.peak import _main; "
    )
    command = [sys.executable, "-c", f"{bootstrap}_main('filling', 'any', '64')"]
    done = peak.subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    )
    assert 60 * 2**20 < int(done.stdout) < 72 * 2**20


def test_limit_ends_each_way_at_its_own_batch() -> None:
    memory = {
        (way, size): size * (10.0 if way == LARGE_BERT else 2.0)
        for way in WAYS
        for size in (1, 2, 4, 8)
    }
    assert limit_of(memory, (1, 2, 4, 8)) == 30
    assert largest_under(memory, LARGE_BERT, (1, 2, 4, 8), 30) == 2
    assert largest_under(memory, WAYS[1], (1, 2, 4, 8), 30) == 8
    assert largest_under(memory, LARGE_BERT, (1, 2, 4, 8), 5) == 0


# The questions about exactness.


EPOCHS = 2
ROUNDING = 1e-5
"""Of the parameters, which are of the order of 1, after some dozens of updates in
float32.
"""
LEARNED = 0.7
"""Chance is 0.1."""
DISTANCE = "largest distance to the large batch"


def measured_alone(code: str) -> Any:
    """What `code` calls ``found``, in a process of its own."""
    code += "; import json; print(json.dumps(found))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def learned(framework: str) -> list[dict[str, Any]]:
    """The curves of accuracy, and how far each contestant ends from the large batch."""
    found = curves(
        framework,
        import_module(FRAMEWORKS[framework]).runs(),
        digits.load(),
        EPOCHS,
        seeds=1,
    )
    accuracies = (curve for curve in found if "accuracy" in curve.name)
    return [
        {
            "contestant": curve.contestant,
            "xs": curve.xs,
            "ys": curve.ys,
            "distance": curve.counts[DISTANCE],
        }
        for curve in accuracies
    ]


@pytest.mark.deep
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_gradaccum_matches_large_batch(framework: str) -> None:
    """Every contestant learns. In a process of its own, as a benchmark runs:
    MindSpore's compiler remembers other tests' graphs.
    """
    pytest.importorskip(framework.lower())
    found = measured_alone(
        "from conformance_tests.meta_tests.test_benchmarks import learned; found ="
        f" learned({framework!r})"
    )
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
    section = (
        (ROOT / "benchmarks/README.md")
        .read_text(encoding="utf-8")
        .partition("## Everyday loops")[2]
        .partition("\n## ")[0]
    )
    lines = [
        re.split(r" *\| *", line.strip("| "))
        for line in section.splitlines()
        if line.startswith("|")
    ][2:]
    return [
        Row(*loop.split(", ", 1), (number(short), number(counts)), told)
        for loop, short, counts, told in lines
    ]


def number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


def rows_measured(framework: str) -> list[Row]:
    """The same rows from a process of its own: JAX's float64 is of the whole
    process.
    """
    code = (
        "from importlib import import_module; from benchmarks.questions.everyday"
        f" import FRAMEWORKS, distances; each = distances({framework!r},"
        f" import_module(FRAMEWORKS[{framework!r}]).loops()); found = [[one.name,"
        " one.contestant, list(one.distances.values()), one.told] for one in each]"
    )
    return [
        Row(name, loop, tuple(ends), told)
        for name, loop, ends, told in measured_alone(code)
    ]


def require_as_measured(page: list[Row], measured: list[Row]) -> None:
    """Raise unless the page tells of each measured loop, in its order, what was
    measured: to a fifth, or as rounding in float64.
    """
    assert [row.loop for row in page] == [row.loop for row in measured]
    for told, found in zip(page, measured, strict=True):
        assert told.told == found.told, told.loop
        for a, b in zip(told.distances, found.distances, strict=True):
            assert a == b is None or (
                a and b and (abs(a - b) < 0.2 * b or max(a, b) < 1e-14)
            ), (told, found)


@pytest.mark.deep
@pytest.mark.parametrize("framework", everyday.FRAMEWORKS)
def test_everyday_loops_end_as_the_page_says(framework: str) -> None:
    """What is careful is the large batch; what is not is far from it. Accelerate's rows
    are held where Accelerate is installed.
    """
    pytest.importorskip(framework.lower())
    page, measured = (
        [row for row in rows_of_page() if row.framework == framework],
        rows_measured(framework),
    )
    if not any("Accelerate" in row.loop for row in measured):
        page = [row for row in page if "Accelerate" not in row.loop]
    require_as_measured(page, measured)
    exact = {
        row.loop for row in page if row.distances[0] and max(row.distances) < 1e-14
    }
    assert "gradaccum, `epoch` and weights" in exact
    assert all(
        min(row.distances) > 1e-3
        for row in page
        if row.loop not in exact and row.told != "refused"
    )


# The window-length questions: the sum takes one gradient's bytes at every length, and
# peers end with the same parameters.


TENSORS_HERE, ELEMENTS = 3, 300


@pytest.mark.parametrize("steps", [2, 8])
def test_torch_holds_one_gradient(steps: int) -> None:
    pytest.importorskip("torch")
    from benchmarks.questions import torch_window_length as question

    for make in question.LOOPS.values():
        loop = make(question.model(TENSORS_HERE, ELEMENTS), steps)
        assert question.held_bytes(loop, steps) == 4 * ELEMENTS


def test_torch_peers_agree() -> None:
    pytest.importorskip("torch")
    from benchmarks.questions import torch_window_length as question

    trained = [question.model(TENSORS_HERE, ELEMENTS) for _ in question.LOOPS]
    first = [parameter.detach().clone() for parameter in trained[0]]
    for parameters, make in zip(trained, question.LOOPS.values(), strict=True):
        make(parameters, STEPS)(3 * STEPS)
    for one, other, before in zip(*trained, first, strict=True):
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=1e-6, atol=1e-7)
        assert float((one.detach() - before).abs().max()) > 1e-4


def test_jax_peers_hold_one_gradient() -> None:
    """They also end with the same parameters."""
    optax = pytest.importorskip("optax")
    import gradaccum
    from benchmarks.questions import jax_window_length as question

    def model() -> list[object]:
        return question.model(TENSORS_HERE, ELEMENTS)

    made = [
        question.by_hand(model(), STEPS),
        question.one_program(optax.MultiSteps(optax.adamw(1e-4), STEPS), model()),
        question.one_program(gradaccum.wrap(optax.adamw(1e-4), steps=STEPS), model()),
    ]
    trained = [loop(3 * STEPS)[0] for loop, _ in made]
    for other in trained[1:]:
        for a, b, before in zip(trained[0], other, model(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
            assert float(abs(a - before).max()) > 1e-4
    assert all(
        4 * ELEMENTS <= held["bytes held"] < 4 * ELEMENTS + 100 for _, held in made
    )


# The benchmark of two workers counts reductions.


SECONDS = 240


@pytest.mark.deep
@pytest.mark.skipif(not find_spec("torch"), reason="needs PyTorch")
def test_reductions_stay_as_windows_grow(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [
        sys.executable,
        "-m",
        "benchmarks.run_question",
        "torch_workers",
        "--quick",
        "--results",
        str(results),
    ]
    subprocess.run(
        command,
        check=True,
        timeout=SECONDS,
        cwd=Path(__file__).parents[2],
        capture_output=True,
    )
    cases = [
        json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()
    ]
    counted = {
        case["case"]: {
            row["contestant"]: row["counts"]["reductions"] for row in case["rows"]
        }
        for case in cases
    }
    of_two = counted["1 M, windows of 4"]
    assert of_two["gradaccum"] == 1
    assert of_two["reduced in each backward pass"] == 4 * of_two["no_sync by hand"]
    for steps in (1, 4, 16):
        of_each = counted[f"66 k, windows of {steps}, CPU of one"]
        assert of_each["gradaccum"] == of_each["no_sync by hand"] == 1
        assert of_each["reduced in each backward pass"] == steps
