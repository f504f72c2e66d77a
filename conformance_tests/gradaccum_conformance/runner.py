"""Runs one process per backend and reads each one's results file, line by line, while
it grows.

Frameworks disturb each other in one process (thread pools, memory, signal handlers).
And a crash of one must leave the results of the others whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]
"""One line of a results file: a JSON object with at least ``kind``."""

OnRecord = Callable[[str, Record], None]
"""Called with the backend's name and each new record, in the order written."""

POLL_SECONDS = 0.1
LOG_LINES = 15
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""The user's own setting goes first. The models are tiny: threads that wait for each
other cost several times what they bring.
"""


class Job(NamedTuple):
    """A command to run for one backend."""

    backend: str
    command: tuple[str, ...]
    results: Path
    """The JSON-lines file that the command writes. Its printed output goes to a file
    beside it, with the suffix ``.log``.
    """

    @property
    def log(self) -> Path:
        return self.results.with_suffix(".log")


class Ended(NamedTuple):
    """The outcome of a job."""

    backend: str
    exit_code: int
    records: tuple[Record, ...]
    log_tail: str
    """The last lines of its printed output, to show after a failure."""


def run_jobs(
    jobs: Sequence[Job], on_record: OnRecord, *, at_once: int = 1
) -> list[Ended]:
    """Run every job, at most `at_once` at a time, and return the outcomes in the order
    of `jobs`.

    An interrupt ends the running processes too.
    """
    waiting = list(jobs)
    running = list[_Running]()
    ended = dict[str, Ended]()
    try:
        while waiting or running:
            running += [
                _Running(waiting.pop(0))
                for _ in range(min(at_once - len(running), len(waiting)))
            ]
            for process in tuple(running):
                if process.follow(on_record):
                    ended[process.job.backend] = process.end()
                    running.remove(process)
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for process in running:
            process.stop()
    return [ended[job.backend] for job in jobs]


class _Running:
    """A job's process, and the position up to which its results file has been read."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.records: list[Record] = []
        self._read = 0
        job.results.parent.mkdir(parents=True, exist_ok=True)
        job.results.write_bytes(b"")
        with job.log.open("wb") as log:
            self._process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**ONE_THREAD, **os.environ},
            )

    def follow(self, on_record: OnRecord) -> bool:
        """Pass on the records written since the last call. True once the process has
        ended and its last record is passed on.
        """
        over = self._process.poll() is not None
        for record in self._new_records():
            self.records.append(record)
            on_record(self.job.backend, record)
        return over

    def end(self) -> Ended:
        lines = self.job.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return Ended(
            self.job.backend,
            self._process.wait(),
            tuple(self.records),
            "\n".join(lines[-LOG_LINES:]),
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _new_records(self) -> list[Record]:
        with self.job.results.open("rb") as file:
            file.seek(self._read)
            written = file.read()
        whole_lines = written[: written.rfind(b"\n") + 1]
        self._read += len(whole_lines)
        return [_parse(line) for line in whole_lines.splitlines() if line.strip()]


def _parse(line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    return (
        record
        if isinstance(record, dict) and "kind" in record
        else {"kind": "unreadable", "line": line.decode(errors="replace")}
    )
