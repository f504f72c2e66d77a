"""One worker's process, started by `Pool`: ``python -m gradaccum_conformance.workers
BACKEND DESCRIPTOR``.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from multiprocessing.connection import Connection

from gradaccum_conformance.workers.worker import Worker, serve


def main(backend: str, descriptor: int) -> None:
    """Serve the test at the other end of an open socket. SIGUSR1 writes every thread's
    stack to the log.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    serve(Worker(backend), Connection(descriptor))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
