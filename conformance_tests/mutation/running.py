"""Runs a package's tests on one mutant of it: a copy with the change, which stands before the package itself on the path."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from conformance_tests.framework_tests.preloaded import Preloaded

from .operators import Mutation, mutations_of
from .packages import ROOT, Package

SECONDS, UNCHANGED_SECONDS = 60.0, 3600.0
"""At least how long a mutant runs before it counts as one that loops for ever; and at most how long the package itself runs."""


class Mutant(NamedTuple):
    """A mutation of one file of a package."""

    file: Path
    """Relative to the checkout."""
    mutation: Mutation

    def __str__(self) -> str:
        return f"{self.file}:{self.mutation.line}: {self.mutation}"


def mutants_of(package: Package) -> list[Mutant]:
    return [
        Mutant(file.relative_to(ROOT), mutation) for file in package.files() for mutation in mutations_of(file.read_text(encoding="utf-8"))
    ]


def sample(package: Package, count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants of a package; the same ones for the same seed and sources."""
    every = mutants_of(package)
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


def survivors(package: Package, mutants: Iterable[Mutant], folder: Path) -> Iterator[tuple[Mutant, bool]]:
    """Run the package's tests on each mutant: pairs of the mutant and True if it survived."""
    with Preloaded(*package.imported) as server:
        begin = time.monotonic()
        status, said = server.run(_program(package, None, folder / "unchanged"), UNCHANGED_SECONDS)
        limit = max(SECONDS, 3 * (time.monotonic() - begin))
        if status:
            raise RuntimeError(f"the tests fail without a mutant too:\n{said[-3000:]}")
        for number, mutant in enumerate(mutants):
            site = folder / str(number)
            program = _program(package, mutant, site)
            try:
                survived = server.run(program, limit)[0] == 0
            except TimeoutError:
                survived = False  # A loop that no longer ends is noticed by whoever waits for it.
            shutil.rmtree(site)
            yield mutant, survived


def _program(package: Package, mutant: Mutant | None, site: Path) -> Path:
    """Write the program that runs the tests on a copy of the package, with the mutant in it unless it is None."""
    copy = site / package.folder.name
    shutil.copytree(ROOT / package.folder, copy, ignore=shutil.ignore_patterns("__pycache__", "figures"))
    if mutant is not None:
        changed = copy / mutant.file.relative_to(package.folder)
        changed.write_text(mutant.mutation.apply(changed.read_text(encoding="utf-8")), encoding="utf-8")
    program = site / "run.py"
    # pytest's own setting of the path would put the checkout before the copy.
    program.write_text(pytest_program(site, package.tests, "--backend", package.backend, "-o", f"pythonpath={site}"), encoding="utf-8")
    return program


def pytest_program(site: Path, tests: Iterable[str], *options: str) -> str:
    """Return a program that runs `tests`, which are below ``conformance_tests``; a package below `site` stands before the checkout's."""
    folders = [str(site), str(ROOT), str(ROOT / "backends"), str(ROOT / "conformance_tests")]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    always = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-q", "-x", "-rf", "-p", "no:cacheprovider"]
    selected = [str(ROOT / "conformance_tests" / test) for test in tests]
    return f"""
import os, sys
import pytest
os.environ["PYTHONPATH"] = {path!r}
sys.path[:0] = {folders!r}
sys.exit(pytest.main({[*always, *options, *selected]!r}))
"""
