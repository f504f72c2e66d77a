"""Workers that fail are named by rank, and none outlives the failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradaccum_conformance.workers import Pool, WorkerError
from gradaccum_conformance.workers.messages import Request

COMMAND = (sys.executable, str(Path(__file__).with_name("failing_worker.py")))


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
