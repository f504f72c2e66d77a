"""``--no-skips``: a skipped test fails the run, for machines on which every framework
is installed.
"""

from __future__ import annotations

import pytest


class NoSkips:
    """Collects skipped tests and skipped modules. Declared gaps (xfail) are not
    skips.
    """

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.skipped and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        if self.skipped:
            terminalreporter.section("--no-skips")
            terminalreporter.write_line(
                f"{len(self.skipped)} skipped: {', '.join(sorted(set(self.skipped)))}"
            )
