"""A worker that fails as it is told: ``python failing_worker.py BACKEND DESCRIPTOR``."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from gradaccum_conformance.workers.worker import serve


class FailingWorker:
    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        pass

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
