"""A whole run: every backend's results, the machine and the time."""

from __future__ import annotations

import contextlib
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, NamedTuple

import gradaccum
from gradaccum_conformance.measuring import Measurement
from gradaccum_conformance.report.results import (
    GAP,
    SKIPPED,
    BackendResults,
    Cell,
    Result,
    properties_of,
)
from gradaccum_conformance.selection import install_command


class Run(NamedTuple):
    """The results of `gradaccum conformance`."""

    results: tuple[BackendResults, ...]
    missing: tuple[str, ...]
    """Backends that are not installed."""
    deep: bool
    passed: bool
    created: str
    """UTC, ISO 8601, to the second."""

    @property
    def properties(self) -> list[str]:
        return properties_of(self.results)

    @property
    def machine(self) -> str:
        return (
            f"gradaccum {gradaccum.__version__}, Python {platform.python_version()},"
            f" {platform.system()} {platform.machine()}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "created": self.created,
            "machine": self.machine,
            "deep": self.deep,
            "passed": self.passed,
            "backends": {
                results.backend: _backend_json(results, self.properties)
                for results in self.results
            },
            "missing": {name: install_command(name) for name in self.missing},
        }


def now() -> str:
    """The time, in the form of `Run.created`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions(backend: str) -> dict[str, str]:
    """The installed versions of the packages in gradaccum's extra of this name; empty
    if there is no such extra.
    """
    extra = re.compile(rf"""^([\w.-]+).*extra == ['"]{re.escape(backend)}['"]""")
    found = {}
    for line in requires("gradaccum") or ():
        if match := extra.match(line):
            with contextlib.suppress(PackageNotFoundError):
                found[match[1]] = version(match[1])
    return found


def _backend_json(results: BackendResults, properties: list[str]) -> dict[str, Any]:
    return {
        "passed": results.passed,
        "versions": versions(results.backend),
        "problems": results.problems,
        "properties": {name: _cell_json(results.cell(name)) for name in properties},
        "failures": [_test_json(test) for test in results.failures],
        "declared_gaps": [_test_json(test) for test in results.having(GAP)],
        "skipped": [_test_json(test) for test in results.having(SKIPPED)],
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "status": cell.status,
        "counts": cell.counts,
        "worst": None if cell.worst is None else _measurement_json(cell.worst),
        "seconds": sum(test.seconds for test in cell.tests),
    }


def _test_json(test: Result) -> dict[str, Any]:
    errors = [_measurement_json(error) for error in test.errors]
    return {**test._asdict(), "errors": errors}


def _measurement_json(error: Measurement) -> dict[str, Any]:
    return {**error._asdict(), "ratio": error.ratio}
