"""Version numbers and what a package asks of them, read from the metadata that pip wrote.

The bounds themselves stand once, in the metadata: the doctor repeats none of them. The package ``packaging`` would parse them, but need not
be installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

_REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_CLAUSE = re.compile(r"^(~=|===?|!=|<=|>=|<|>)\s*(\S+)$")
_EXTRA = re.compile(r"""^\s*extra\s*==\s*['"]([^'"]+)['"]\s*$""")
_VERSION = re.compile(r"^v?(?:\d+!)?(\d+(?:\.\d+)*)[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)?", re.IGNORECASE)

Key = tuple[tuple[int, ...], bool]


class Requirement(NamedTuple):
    """One line of a package's metadata: it needs `package` within `bounds`."""

    package: str
    """The package's name, lower case, with hyphens."""
    bounds: str
    """As in the metadata, such as ``>=1.26,<2``; empty if every version will do."""
    extra: str
    """The extra that asks for it; empty if the package itself does."""


def normalised(name: str) -> str:
    """The name by which an index knows a package: ``ml_dtypes`` is ``ml-dtypes``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(package: str) -> str | None:
    """The version of `package`, or None where no metadata of it is found."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_of(package: str) -> tuple[Requirement, ...]:
    """What `package` asks for on every machine. A requirement with a marker other than an extra is left out: it holds on some machines."""
    try:
        lines = requires(package) or ()
    except PackageNotFoundError:
        return ()
    return tuple(found for line in lines for found in _parse(line))


def _parse(line: str) -> Iterator[Requirement]:
    match = _REQUIREMENT.match(line.strip())
    if not match:
        return
    name, bounds, marker = match.groups()
    extra = _EXTRA.match(marker or "extra == ''") if marker else None
    if marker is None or extra:
        yield Requirement(normalised(name), bounds.strip(), extra.group(1) if extra else "")


def satisfies(installed: str, bounds: str) -> bool:
    """Whether the version `installed` lies within `bounds`. A clause that cannot be read is taken as fulfilled: it accuses nobody."""
    return all(_holds(installed, clause.strip()) for clause in bounds.split(",") if clause.strip())


def _holds(installed: str, clause: str) -> bool:
    match = _CLAUSE.match(clause)
    if not match:
        return True
    operator, wanted = match.groups()
    if operator in ("==", "!=") and wanted.endswith(".*"):
        return _starts_with(installed, wanted[:-2]) is (operator == "==")
    if operator == "~=":
        return _key(installed) >= _key(wanted) and _starts_with(installed, wanted.rpartition(".")[0])
    return _COMPARISONS[operator](_key(installed), _key(wanted))


_COMPARISONS: dict[str, Callable[[Key, Key], bool]] = {
    "==": lambda a, b: a == b,
    "===": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _starts_with(installed: str, prefix: str) -> bool:
    release = _key(installed)[0]
    start = tuple(int(part) for part in re.findall(r"\d+", prefix))
    return (release + (0,) * len(start))[: len(start)] == start


def _key(text: str) -> Key:
    """What versions are ordered by: the numbers without zeros at the end, and a pre-release before its release."""
    match = _VERSION.match(text.strip())
    if not match:
        return (), False
    numbers = [int(part) for part in match.group(1).split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), match.group(2) is None
