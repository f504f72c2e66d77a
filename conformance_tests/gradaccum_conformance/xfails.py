"""Declared gaps: tests that a backend is known to fail, each with a reason. They are
strict.

A file has one line per gap, ``PATTERN  # reason``, where PATTERN is a shell pattern
over ``module::test[parameters]``. A declared test that passes fails the run, and so
does a line that matches no test. A gap of some versions is
``PATTERN  # mindspore<2.9: reason``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

_OF_VERSIONS = re.compile(r"(\w+[<>=]=?[\w.]+): (.+)")


class Gap(NamedTuple):
    """One declared gap."""

    pattern: str
    reason: str
    source: str


class Xfails(NamedTuple):
    """The gaps of the backends that run."""

    gaps: tuple[Gap, ...]

    @classmethod
    def read(cls, file: str | None, backends: Sequence[str]) -> Xfails:
        """The gaps in `file`, or in the files that ship with the suite for these
        backends.
        """
        files = (
            [Path(file)]
            if file
            else [path for name in backends if (path := shipped(name))]
        )
        return cls(tuple(gap for path in files for gap in _parse(path)))

    def mark(self, items: Sequence[pytest.Item], *, whole: bool) -> None:
        """Mark the matching tests. With `whole`, a line that matches no test of a
        collected module is an error.
        """
        for gap in self.gaps:
            matching = [
                item
                for item in items
                if fnmatchcase(_name(item), _literal(gap.pattern))
            ]
            for item in matching:
                item.add_marker(pytest.mark.xfail(reason=gap.reason, strict=True))
            module = gap.pattern.partition("::")[0]
            if (
                whole
                and not matching
                and any(_name(item).startswith(f"{module}::") for item in items)
            ):
                raise pytest.UsageError(
                    f"{gap.source}: stale line, matches no test: {gap.pattern}"
                )


def shipped(backend: str) -> Path | None:
    """The file of declared gaps for one of this project's backends: inside the
    installed package, or beside it in a checkout.
    """
    here = Path(__file__).parent
    candidates = (
        here / "xfails" / f"{backend}.txt",
        here.parent / "xfails" / f"{backend}.txt",
    )
    return next((path for path in candidates if path.is_file()), None)


def _parse(path: Path) -> list[Gap]:
    gaps = []
    for line in path.read_text("utf-8").splitlines():
        pattern, _, reason = (part.strip() for part in line.partition("#"))
        if pattern and not reason:
            raise pytest.UsageError(f"{path}: a gap without a reason: {pattern}")
        versions = _OF_VERSIONS.fullmatch(reason)
        if pattern and (versions is None or _installed(Requirement(versions[1]))):
            gaps.append(Gap(pattern, reason, str(path)))
    return gaps


def _installed(package: Requirement) -> bool:
    return package.specifier.contains(version(package.name), prereleases=True)


def _literal(pattern: str) -> str:
    return pattern.replace("[", "[[]")


def _name(item: pytest.Item) -> str:
    module, _, test = item.nodeid.partition("::")
    return f"{Path(module).stem}::{test.partition('@')[0]}"
