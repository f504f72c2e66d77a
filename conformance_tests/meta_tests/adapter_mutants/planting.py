"""Plants a mutant in a copy of its adapter, which stands before the adapter itself on
the path of a program that runs a test.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from conformance_tests.mutation.running import pytest_program
from conformance_tests.programs import ROOT

SUITE = "gradaccum_conformance/suite/"
OWN = "framework_tests/"


class Mutant(NamedTuple):
    """A fault, and what catches it."""

    name: str
    old: str
    """Stands exactly once in the adapter's sources."""
    new: str
    test: str
    """A file of the adapter's own tests or of the suite, with or without the name of a
    test; the cases are chosen by `only`.
    """
    only: str = ""
    """What ``pytest -k`` takes."""


def folder_of(adapter: str) -> Path:
    return ROOT / "backends" / f"gradaccum_{adapter}"


def places(adapter: str, mutant: Mutant) -> list[Path]:
    """The files that the text stands in, each as often as it stands there."""
    return [
        file
        for file in sorted(folder_of(adapter).rglob("*.py"))
        for _ in range(file.read_text("utf-8").count(mutant.old))
    ]


def planted(adapter: str, mutant: Mutant) -> tuple[Path, str]:
    """The file that the mutant changes, relative to the adapter, and its text with the
    fault in it.
    """
    (file,) = places(adapter, mutant)
    return file.relative_to(folder_of(adapter)), file.read_text(
        encoding="utf-8"
    ).replace(mutant.old, mutant.new)


def program_of(adapter: str, mutant: Mutant, site: Path) -> str:
    """A program that runs the mutant's test on a copy of the adapter with the fault in
    it, which is made below `site`.
    """
    file, text = planted(adapter, mutant)
    copy = site / f"gradaccum_{adapter}"
    shutil.copytree(
        folder_of(adapter), copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    (copy / file).write_text(text, "utf-8")
    folder = OWN if mutant.test.startswith(f"test_{adapter}_") else SUITE
    only = ("-k", mutant.only) if mutant.only else ()
    return pytest_program(site, [folder + mutant.test], "--backend", adapter, *only)
