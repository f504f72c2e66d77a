"""The suite's pytest plugin: it chooses the backends, marks the declared gaps, and
records every result and measured error.

It is loaded with ``-p gradaccum_conformance.plugin`` and not through an entry point,
because it must not appear in other people's test runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gradaccum import available_backends, registered_backends
from gradaccum_conformance.harness import (
    Harness,
    LargeBatchHarness,
    VerifyingHarness,
    WorkersHarness,
)
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.no_skips import NoSkips
from gradaccum_conformance.runner import ONE_THREAD
from gradaccum_conformance.workers import plugin as workers
from gradaccum_conformance.xfails import Xfails

os.environ.update({**ONE_THREAD, **os.environ})  # Before a framework is imported.

ERRORS = "gradaccum_errors"
CHOSEN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gradaccum conformance")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        help="run this backend (repeatable); default: all that are installed",
    )
    group.addoption(
        "--require-backend",
        action="append",
        default=[],
        help="fail unless this backend runs (repeatable)",
    )
    group.addoption(
        "--no-skips", action="store_true", help="fail if any test was skipped"
    )
    group.addoption(
        "--xfails-file",
        help=(
            "file of declared gaps, one per line: PATTERN  # reason; the run fails if a"
            " line matches nothing"
        ),
    )
    group.addoption("--results", help="write results to this file as JSON lines")
    group.addoption(
        "--deep",
        action="store_true",
        help="test every combination and longer sequences; takes tens of minutes",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deep: run only with --deep")
    config.addinivalue_line(
        "markers", "xdist_group(name): tests of one backend share a worker process"
    )
    config.addinivalue_line(
        "markers", "every_mode: run in a backend's brief modes too, without --deep"
    )
    config.addinivalue_line(
        "markers", "no_such_backend: no chosen backend can do what is tested"
    )
    config.pluginmanager.register(Results(config), "gradaccum-results")
    config.pluginmanager.register(workers, "gradaccum-workers")
    if config.getoption("--no-skips"):
        config.pluginmanager.register(NoSkips(), "gradaccum-no-skips")


def chosen_backends(config: pytest.Config) -> list[str]:
    """Return the backends to run: the requested backends, else every backend whose
    framework is installed.

    They are found once per session, because reading entry points means reading the
    metadata of every installed package.
    """
    if CHOSEN not in config.stash:
        config.stash[CHOSEN] = _choose(config)
    return config.stash[CHOSEN]


def _choose(config: pytest.Config) -> list[str]:
    chosen: list[str] = config.getoption("--backend") or list(available_backends())
    missing = set(config.getoption("--require-backend")) - set(available_backends())
    if missing:
        raise pytest.UsageError(
            f"required, but not installed: {', '.join(sorted(missing))}"
        )
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a case for each backend that can do what is tested, and for each of its
    modes if the test asks for a mode.
    """
    if "backend" not in metafunc.fixturenames:
        return
    kind = _kind_of(metafunc)
    chosen = [load_harness(name) for name in chosen_backends(metafunc.config)]
    harnesses = [harness for harness in chosen if isinstance(harness, kind)]
    names: tuple[str, ...]
    if kind is WorkersHarness:
        names = ("backend", "worker_mode", "workers")
        cases = workers.cases_of(harnesses)
    else:
        brief = _is_brief(metafunc)
        names = tuple(
            name
            for name in ("backend", "mode", "large_batch_mode")
            if name in metafunc.fixturenames
        )
        cases = [
            _parameter(harness, *mode, brief=brief)
            for harness in harnesses
            for mode in product(*(getattr(harness, f"{name}s") for name in names[1:]))
        ]
    # pytest would skip a test without cases.
    nothing = pytest.param(*names, marks=pytest.mark.no_such_backend)
    metafunc.parametrize(names, cases or [nothing], scope="session")


def _kind_of(metafunc: pytest.Metafunc) -> type[Any]:
    """Return the type that a test needs its backend to have. The test shows this
    through the annotation of `backend`, or by asking for crews of workers.
    """
    if "crews" in metafunc.fixturenames:
        return WorkersHarness
    annotation = metafunc.function.__annotations__.get("backend")
    for kind in (LargeBatchHarness, VerifyingHarness):
        if annotation in (kind, kind.__name__):
            return kind
    return Harness


def _is_brief(metafunc: pytest.Metafunc) -> bool:
    """True if the test leaves out a backend's `brief_modes`."""
    return metafunc.definition.get_closest_marker("every_mode") is None


def _parameter(harness: Harness, *mode: str, brief: bool = False) -> Any:
    left_out = {*harness.deep_modes, *(harness.brief_modes if brief else ())}
    marks = [pytest.mark.xdist_group(harness.name)] + [
        pytest.mark.deep for one in mode if one in left_out
    ]
    return pytest.param(harness, *mode, id="-".join((harness.name, *mode)), marks=marks)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    items[:] = [
        item for item in items if not item.get_closest_marker("no_such_backend")
    ]
    # The gaps come first, because a gap may be in a deep test.
    Xfails.read(config.getoption("--xfails-file"), chosen_backends(config)).mark(
        items, whole=not config.getoption("-k")
    )
    if not config.getoption("--deep"):
        deep = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]


@pytest.fixture
def deep(request: pytest.FixtureRequest) -> bool:
    """True if ``--deep`` was passed."""
    return bool(request.config.getoption("--deep"))


@pytest.fixture
def errors() -> Errors:
    """A recorder of measured errors and their bounds. The first error above its bound
    fails the test.
    """
    return Errors()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Attach the measured errors before pytest makes the test's report, because the
    teardown of a fixture would be too late.
    """
    try:
        yield
    finally:
        recorder = getattr(item, "funcargs", {}).get("errors")
        if isinstance(recorder, Errors):
            item.user_properties.append(
                (ERRORS, [entry._asdict() for entry in recorder.entries])
            )


class Results:
    """Writes the JSON lines of ``--results``: the number of collected tests, every
    test's outcome, and the exit status.
    """

    def __init__(self, config: pytest.Config) -> None:
        path = config.getoption("--results")
        self.path = Path(path) if path and not hasattr(config, "workerinput") else None
        self.backends = registered_backends() if self.path else ()
        if self.path:
            self.path.write_text("", "utf-8")

    def write(self, kind: str, **fields: object) -> None:
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                print(json.dumps({"kind": kind, **fields}), file=file)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(
            "collected",
            backend=",".join(chosen_backends(session.config)),
            tests=len(session.items),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.path and (
            report.when == "call" or (report.when == "setup" and not report.passed)
        ):
            module, _, test = report.nodeid.partition("::")
            self.write(
                "test",
                backend=self._backend_in(test),
                property=Path(module).stem.removeprefix("test_"),
                test=report.nodeid,
                outcome=_outcome(report),
                reason=_reason(report),
                errors=dict(report.user_properties).get(ERRORS, []),
                seconds=report.duration,
            )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write("finished", exit_status=int(exitstatus))

    def _backend_in(self, test: str) -> str:
        parameters = test.partition("[")[2].rstrip("]").split("@")[0].split("-")
        return next((name for name in self.backends if name in parameters), "")


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    return str(report.outcome)


def _reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return (
        report.longreprtext.strip().splitlines()[-1]
        if report.failed and report.longreprtext
        else ""
    )
