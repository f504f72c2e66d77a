"""MindSpore: a window over two workers, GRAPH_MODE, as it grows: its time, and what the
workers send each other.

The framework's own idiom reduces every micro-batch. gradaccum reduces a few numbers and
the sums once per window, so what a window sends stays the same however many
micro-batches it has.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.contestants import mindspore_workers
from benchmarks.contestants.mindspore_workers import OURS, THEIRS

WORKERS = 2
WINDOWS = (1, 4, 16)
QUICK_WINDOWS = (4,)


def cases(quick: bool) -> Iterator[Case]:
    with workers() as connections:
        for steps in QUICK_WINDOWS if quick else WINDOWS:
            counts = {
                label: ask(connections, (label, steps)) for label in (THEIRS, OURS)
            }
            contestants = {label: window_of(connections, label) for label in counts}
            yield Case(f"windows of {steps}", THEIRS, contestants, counts, x=steps)


def window_of(connections: Sequence[Connection], label: str) -> Callable[[], object]:
    return lambda: ask(connections, label)


def ask(connections: Sequence[Connection], message: Any) -> Any:
    """Send `message` to all workers and wait for all; returns the first one's
    answer.
    """
    for connection in connections:
        connection.send(message)
    first, *_ = [connection.recv() for connection in connections]
    return first


@contextmanager
def workers() -> Iterator[list[Connection]]:
    """The connections to the processes that msrun started, by rank; none of them
    outlives it.
    """
    with Listener(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as logs:
        host, port = listener.address
        command = [
            sys.executable,
            "-m",
            "mindspore.parallel.cluster.run",
            f"--worker_num={WORKERS}",
            f"--local_worker_num={WORKERS}",
        ]
        command += [
            "--join=True",
            f"--master_port={_free_port()}",
            f"--log_dir={logs}",
            mindspore_workers.__file__,
            host,
            str(port),
        ]
        path = {
            "PATH": os.pathsep.join(
                [str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": os.pathsep.join(
                filter(
                    None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
                )
            ),
        }
        running = subprocess.Popen(
            command,
            env=os.environ | path,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            ranked = {
                connection.recv(): connection
                for connection in [listener.accept() for _ in range(WORKERS)]
            }
            yield [ranked[rank] for rank in sorted(ranked)]
            for connection in ranked.values():
                connection.send(None)
            running.wait(timeout=60)
        finally:
            if running.poll() is None:
                # Then msrun ends the workers, each of which is in a process group of
                # its own.
                running.send_signal(signal.SIGINT)
                running.wait(timeout=60)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
