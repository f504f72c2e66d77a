"""A worker that fails as it is told. It holds a lock for as long as it lives:
``python failing_worker.py BACKEND DESCRIPTOR``.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from gradaccum_conformance.workers.worker import serve


class FailingWorker:
    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        self.lock = (folder / f"alive-{rank}").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def work(self) -> str:
        return "done"

    def give_up(self) -> None:
        raise ValueError("no more")

    def die(self) -> None:
        print("last words", flush=True)
        os._exit(7)

    def hang(self) -> None:
        time.sleep(600)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    serve(FailingWorker(), Connection(int(sys.argv[2])))
