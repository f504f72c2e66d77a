"""A second process that runs the same windows, as the other worker of a gloo group.

The first process measures. Before each window it writes one line to the second one's
input, which then runs the same contestant.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

WORKERS = 2
TIMEOUT = datetime.timedelta(seconds=120)
NEXT = "next"

Window = Callable[[], object]


class Built(NamedTuple):
    """One case, as each worker builds it."""

    name: str
    windows: Mapping[str, Window]
    """By contestant."""
    counts: Mapping[str, Mapping[str, float]]


Builder = Callable[[bool], Iterator[Built]]
"""The cases of a question, by whether it is asked quickly. Both workers run it in step.
"""


@contextmanager
def second_worker(
    builder: Builder, quick: bool, prefix: Sequence[str] = ()
) -> Iterator[Callable[[str], None]]:
    """Start it, and join it; gives a function that writes a line to it. `prefix` stands
    before the second worker's command.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [
            *prefix,
            sys.executable,
            "-m",
            "benchmarks.two_workers",
            builder.__module__,
            builder.__name__,
            store,
            str(int(quick)),
        ]
        follower = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, bufsize=1
        )
        assert follower.stdin is not None
        try:
            _join(store, 0)
            yield lambda line: print(line, file=follower.stdin, flush=True)
            follower.stdin.close()
            follower.wait(timeout=60)
        finally:
            follower.kill()
            follower.wait()
            dist.destroy_process_group()


def in_step(built: Iterator[Built], tell: Callable[[str], None]) -> Iterator[Built]:
    """The cases, whose windows tell the second worker."""
    while True:
        tell(NEXT)
        case = next(built, None)
        if case is None:
            return
        yield case._replace(
            windows={
                label: _told(label, window, tell)
                for label, window in case.windows.items()
            }
        )


def _told(label: str, window: Window, tell: Callable[[str], None]) -> Window:
    def run() -> None:
        tell(label)
        window()

    return run


def _join(store: str, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORKERS,
        timeout=TIMEOUT,
    )


def _follow(built: Iterator[Built]) -> None:
    case: Built | None = None
    for line in sys.stdin:
        label = line.rstrip("\n")
        if label == NEXT:
            case = next(built, None)
        elif case is not None:
            case.windows[label]()


if __name__ == "__main__":
    module, name, store, quick = sys.argv[1:]
    _join(store, 1)
    _follow(getattr(import_module(module), name)(bool(int(quick))))
    dist.destroy_process_group()
