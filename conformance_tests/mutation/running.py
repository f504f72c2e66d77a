"""Runs a package's tests on one mutant of it: a copy with the change, which stands
before the package itself on the path.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from conformance_tests.framework_tests.preloaded import Preloaded
from conformance_tests.programs import ROOT

from .covering import Covered
from .operators import Mutation, mutations_of
from .packages import Package

TESTS = ROOT / "conformance_tests"
WALL_SECONDS = 3600.0
"""At most how long a run of all tests lasts, or one of a mutant that sleeps."""

SOON = 10
"""So many tests run first, alone: to collect the files of all takes longer than most
mutants live.
"""


class Mutant(NamedTuple):
    """A mutation of one file of a package."""

    file: Path
    """Relative to the checkout."""
    mutation: Mutation

    def __str__(self) -> str:
        return f"{self.file}:{self.mutation.line}: {self.mutation}"


class Verdict(NamedTuple):
    """What the tests said of a mutant."""

    mutant: Mutant
    killer: str
    """The id of the test that failed, or how the run ended otherwise; empty if the
    mutant survived.
    """


def mutants_of(package: Package) -> list[Mutant]:
    return [
        Mutant(file.relative_to(ROOT), mutation)
        for file in package.files()
        for mutation in mutations_of(file.read_text("utf-8"))
    ]


def sample(package: Package, count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants of a package; a change of the sources changes the draw by
    the mutants of the changed lines alone.
    """

    def lot(mutant: Mutant) -> bytes:
        return hashlib.sha256(
            f"{seed} {mutant.file} {mutant.mutation.becomes}".encode()
        ).digest()

    return sorted(sorted(mutants_of(package), key=lot)[:count])


def verdicts(
    package: Package, mutants: Iterable[Mutant], folder: Path, most_seconds: float
) -> Iterator[Verdict]:
    """Run the tests of its line on each mutant, in at most about `most_seconds` of CPU.

    `folder` keeps what a run of all tests has recorded: with that of an earlier run,
    this one is left out.
    """
    with Preloaded(*package.imported, **package.environment(folder)) as server:
        record = folder / "covered.json"
        if not record.exists():
            program = _program(
                package,
                None,
                folder / "unchanged",
                f"Recording({str(folder / 'unchanged')!r}, {str(record)!r})",
                package.tests,
            )
            status, said = server.run(program, WALL_SECONDS)
            shutil.rmtree(folder / "unchanged")
            if status:
                record.unlink(missing_ok=True)
                raise RuntimeError(
                    f"the tests fail without a mutant too:\n{said[-3000:]}"
                )
        covered = Covered(**json.loads(record.read_text("utf-8")))
        promises = Counter(
            {test: 30 / lines for test, lines in covered.lines().items()}
        )
        is_unchanged_tried = False
        for number, mutant in enumerate(mutants):
            tests = _chosen(covered, mutant, package, promises, most_seconds)
            killer = ""
            for some in filter(None, (tests[:SOON], tests[SOON:])):
                killer = killer or _killer(
                    server,
                    package,
                    mutant,
                    {test: covered.seconds[test] for test in some},
                    folder / str(number),
                )
            promises[killer] += 1
            if package.last_tests and not killer:
                site = folder / str(number)
                if not is_unchanged_tried:
                    _last_status(server, package, None, site)
                    is_unchanged_tried = True
                status = _last_status(server, package, mutant, site)
                killer = f"exit status {status}" if status else ""
            yield Verdict(mutant, killer)


def _chosen(
    covered: Covered,
    mutant: Mutant,
    package: Package,
    promises: Mapping[str, float],
    most_seconds: float,
) -> list[str]:
    """The tests of a mutant's line: per second, those first that have noticed most
    mutants, or are about few lines, of many cases one.
    """
    found = covered.of(
        str(mutant.file.relative_to(package.folder.parent)),
        statement_at(mutant.file, mutant.mutation.line),
    )
    chosen = []
    seconds = 0.0
    cases = Counter[str]()
    costs = {
        test: (covered.seconds[test] + 0.02) / (promises[test] or 0.01)
        for test in found
    }
    for test in sorted(costs, key=costs.__getitem__):
        cases[test.partition("[")[0]] += 1
        costs[test] *= cases[test.partition("[")[0]]
    for test in sorted(costs, key=costs.__getitem__):
        if seconds < most_seconds:
            chosen.append(test)
            seconds += covered.seconds[test]
    return chosen


def statement_at(file: Path, line: int) -> range:
    """The lines of the innermost statement at this line; of one with a body, those
    before the body.
    """
    found = range(line, line + 1)
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = range(
                node.lineno,
                max(node.lineno, body[0].lineno - 1) + 1
                if body
                else (node.end_lineno or node.lineno) + 1,
            )
            found = lines if line in lines else found
    return found


def _killer(
    server: Preloaded,
    package: Package,
    mutant: Mutant,
    tests: Mapping[str, float],
    site: Path,
) -> str:
    files = {
        test.partition("::")[0].removeprefix("conformance_tests/"): None
        for test in tests
    }
    program = _program(package, mutant, site, "Chosen('tests.json')", files)
    (site / "tests.json").write_text(json.dumps(tests), "utf-8")
    try:
        status = server.run(program, WALL_SECONDS)[0]
    except TimeoutError:
        return "it never ends"
    left = list(json.loads((site / "tests.json").read_text("utf-8")))
    shutil.rmtree(site, ignore_errors=True)
    if status == 5:
        raise RuntimeError(f"no test was run on {mutant}")
    return (
        ""
        if status == 0
        else left[0]
        if status == 1 and len(left) == 1
        else f"exit status {status}"
    )


def _last_status(
    server: Preloaded, package: Package, mutant: Mutant | None, site: Path
) -> int:
    """Run the tests of several processes, and return their exit status; it is 1 too if
    the tests never end.
    """
    files = [
        str(file.relative_to(TESTS))
        for test in package.last_tests
        for file in sorted(TESTS.glob(test))
    ]
    program = _program(package, mutant, site, "", files)
    try:
        status, said = server.run(program, WALL_SECONDS)
    except TimeoutError:
        status = 1
        said = "They never end."
    shutil.rmtree(site, ignore_errors=True)
    if status and mutant is None:
        raise RuntimeError(f"the tests fail without a mutant too:\n{said[-3000:]}")
    return status


def _program(
    package: Package,
    mutant: Mutant | None,
    site: Path,
    plugin: str,
    tests: Iterable[str],
) -> Path:
    """Write the program that runs tests on a copy of the package, with the mutant in it
    unless it is None.
    """
    shutil.rmtree(site, ignore_errors=True)  # Of a run that was stopped.
    copy = site / package.folder.name
    shutil.copytree(
        ROOT / package.folder,
        copy,
        ignore=shutil.ignore_patterns("__pycache__", "figures"),
    )
    if mutant is not None:
        changed = copy / mutant.file.relative_to(package.folder)
        changed.write_text(mutant.mutation.apply(changed.read_text("utf-8")), "utf-8")
    program = site / "run.py"
    # pytest's own setting of the path would put the checkout before the copy.
    options = (
        "--backend",
        package.backend,
        "-o",
        f"pythonpath={site}",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    )
    program.write_text(pytest_program(site, tests, *options, plugin=plugin), "utf-8")
    return program


def pytest_program(
    site: Path, tests: Iterable[str], *options: str, plugin: str = ""
) -> str:
    """Return a program that runs `tests`, which are below ``conformance_tests``; a
    package below `site` stands before the checkout's.

    `plugin` makes a pytest plugin of `covering`.
    """
    folders = [
        str(site),
        str(ROOT),
        str(ROOT / "backends"),
        str(ROOT / "conformance_tests"),
    ]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    always = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-q",
        "-x",
        "-rf",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
    ]
    selected = [str(ROOT / "conformance_tests" / test) for test in tests]
    return f"""
import os, sys
import pytest
os.environ["PYTHONPATH"] = {path!r}
sys.path[:0] = {folders!r}
{"from conformance_tests.mutation.covering import Chosen, Recording" if plugin else ""}
sys.exit(pytest.main({[*always, *options, *selected]!r}, plugins=[{plugin}]))
"""
