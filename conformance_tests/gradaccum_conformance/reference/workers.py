"""Workers that share a window, one per process: each can ask for what all of them hold.

They meet at a socket in a folder. The first one receives a value from each and sends
the whole list to all, so that every worker computes the same from the same values in
the same order.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from gradaccum import UsageError

TIMEOUT_SECONDS = 60.0

_links: list[Connection] = []
"""Of this process: the first worker's to each other, another's to the first. They stay
out of copies and files of a `Workers`.
"""


class Workers(NamedTuple):
    """One worker among others, as a window of it sees them."""

    rank: int
    workers: int

    def gather(self, value: Any) -> list[Any]:
        """The value of every worker, by rank; collective.

        Raises:
            UsageError: a worker did not come within 60 seconds, or is gone.
        """
        if self.rank > 0:
            _links[0].send(value)
            everything: list[Any] = _receive(_links[0], self.rank)
            return everything
        everything = [value, *(_receive(link, self.rank) for link in _links)]
        for link in _links:
            link.send(everything)
        return everything


def meet(rank: int, workers: int, folder: Path) -> Workers:
    """Wait for the others, who share `folder`, and connect."""
    address = str(folder / "first")
    if rank > 0:
        _links.append(_connect(address))
        _links[0].send(rank)
    else:
        with Listener(address, backlog=workers) as listener:
            arrived = [listener.accept() for _ in range(workers - 1)]
        _links.extend(sorted(arrived, key=lambda link: int(link.recv())))
    return Workers(rank, workers)


def _connect(address: str) -> Connection:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            return Client(address)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def _receive(link: Connection, rank: int) -> Any:
    try:
        if link.poll(TIMEOUT_SECONDS):
            return link.recv()
        found = f"a worker that did not do so within {TIMEOUT_SECONDS:g} seconds"
    except (EOFError, OSError):
        found = "a worker that is gone"
    expected = "every worker to end its window at the same point"
    fix = "When a worker has no more data, call flush() on it."
    raise UsageError(
        f"the end of a window on rank {rank}: expected {expected}; got {found}. {fix}"
    )
