"""The demo: its exact runs are exact, and it names every fault."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gradaccum_conformance.demo import command
from gradaccum_conformance.demo.batches import (
    LARGE_BATCH,
    MICRO_BATCH,
    Digits,
    cut,
    large_batches,
    split,
)
from gradaccum_conformance.demo.curves import curves_of, problem_of
from gradaccum_conformance.demo.data import load
from gradaccum_conformance.demo.recipes import (
    EQUAL,
    LARGE,
    NAIVE,
    RECIPES,
    STEPS,
    UNEQUAL,
)
from gradaccum_conformance.demo.training import train
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.runner import Ended, Job, Record
from gradaccum_conformance.specs import LENET


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


def test_epoch_holds_each_item_once(digits: Digits) -> None:
    """Its last batch is short. No test image is a training image."""
    assert (digits.train.items, digits.test.items) == (1436, 361)
    assert digits.train.x.shape[1:] == LENET.input_shape
    batches = list(large_batches(digits.train, 1))
    assert {batch.items for batch in batches[:-1]} == {LARGE_BATCH}
    assert [part.items for part in cut(batches[-1], MICRO_BATCH)] == [16, 12]
    assert [part.items for part in split(batches[-1], STEPS)] == [7, 7, 7, 7]
    images = np.concatenate([batch.x for batch in batches])
    train = sorted(image.tobytes() for image in digits.train.x)
    assert sorted(image.tobytes() for image in images) == train
    assert not {image.tobytes() for image in digits.test.x} & set(train)


def test_exact_runs_differ_by_rounding(digits: Digits) -> None:
    """On two large batches and a tail. The naive run differs by more."""
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


def epochs(accuracy: float = 0.97, difference: float = 1e-6) -> list[Record]:
    """One epoch of each run."""
    measured = {"loss": 1.0, "accuracy": accuracy, "difference": difference}
    return [{"kind": "epoch", "run": recipe.name, **measured} for recipe in RECIPES]


@pytest.mark.parametrize(
    ("accuracy", "difference", "fault"),
    [
        (0.96, 1e-6, "accuracy not above 96%"),
        (float("nan"), 1e-6, "accuracy not above 96%"),
        (0.97, 1e-3, "differs by more than 0.0001"),
        (0.97, float("nan"), "differs by more than 0.0001"),
    ],
)
def test_curves_name_their_faults(
    accuracy: float, difference: float, fault: str
) -> None:
    records = (STARTED, *epochs(accuracy, difference), FINISHED)
    curves = curves_of([Ended("torch", 0, records, "")])
    assert [curve.recipe for curve in curves] == list(RECIPES)
    assert [curve.faults for curve in curves] == [[fault], [fault], [fault], []]


@pytest.mark.parametrize(
    ("exit_code", "records", "problem"),
    [
        (0, [STARTED, *epochs(), FINISHED], None),
        (1, [STARTED, *epochs(), FINISHED], "its process ended with exit code 1"),
        (0, [STARTED, *epochs()], "its process ended after 4 of 4 epochs"),
        (0, [STARTED, *epochs()[:2]], "its process ended after 2 of 4 epochs"),
        (0, [FINISHED], "its process ended after 0 of 0 epochs"),
        (0, [], "its process ended after 0 of 0 epochs"),
    ],
)
def test_incomplete_process_is_a_problem(
    exit_code: int, records: list[Record], problem: str | None
) -> None:
    assert problem_of(Ended("torch", exit_code, tuple(records), "")) == problem


@pytest.mark.parametrize(
    ("records", "exit_code", "passes", "words"),
    [
        ([STARTED, *epochs(), FINISHED], 0, True, "(for contrast)"),
        ([STARTED, *epochs(accuracy=0.5), FINISHED], 0, False, "no: accuracy not"),
        ([STARTED, *epochs(difference=0.5), FINISHED], 0, False, "5.0e-01"),
        ([STARTED, *epochs()[:2]], 7, False, "last words"),
        ([], 1, False, "last words"),
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
    if records:
        text = (tmp_path / "results.json").read_text(encoding="utf-8")
        assert bool(json.loads(text)["problems"]) is bool(exit_code)


def test_process_writes_every_epoch(tmp_path: Path) -> None:
    results = tmp_path / "numpy.jsonl"
    module = (sys.executable, "-m", "gradaccum_conformance.demo")
    options = ("--backend", "numpy", "--epochs", "1", "--results", str(results))
    subprocess.run([*module, *options], check=True, timeout=300)
    lines = results.read_text(encoding="utf-8").splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["started", *["epoch"] * len(RECIPES), "finished"]
