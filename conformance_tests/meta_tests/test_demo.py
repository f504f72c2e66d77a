"""The demo: its batches are the same for every run, its exact runs are exact, and it
names every fault.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gradaccum_conformance.demo import command, recipes
from gradaccum_conformance.demo.batches import (
    LARGE_BATCH,
    MICRO_BATCH,
    Digits,
    cut,
    large_batches,
    split,
)
from gradaccum_conformance.demo.curves import ALLOWED_DIFFERENCE, curves_of, problem_of
from gradaccum_conformance.demo.data import load
from gradaccum_conformance.demo.recipes import (
    EQUAL,
    LARGE,
    NAIVE,
    RECIPES,
    STEPS,
    UNEQUAL,
)
from gradaccum_conformance.demo.table import make_table
from gradaccum_conformance.demo.training import (
    Measured,
    train,
)
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.runner import Ended, Job
from gradaccum_conformance.specs import LENET


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


@pytest.fixture(scope="module")
def few(digits: Digits) -> Digits:
    """Two large batches and a tail."""
    return Digits(digits.train.rows(0, 2 * LARGE_BATCH + 28), digits.test)


def last_epoch(measured: list[Measured]) -> dict[str, Measured]:
    return {entry.run: entry for entry in measured}


def test_split_is_fixed_and_standardised(digits: Digits) -> None:
    assert (digits.train.items, digits.test.items) == (1436, 361)
    assert digits.train.x.shape[1:] == LENET.input_shape
    assert np.array_equal(digits.train.x, load().train.x)
    assert abs(digits.train.x.mean()) < 1e-6
    assert abs(digits.train.x.std() - 1) < 1e-6
    train_images = {image.tobytes() for image in digits.train.x}
    assert not any(image.tobytes() in train_images for image in digits.test.x)


def test_epoch_holds_each_item_once(digits: Digits) -> None:
    """Its last batch is short."""
    batches = list(large_batches(digits.train, 1))
    assert {batch.items for batch in batches[:-1]} == {LARGE_BATCH}
    assert [part.items for part in cut(batches[-1], MICRO_BATCH)] == [16, 12]
    assert [part.items for part in split(batches[-1], STEPS)] == [7, 7, 7, 7]
    together = np.concatenate([batch.x for batch in batches])
    assert sorted(image.tobytes() for image in together) == sorted(
        image.tobytes() for image in digits.train.x
    )


def test_exact_runs_differ_by_rounding(few: Digits) -> None:
    """The naive run differs by more."""
    ends = last_epoch(list(train(load_harness("numpy"), few, epochs=2)))
    assert list(ends) == [recipe.name for recipe in RECIPES]
    assert ends[LARGE.name].difference == 0
    assert 0 < ends[EQUAL.name].difference < ALLOWED_DIFFERENCE / 10
    assert 0 < ends[UNEQUAL.name].difference < ALLOWED_DIFFERENCE / 10
    assert ends[NAIVE.name].difference > 10 * ALLOWED_DIFFERENCE
    assert all(end.loss < 2.3 for end in ends.values()), (
        "better than guessing one of ten"
    )


def records(backend: str = "torch", **changed: Any) -> tuple[dict[str, Any], ...]:
    epochs = [
        {
            "kind": "epoch",
            "backend": backend,
            "run": recipe.name,
            "epoch": epoch,
            "loss": 1 / epoch,
            "accuracy": 0.97,
            "difference": 1e-6,
        }
        for recipe in RECIPES
        for epoch in (1, 2)
    ]
    return (
        {"kind": "started", "epochs": 8},
        *({**epoch, **changed} for epoch in epochs),
        {"kind": "finished"},
    )


@pytest.mark.parametrize(
    ("accuracy", "difference", "faults"),
    [
        (0.97, 1e-6, []),
        (0.96, 1e-6, ["accuracy not above 96%"]),
        (float("nan"), 1e-6, ["accuracy not above 96%"]),
        (0.97, 1e-3, ["differs by more than 0.0001"]),
        (0.97, float("nan"), ["differs by more than 0.0001"]),
    ],
)
def test_curves_name_their_faults(
    accuracy: float, difference: float, faults: list[str]
) -> None:
    curves = curves_of(
        [Ended("torch", 0, records(accuracy=accuracy, difference=difference), "")]
    )
    assert [curve.recipe for curve in curves] == list(RECIPES)
    assert [curve.faults for curve in curves] == [faults, faults, faults, []]


def test_incomplete_process_is_a_problem() -> None:
    assert problem_of(Ended("torch", 0, records(), "")) is None
    assert (
        problem_of(Ended("torch", 1, records(), ""))
        == "its process ended with exit code 1"
    )
    assert (
        problem_of(Ended("torch", 0, records()[:-1], ""))
        == "its process ended after 8 of 8 epochs"
    )
    assert (
        problem_of(Ended("torch", 0, records()[:3], ""))
        == "its process ended after 2 of 8 epochs"
    )
    assert (
        problem_of(Ended("torch", 0, ({"kind": "finished"},), ""))
        == "its process ended after 0 of 0 epochs"
    )


def test_table_shows_every_fault() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(
        make_table(curves_of([Ended("torch", 0, records(difference=0.5), "")]))
    )
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum("5.0e-01" in line for line in lines) == len(RECIPES)
    assert any(LARGE.name in line and "no: differs" in line for line in lines)
    assert any(NAIVE.name in line and "for contrast" in line for line in lines)


def fake_job(records: tuple[dict[str, Any], ...], exit_code: int = 0) -> Any:
    text = "".join(json.dumps(record) + "\n" for record in records)
    script = (
        f"import sys; open(sys.argv[1], 'w').write({text!r}); print('last words');"
        f" sys.exit({exit_code})"
    )
    return lambda backend, out: Job(
        backend,
        (sys.executable, "-c", script, str(out / f"{backend}.jsonl")),
        out / f"{backend}.jsonl",
    )


@pytest.mark.parametrize(
    ("written", "exit_code", "passes"),
    [
        (records(), 0, True),
        (records(accuracy=0.5), 0, False),
        (records(difference=1.0), 0, False),
        (records()[:3], -9, False),
        ((), 1, False),
    ],
)
def test_demo_passes_with_every_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: Any,
    exit_code: int,
    passes: bool,
) -> None:
    """And fails with any run that failed."""
    monkeypatch.setattr(
        command, "_job", fake_job(written, max(exit_code, 0) or (7 if exit_code else 0))
    )
    console = Console(file=io.StringIO(), width=100)
    assert command.run_demo(console, ["numpy"], tmp_path) is passes
    assert ("last words" in console.file.getvalue()) is bool(exit_code)  # type: ignore[attr-defined]
    assert (tmp_path / "curves.png").exists() is bool(written)
    if written:
        results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
        assert bool(results["problems"]) is bool(exit_code)
        assert results["runs"][0]["run"] == LARGE.name


def test_process_writes_every_epoch(tmp_path: Path) -> None:
    results = tmp_path / "numpy.jsonl"
    module = (
        "-m",
        "gradaccum_conformance.demo",
        "--backend",
        "numpy",
        "--epochs",
        "1",
        "--results",
        str(results),
    )
    subprocess.run([sys.executable, *module], check=True, timeout=300)
    written = [
        json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()
    ]
    assert [record["kind"] for record in written] == [
        "started",
        *["epoch"] * len(RECIPES),
        "finished",
    ]
    assert written[0]["epochs"] == len(RECIPES)
    assert [record["run"] for record in written[1:-1]] == [
        recipe.name for recipe in recipes.RECIPES
    ]
