"""A worker's process, as the test holds it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path

from gradaccum_conformance.runner import LOG_LINES, ONE_THREAD
from gradaccum_conformance.workers.messages import Answer, Lost

EXIT_SECONDS = 5.0
STACK_SECONDS = 5.0
POLL_SECONDS = 0.05


class Process:
    """A command with a connection to it. It and all that it started end with `stop`,
    and by themselves if this process dies.

    Args:
        command: the program; the number of its open descriptor is added at the end.
        log: the file for everything that it prints.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        self.connection, theirs = Pipe()
        with theirs, log.open("wb") as file:
            # A session of its own: Ctrl-C reaches the test only, which ends its
            # workers, and `stop` reaches what a worker started.
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**ONE_THREAD, **os.environ},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self) -> Answer:
        """Its next answer."""
        try:
            answer: Answer = self.connection.recv()
        except (EOFError, OSError):
            return Lost(self._death())
        return answer

    def _death(self) -> str:
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection but did not exit" + self._log_tail()
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        return how + self._log_tail()

    def stuck(self) -> Lost:
        """The failure of one that does not answer, with the stacks of its threads, from
        its log.
        """
        written = self._log.stat().st_size
        deadline = time.monotonic() + STACK_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        while self._log.stat().st_size == written and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)
        return Lost("gave no answer in time" + self._log_tail())

    def stop(self) -> None:
        """Kill it. Called twice, the second call does nothing."""
        self.connection.close()
        if self._process.returncode is None:
            # Before it is reaped its number cannot be another's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _log_tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[
            -2 * LOG_LINES :
        ]
        return "".join(f"\n    | {line}" for line in lines)
