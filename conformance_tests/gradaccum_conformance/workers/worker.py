"""One worker: a process that joined the others, and its sessions by number."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from gradaccum.watching import ClosedWindow
from gradaccum_conformance.harness import Session, Setup, WorkersHarness
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.workers.messages import Answered, Raised, Request

ENDED_BY_TEST = 3
"""Exit code of a worker whose test process is gone."""


class Worker:
    """The calls that a test makes. Sessions and snapshots have the same numbers on
    every worker, as all make the same calls.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._sessions: list[Session] = []
        self._snapshots: list[Any] = []
        self._heard: list[ClosedWindow] = []

    @property
    def harness(self) -> WorkersHarness:
        return cast(WorkersHarness, load_harness(self._backend))

    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        self.harness.join(rank, workers, folder, port)

    def start(self, setup: Setup) -> int:
        self._sessions.append(self.harness.start_shared(setup))
        return len(self._sessions) - 1

    def call(self, session: int, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._sessions[session], method)(*arguments, **options)

    def hear(self, session: int) -> bool:
        """False if the optimizer of the session has no listeners."""
        # A listener of an earlier test may still be there, with a list of its own.
        self._heard = []
        return self._sessions[session].listen(self._heard.append)

    def heard(self) -> list[ClosedWindow]:
        """The windows that were heard of since the last call."""
        heard, self._heard[:] = list(self._heard), []
        return heard

    def snapshot(self, session: int) -> int:
        """Only its number travels: a snapshot is the framework's own."""
        self._snapshots.append(self._sessions[session].snapshot())
        return len(self._snapshots) - 1

    def restore(self, session: int, snapshot: int) -> None:
        self._sessions[session].restore(self._snapshots[snapshot])


def serve(worker: Any, connection: Connection) -> None:
    """Answer requests, for ever. The process ends when the test closes the connection
    or is gone, also from inside a collective.
    """
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:
        connection.send(_answer(worker, requests.get()))


def _receive(connection: Connection, requests: queue.SimpleQueue[Request]) -> None:
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(ENDED_BY_TEST)


def _answer(worker: Any, request: Request) -> Answered | Raised:
    time.sleep(request.delay)
    try:
        return Answered(
            getattr(worker, request.method)(*request.arguments, **request.options)
        )
    except Exception as error:
        return Raised(type(error).__name__, str(error), traceback.format_exc())
