"""The processes of several workers. Every event goes to all before the first answer is
read, as it may be collective.

A worker that raises, dies or does not answer in time is reported by its rank, and the
pool ends: the others may wait for it for ever.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gradaccum_conformance.workers.messages import (
    Answer,
    Answered,
    Lost,
    Raised,
    Request,
)
from gradaccum_conformance.workers.process import Process

WORKER_COMMAND = (sys.executable, "-m", "gradaccum_conformance.workers")
LIMIT_SECONDS = 120.0
"""For one event. Frameworks compile in some, and each engine's own timeout should be
shorter.
"""
GRACE_SECONDS = 3.0
"""For the other workers, once one has failed: their errors are shown too."""
LONGEST_DELAY = 0.003


class WorkerError(Exception):
    """Some worker raised, died or did not answer; the text says which and how."""

    def __init__(self, event: str, failures: Mapping[int, str]) -> None:
        ranks = [f"rank {rank} {failures[rank]}" for rank in sorted(failures)]
        super().__init__("\n".join([f"in {event}:", *ranks]))
        self.failures = dict(failures)
        """What happened, by rank; ranks that answered are left out."""


class Pool:
    """So many processes of one backend, which have joined each other.

    Args:
        backend: its name.
        workers: their number.
        limit: seconds for one event on all workers.
        command: the program of a worker; the backend's name and the number of an open
            socket are its arguments.
    """

    def __init__(
        self,
        backend: str,
        workers: int,
        *,
        limit: float = LIMIT_SECONDS,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self.workers = workers
        self.limit = limit
        self.reseed(0)
        self._folder = Path(tempfile.mkdtemp(prefix="workers-"))
        self._processes: list[Process] = []
        meeting = self._folder / "meeting"
        port = free_port()
        meeting.mkdir()
        try:
            self._processes += (
                Process((*command, backend), self._folder / f"{rank}.log")
                for rank in range(workers)
            )
            self.ask(
                [
                    Request("join", (rank, workers, meeting, port))
                    for rank in range(workers)
                ]
            )
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def closed(self) -> bool:
        return not self._processes

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """What each worker answers to its request, by rank.

        Raises:
            WorkerError: a worker raised, died, or did not answer in time. The pool is
                closed.
        """
        answers = self.exchange(requests)
        failures = {
            rank: failure
            for rank, answer in enumerate(answers)
            if (failure := _failure(answer))
        }
        if failures:
            self.close()
            raise WorkerError(_name(requests[0]), failures)
        return [answer.value for answer in answers if isinstance(answer, Answered)]

    def exchange(self, requests: Sequence[Request]) -> list[Answer]:
        """What each worker answers, or how it failed, by rank. The pool goes on: for
        events that are to fail on every worker.
        """
        try:
            for rank in self._random.sample(range(self.workers), self.workers):
                delay = self._random.choice(
                    (0.0, self._random.uniform(0, LONGEST_DELAY))
                )
                # It is dead, which is seen where its answer is read.
                with contextlib.suppress(OSError):
                    self._processes[rank].connection.send(
                        requests[rank]._replace(delay=delay)
                    )
            return self._answers()
        except BaseException:
            # Answers that nobody read would be taken for those of the next event.
            self.close()
            raise

    def reseed(self, seed: int) -> None:
        """Begin another sequence of the orders in which the workers get an event, and
        of their delays.
        """
        self._random = random.Random(seed)

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.stop()
        self._processes = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> list[Answer]:
        waiting = dict(enumerate(self._processes))
        answers = dict[int, Answer]()
        deadline = time.monotonic() + self.limit
        while waiting and (
            ready := wait(
                [p.connection for p in waiting.values()],
                max(0.0, deadline - time.monotonic()),
            )
        ):
            for rank in [
                rank for rank, process in waiting.items() if process.connection in ready
            ]:
                answers[rank] = waiting.pop(rank).receive()
                if not isinstance(answers[rank], Answered):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [
            answers[rank] if rank in answers else process.stuck()
            for rank, process in enumerate(self._processes)
        ]


def _failure(answer: Answer) -> str | None:
    match answer:
        case Answered():
            return None
        case Raised():
            return f"raised {answer.kind}: {answer.message}\n{answer.traceback}"
        case Lost():
            return answer.why


def _name(request: Request) -> str:
    return str(request.arguments[1]) if request.method == "call" else request.method


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
