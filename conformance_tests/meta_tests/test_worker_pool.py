"""Workers that fail are named by rank, and none outlives its test: neither after a
failure nor when the test process is killed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradaccum_conformance.workers import Pool, WorkerError
from gradaccum_conformance.workers.messages import Request

COMMAND = (sys.executable, str(Path(__file__).with_name("failing_worker.py")))
SCRIPT = f"""
from gradaccum_conformance.workers import Pool
from gradaccum_conformance.workers.messages import Request

pool = Pool("none", 2, command={COMMAND!r})
print("joined", flush=True)
pool.ask([Request("hang"), Request("hang")])
"""


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("none", 3, command=COMMAND, limit=60)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("methods", "rank", "words", "detail"),
    [
        (
            ("work", "give_up", "work"),
            1,
            "rank 1 raised ValueError: no more",
            "in give_up",
        ),
        (("work", "work", "die"), 2, "rank 2 exited with code 7", "last words"),
        (("hang", "work", "work"), 0, "rank 0 gave no answer in time", "in hang"),
    ],
)
def test_failed_worker_is_named(
    pool: Pool, methods: tuple[str, ...], rank: int, words: str, detail: str
) -> None:
    """With the worker's traceback, its last words or its stack; no worker lives after
    it.
    """
    pool.limit = 1.5 if "hang" in methods else pool.limit
    pids = pool.pids
    with pytest.raises(WorkerError, match=words) as caught:
        pool.ask([Request(method) for method in methods])
    assert list(caught.value.failures) == [rank]
    assert detail in str(caught.value)
    assert pool.closed
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_killed_test_leaves_no_worker(tmp_path: Path) -> None:
    """Its workers are in the middle of an event then."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"joined\n"
        locks = sorted(tmp_path.glob("workers-*/meeting/alive-*"))
        assert len(locks) == 2
        assert not any(map(is_free, locks))
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while not all(map(is_free, locks)):
        assert time.monotonic() < deadline, "a worker outlived the test process"
        time.sleep(0.02)


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
