"""Checks, their outcomes, and the lines of JSON in which these are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PASS = "pass"
FAIL = "FAIL"
FIGURE = "figure"
"""It has no bound: it neither passes nor fails."""
NEEDS_GPU = "needs a GPU"
NOT_INSTALLED = "not installed"
ERROR = "ERROR"
BEGUN = "not finished"
"""The check had begun when its process was ended."""
BAD = (FAIL, ERROR, BEGUN)


class Setting(NamedTuple):
    """Where and how large the checks of a stage are."""

    device: str
    """``"cuda"`` or ``"cpu"``."""
    is_small: bool
    deadline: float = float("inf")
    """Of the stage, by `time.monotonic`."""

    def size(self, small: int, large: int) -> int:
        return small if self.is_small else large

    def seconds(self, share: float, small: float = 0.5) -> float:
        """Return the seconds that a measurement may take: a `share` of what is left of
        the stage's time.
        """
        if self.is_small:
            return small
        return max(1.0, share * (self.deadline - time.monotonic()))


class Measured(NamedTuple):
    """The outcome of a check."""

    passed: bool | None
    """None: a figure without a bound."""
    measured: str
    bound: str = ""
    bare: str = ""
    """The same of the loop without gradaccum."""
    accelerate: str = ""


class Check(NamedTuple):
    """One line of the table."""

    name: str
    measure: Callable[[Setting], Measured]
    needs_gpu: bool = False
    packages: tuple[str, ...] = ()
    """Packages without which it cannot run."""


class Record(NamedTuple):
    """A check with its outcome, as it is kept."""

    stage: str
    check: str
    status: str
    measured: str = ""
    bound: str = ""
    bare: str = ""
    accelerate: str = ""
    seconds: float = 0.0


class Run(NamedTuple):
    """One run of the script: the machine, and the records of all stages."""

    machine: Mapping[str, str]
    """With ``device`` and ``size``, in words."""
    records: tuple[Record, ...]

    @property
    def is_on_gpu(self) -> bool:
        return self.machine.get("device") == "cuda"

    def failures(self) -> list[Record]:
        return [record for record in self.records if record.status in BAD]


def run_check(stage: str, check: Check, setting: Setting) -> Record:
    """Return the record of a check; whatever it raises becomes a record too."""
    missing = [name for name in check.packages if not is_installed(name)]
    if missing:
        return Record(stage, check.name, NOT_INSTALLED, ", ".join(missing))
    if check.needs_gpu and setting.device != "cuda":
        return Record(stage, check.name, NEEDS_GPU)
    begin = time.perf_counter()
    try:
        measured = check.measure(setting)
    except Exception as error:
        seconds = time.perf_counter() - begin
        return Record(stage, check.name, ERROR, shown(error), seconds=seconds)
    seconds = time.perf_counter() - begin
    if measured.passed is None:
        status = FIGURE
    else:
        status = PASS if measured.passed else FAIL
    return Record(stage, check.name, status, *measured[1:], seconds=round(seconds, 2))


def is_installed(package: str) -> bool:
    """True if a package, or a module of one such as ``lightning.fabric``, is found."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def shown(error: BaseException) -> str:
    """Return an error in one line of at most 200 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def mebibytes(number: float) -> str:
    """Return a number of MiB in words, with two digits after the point if it is
    small.
    """
    return f"{number:,.0f} MiB" if number >= 100 else f"{number:.2f} MiB"


# The file: a line for the machine, then a line per record.


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Write one line at once, so that a process that is ended later leaves it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read(path: Path) -> Run:
    """Return the last run in a file of results.

    A check that had begun, and has no other record, was ended in its midst.

    Raises:
        ValueError: the file holds no run, or a line of it is no JSON.
    """
    machine: Mapping[str, str] | None = None
    records: dict[tuple[str, str], Record] = {}
    for line in _lines(path):
        if "machine" in line:
            machine = line["machine"]
            records = {}
        else:
            record = Record(**line)
            records[record.stage, record.check] = record
    if machine is None:
        raise ValueError(
            f"{path}: expected a line that names the machine; found none. Pass a file"
            " that python -m benchmarks.gpu has written."
        )
    return Run(machine, tuple(records.values()))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        if text.strip():
            yield json.loads(text)
