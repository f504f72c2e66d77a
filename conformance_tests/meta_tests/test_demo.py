"""The demo: its exact runs are exact, and it names every fault."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from conformance_tests.programs import run_python
from gradaccum_conformance.demo import command
from gradaccum_conformance.demo.batches import LARGE_BATCH, Digits
from gradaccum_conformance.demo.data import load
from gradaccum_conformance.demo.recipes import EQUAL, LARGE, NAIVE, RECIPES, UNEQUAL
from gradaccum_conformance.demo.training import train
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.runner import Job, Record


def test_exact_runs_differ_by_rounding() -> None:
    """On two large batches and a tail. The naive run differs by more."""
    digits = load()
    few = Digits(digits.train.rows(0, 2 * LARGE_BATCH + 28), digits.test)
    measurements = list(train(load_harness("numpy"), few, epochs=2))
    ends = {measurement.run: measurement for measurement in measurements}
    assert list(ends) == [recipe.name for recipe in RECIPES]
    assert ends[LARGE.name].difference == 0
    assert 0 < ends[EQUAL.name].difference < 1e-5
    assert 0 < ends[UNEQUAL.name].difference < 1e-5
    assert ends[NAIVE.name].difference > 1e-3
    assert all(end.loss < 2.3 for end in ends.values()), "better than one of ten"


STARTED = {"kind": "started", "epochs": 4}
FINISHED = {"kind": "finished"}
NAN = float("nan")


def epochs(accuracy: float = 0.97, difference: float = 1e-6) -> list[Record]:
    """One epoch of each run."""
    measured = {"loss": 1.0, "accuracy": accuracy, "difference": difference}
    return [{"kind": "epoch", "run": recipe.name, **measured} for recipe in RECIPES]


@pytest.mark.parametrize(
    ("records", "exit_code", "passes", "words"),
    [
        ([STARTED, *epochs(), FINISHED], 0, True, "(for contrast)"),
        ([STARTED, *epochs(accuracy=0.96), FINISHED], 0, False, "not above 96%"),
        ([STARTED, *epochs(accuracy=NAN), FINISHED], 0, False, "not above 96%"),
        ([STARTED, *epochs(difference=1e-3), FINISHED], 0, False, "1.0e-03"),
        ([STARTED, *epochs(difference=NAN), FINISHED], 0, False, "nan"),
        ([STARTED, *epochs()[:2]], 0, False, "ended after 2 of 4 epochs"),
        ([STARTED, *epochs(), FINISHED], 7, False, "ended with exit code 7"),
        ([], 0, False, "last words"),
    ],
)
def test_demo_passes_with_every_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: list[Record],
    exit_code: int,
    passes: bool,
    words: str,
) -> None:
    """And fails with any run that failed."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    script = (
        f"import sys; open(sys.argv[1], 'w').write({lines!r}); print('last words');"
        f" sys.exit({exit_code})"
    )
    results = tmp_path / "raw.jsonl"
    job = Job("numpy", (sys.executable, "-c", script, str(results)), results)
    monkeypatch.setattr(command, "_job", lambda backend, out: job)
    console = Console(file=io.StringIO(), width=120)
    assert command.run_demo(console, ["numpy"], tmp_path) is passes
    assert words in console.file.getvalue()  # type: ignore[attr-defined]
    assert (tmp_path / "curves.png").exists() is bool(records)
    assert (tmp_path / "results.json").exists() is bool(records)


def test_process_writes_every_epoch(tmp_path: Path) -> None:
    results = tmp_path / "numpy.jsonl"
    options = ("--backend", "numpy", "--epochs", "1", "--results", str(results))
    run_python("-m", "gradaccum_conformance.demo", *options, check=True, timeout=300)
    lines = results.read_text("utf-8").splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["started", *["epoch"] * len(RECIPES), "finished"]
