"""A pytest plugin: which tests run which lines of a package, and the tests of a line in
the order that finds a fault soonest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest


class Covered(NamedTuple):
    """What a run of all tests has recorded."""

    seconds: dict[str, float]
    """Of CPU, by the test's id."""
    tests: dict[str, dict[str, list[str]]]
    """The ids of the tests that ran a line, by the file relative to the package's
    parent, and the line's number.
    """

    def of(self, file: str, lines: range) -> list[str]:
        """Return the tests that ran one of these lines; all tests if none did, which an
        import may have run.
        """
        ran = self.tests.get(file, {})
        return sorted(
            {test for line in lines for test in ran.get(str(line), ())}
        ) or sorted(self.seconds)

    def lines(self) -> Counter[str]:
        """Return how many lines each test ran."""
        return Counter(
            test
            for lines in self.tests.values()
            for ids in lines.values()
            for test in ids
        )


class Recording:
    """Records `Covered` of the packages below `site` into `file`."""

    def __init__(self, site: str, file: str) -> None:
        from coverage import Coverage  # A run of chosen tests does without it.

        self.site = Path(site)
        self.file = Path(file)
        self.coverage = Coverage(
            data_file=None, config_file=False, include=[f"{site}/*"]
        )
        self.seconds: dict[str, float] = {}
        self.compiled: dict[str, set[CodeType]] = {}

    def pytest_collection_finish(self) -> None:
        if "mindspore" in sys.modules:
            _see_parsed(lambda code: next(reversed(self.compiled.values())).add(code))
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        self.compiled[item.nodeid] = set()
        begin = time.process_time()
        result = yield
        self.seconds[item.nodeid] = time.process_time() - begin
        return result

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        tests = {
            str(Path(file).relative_to(self.site)): {
                line: list(filter(None, ids))
                for line, ids in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        for test, codes in self.compiled.items():
            for code in codes:
                ran = tests.get(os.path.relpath(code.co_filename, self.site), {})
                for line in {line for *_, line in code.co_lines() if line}:
                    if test not in ran.setdefault(line, []):
                        ran[line].append(test)
        self.file.write_text(
            json.dumps(Covered(self.seconds, tests)._asdict()), "utf-8"
        )


def _see_parsed(see: Callable[[CodeType], object]) -> None:
    """Call `see` with the code of each function that MindSpore compiles: its parser
    reads the source, and no line runs.
    """
    from mindspore.graph._parse.parser import Parser

    make = Parser.__init__

    def seen(parser: Any, *arguments: Any) -> None:
        make(parser, *arguments)
        see(parser.fn.__code__)

    Parser.__init__ = seen


class Chosen:
    """Runs the tests named in `file`, in that order, up to the first that fails; the
    file then names that test alone.

    The file says how much CPU each test takes; a test that takes far more loops for
    ever, and SIGPROF ends the process.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file).resolve()
        self.seconds: dict[str, float] = json.loads(self.file.read_text("utf-8"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[test] for test in self.seconds if test in by_id]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_PROF, 5 + 5 * self.seconds[item.nodeid])
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.file.write_text(json.dumps({report.nodeid: 0.0}), "utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # A summary and a last collection of garbage take longer than most tests.
        os._exit(exitstatus)
