"""The benchmarks' counts of memory, against what is known by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import peak
from benchmarks.case import LIMIT, Case, Curve
from benchmarks.contestants.bert import BERT_BASE, LARGE, RECOMPUTE, WAYS
from benchmarks.memory_time import answers, largest_under, limit_of
from benchmarks.rounds import Plan


def test_saved_bytes_of_a_known_graph() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, w = torch.ones(8, 4), torch.ones(4, 4, requires_grad=True)

    def run() -> None:
        hidden = torch.tanh(x @ w)  # keeps x, which is beside, and its own result: 8 x 4 floats
        hidden.square().sum().backward()  # keeps the same result

    assert peak.saved_bytes(run, [x, w]) == 128
    assert peak.saved_bytes(run) == 256


def test_peak_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fills 64 MiB more than it keeps."""
    questions = tmp_path / "benchmarks" / "questions"
    questions.mkdir(parents=True)
    code = "import numpy as np\ndef window(way, items):\n    return lambda: np.ones(items * 2**17).sum()\n"
    (questions / "filling.py").write_text(code, encoding="utf-8")
    bootstrap = f"import benchmarks.questions as q; q.__path__.append({str(questions)!r}); from benchmarks.peak import _main; "
    command = [sys.executable, "-c", f"{bootstrap}_main('filling', 'any', '64')"]
    done = peak.subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert 60 * 2**20 < int(done.stdout) < 72 * 2**20


def test_limit_ends_each_way_at_its_own_batch() -> None:
    memory = {(way, size): size * (10.0 if way == LARGE else 2.0) for way in WAYS for size in (1, 2, 4, 8)}
    assert limit_of(memory, (1, 2, 4, 8)) == 30
    assert largest_under(memory, LARGE, (1, 2, 4, 8), 30) == 2
    assert largest_under(memory, WAYS[1], (1, 2, 4, 8), 30) == 8
    assert largest_under(memory, LARGE, (1, 2, 4, 8), 5) == 0


def test_answers_hold_a_case_and_a_curve_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.memory_time.PLAN", Plan(rounds=1))
    case, *curves = answers("any", True, lambda way, size, shape: lambda: None, lambda way, size, shape: float(size))
    assert isinstance(case, Case)
    assert set(case.contestants) == set(WAYS)
    assert [curve.contestant for curve in curves if isinstance(curve, Curve)] == list(WAYS)
    for curve in curves:
        assert isinstance(curve, Curve)
        assert curve.ys == [2.0, 4.0]
        assert curve.counts[LIMIT] == 3


def test_all_layers_are_compared_unless_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.memory_time.PLAN", Plan(rounds=1))
    *_, last = answers("any", False, lambda way, size, shape: lambda: None, lambda way, size, shape: float(shape.layers))
    assert isinstance(last, Case)
    assert set(last.contestants) == {LARGE, RECOMPUTE}
    assert last.counts[LARGE]["peak MiB"] == BERT_BASE.layers
