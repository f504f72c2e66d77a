"""One backend's recorded results, property by property.

A property is a module of the suite. A missing result is a failure: a process that died,
a test that left no record, a run without tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradaccum_conformance.measuring import Measurement
from gradaccum_conformance.runner import Ended, Record

PASSED = "passed"
SKIPPED = "skipped"
GAP = "xfailed"
HARMLESS = (PASSED, SKIPPED, GAP)
"""Every other outcome is a failure. ``xpassed`` is one: a declared gap that passes."""


class Result(NamedTuple):
    """One test's record."""

    property_name: str
    name: str
    outcome: str
    reason: str
    errors: tuple[Measurement, ...]
    seconds: float

    @property
    def failed(self) -> bool:
        return self.outcome not in HARMLESS


class Cell(NamedTuple):
    """A backend's tests of one property."""

    tests: tuple[Result, ...]

    @property
    def status(self) -> str:
        """``"failed"``, ``"passed"``, ``"gap"`` (passed but for declared gaps),
        ``"skipped"`` (all of it) or ``"none"`` (no test).
        """
        if any(test.failed for test in self.tests):
            return "failed"
        outcomes = {test.outcome for test in self.tests}
        for outcome, status in ((GAP, "gap"), (PASSED, PASSED), (SKIPPED, SKIPPED)):
            if outcome in outcomes:
                return status
        return "none"

    @property
    def counts(self) -> str:
        """How many of each outcome, in words."""
        count = Counter(
            "failed" if test.failed else test.outcome for test in self.tests
        )
        gaps = "declared gap" if count[GAP] == 1 else "declared gaps"
        words = {"failed": "failed", PASSED: "passed", GAP: gaps, SKIPPED: "skipped"}
        return ", ".join(
            f"{count[outcome]} {word}"
            for outcome, word in words.items()
            if count[outcome]
        )

    @property
    def worst(self) -> Measurement | None:
        """The error nearest to its bound, or furthest above it. Declared gaps are left
        out.
        """
        errors = [
            error for test in self.tests if test.outcome != GAP for error in test.errors
        ]
        return max(errors, key=lambda error: error.ratio, default=None)


class BackendResults(NamedTuple):
    """Everything recorded of one backend."""

    backend: str
    tests: tuple[Result, ...]
    problems: tuple[str, ...]
    """Faults of the run itself, in words."""
    log_tail: str
    """The last lines that its process printed."""

    @property
    def passed(self) -> bool:
        return not self.problems and not any(test.failed for test in self.tests)

    def cell(self, name: str) -> Cell:
        return Cell(tuple(test for test in self.tests if test.property_name == name))

    def having(self, *outcomes: str) -> list[Result]:
        return [test for test in self.tests if test.outcome in outcomes]

    @property
    def failures(self) -> list[Result]:
        return [test for test in self.tests if test.failed]


def results_of(ended: Ended) -> BackendResults:
    """The results of a process of the suite that has ended."""
    tests = tuple(_test(record) for record in ended.records if record["kind"] == "test")
    return BackendResults(
        ended.backend, tests, tuple(_problems(ended, tests)), ended.log_tail
    )


def properties_of(results: Iterable[BackendResults]) -> list[str]:
    """The names of all properties, sorted."""
    return sorted({test.property_name for backend in results for test in backend.tests})


def _test(record: Record) -> Result:
    errors = tuple(
        Measurement(error["label"], float(error["measured"]), float(error["bound"]))
        for error in record["errors"]
    )
    names = (record["property"], record["test"], record["outcome"], record["reason"])
    return Result(*names, errors, record["seconds"])


def _problems(ended: Ended, tests: Sequence[Result]) -> Iterable[str]:
    failed = any(test.failed for test in tests)
    if ended.exit_code not in (0, 1) or (ended.exit_code == 1 and not failed):
        yield f"its process ended with exit code {ended.exit_code}"
    if not any(record["kind"] == "finished" for record in ended.records):
        yield "its process ended before it was done"
    if unreadable := sum(record["kind"] == "unreadable" for record in ended.records):
        yield f"{unreadable} unreadable lines in its results"
    if not any(test.outcome != SKIPPED for test in tests):
        yield "it ran no test"
    collected = sum(
        int(record["tests"])
        for record in ended.records
        if record["kind"] == "collected"
    )
    if len(tests) != collected:
        yield f"{collected} tests were collected, {len(tests)} left a result"
