"""One JSON object per closed window, one per line: for pandas, jq, a spreadsheet, or the next program."""

from __future__ import annotations

import json
import math
import os
from types import TracebackType
from typing import IO

from gradaccum.errors import ArgumentTypeError, explain
from gradaccum.watching.window import ClosedWindow


class JsonLines:
    """Writes each window as a line ``{"optimizer_step": 17, "applied": true, ...}`` with the fields of a `ClosedWindow`.

    Every line is valid JSON: inf and NaN, which JSON has not, are written as null, as JavaScript's ``JSON.stringify`` does; ``overflow``
    tells why. Each line is flushed, so a killed run loses none. A path is appended to, so a resumed run goes on in its file. The windows
    after the last checkpoint are closed again and stand there twice, and the later line counts. If a crash has broken off the last line,
    that line is ended first, so that only it is lost.

    Args:
        target: a path, or a text file that is open for writing, which stays the caller's to close.

    Raises:
        ArgumentTypeError: `target` is neither.
        OSError: the path cannot be written.
    """

    def __init__(self, target: str | os.PathLike[str] | IO[str]) -> None:
        self._own = isinstance(target, (str, os.PathLike))
        if isinstance(target, (str, os.PathLike)):
            broken_off = _ends_in_mid_line(target)
            self._file: IO[str] = open(target, "a", encoding="utf-8")  # noqa: SIM115 - it lives as long as the listener
            self._file.write("\n" if broken_off else "")
        elif callable(getattr(target, "write", None)):
            self._file = target
        else:
            raise explain(
                ArgumentTypeError, "target", expected="a path or an open text file", got=target, fix='Write JsonLines("run.jsonl").'
            )

    def __call__(self, window: ClosedWindow) -> None:
        """Write one line."""
        self._file.write(json.dumps({name: _writable(value) for name, value in window._asdict().items()}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file, if this opened it."""
        if self._own:
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _writable(value: float) -> float | None:
    """`value`; None, JSON's null, for one that JSON cannot write."""
    return value if math.isfinite(value) else None


def _ends_in_mid_line(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file, and its last line has no end."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # No file, or an empty one.
        return False
