"""The record is what the code is: public names and refusals everywhere, counts where
the versions are those that they were taken with.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from conformance_tests.record import counts, names, refusals, size
from conformance_tests.record.facts import changes, file_of, read, write
from gradaccum import available_backends

BACKENDS = [name for name in available_backends() if name != "numpy"]
ADVICE = (
    "Look at each line. If all are meant, write them: python -m"
    " conformance_tests.record --write"
)
LOSING = """
def check(value):
    expected, fix = f"at least {value}", "Write 3."
    if value:
        raise explain(UsageError, "steps", expected=expected, got=value, fix=fix)
    raise TypeError("no number: 3")
    raise other_error(value)
"""


def test_public_names_are_those_of_the_record() -> None:
    assert list(changes(read(file_of("names")), names.found(BACKENDS))) == [], ADVICE


def test_refusals_are_those_of_the_record() -> None:
    assert list(changes(read(file_of("refusals")), refusals.found())) == [], ADVICE


def test_no_size_rises() -> None:
    rises = list(size.rises(read(file_of("size")), size.found()))
    assert rises == [], (
        "Write it with fewer tokens, or, if it is meant: python -m"
        " conformance_tests.record --part size --write"
    )


def test_a_size_that_rises_is_named() -> None:
    held = {
        "size": ["tokens, core, kit: 10", "nested / 1000: 2.0", "tokens, jax, a: 3"]
    }
    now = {"size": ["tokens, core, kit: 11", "nested / 1000: 1.5", "tokens, jax, b: 3"]}
    assert list(size.rises(held, now)) == [
        "tokens, core, kit: 11, was 10",
        "tokens, jax, b: 3, new",
    ]
    kept = {"size": ["tokens, core, kit: 10", "nested / 1000: 1.5"]}
    assert size.fallen(held, now) == kept
    assert not list(size.rises(kept, kept))


@pytest.mark.parametrize(
    "package", [*names.PACKAGES, *(f"gradaccum_{name}" for name in BACKENDS)]
)
def test_public_names_have_docstrings(package: str) -> None:
    module = import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    assert [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__
    ] == []


@pytest.mark.parametrize(
    "framework",
    [name for name in BACKENDS if counts.environment(name) in read(file_of("counts"))],
)
def test_counts_are_those_of_the_record(framework: str) -> None:
    """In a process of its own, whose caches are empty."""
    command = [
        sys.executable,
        "-m",
        "conformance_tests.record",
        "--part",
        "counts",
        "--backend",
        framework,
    ]
    done = subprocess.run(
        command, cwd=counts.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}\n{ADVICE}"


def test_refusals_are_read() -> None:
    expected = [
        "UsageError | steps: expected at least {}",
        "TypeError | no number",
        "other_error",
    ]
    assert sorted(refusals.refusals(LOSING)) == sorted(expected)


def test_a_lost_fact_is_a_removed_line(tmp_path: Path) -> None:
    file = tmp_path / "facts.txt"
    write({"torch": ["b", "a | c"], "jax 1": ["d"]}, file)
    assert read(file) == {"jax 1": ["d"], "torch": ["a | c", "b"]}
    assert list(changes(read(file), {"torch": ["b", "e"], "jax 2": ["f"]})) == [
        "- torch | a | c",
        "+ torch | e",
    ]
