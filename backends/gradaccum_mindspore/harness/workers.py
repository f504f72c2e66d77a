"""The processes of the suite's workers: as msrun starts them, but one by one, each by the call that the suite makes in it."""

from __future__ import annotations

import os
import subprocess
import sys

import mindspore as ms
from mindspore.communication import init

HOST = "127.0.0.1"
SECONDS = "120"
"""For one reduction. A worker waits while another one compiles, on a busy machine for longer than MindSpore's 30."""
SCHEDULER = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
from mindspore.communication import init
init()
"""
"""The process at which the workers meet. It ends as soon as its standard input does."""
_held: list[subprocess.Popen[bytes]] = []
"""The open end of the scheduler's standard input: it closes when this process ends, however that is."""


def join(rank: int, workers: int, port: int) -> None:
    """Become worker number `rank` of those that meet at `port`; the first starts the scheduler."""
    meeting = {"MS_WORKER_NUM": str(workers), "MS_SCHED_HOST": HOST, "MS_SCHED_PORT": str(port), "MS_CPU_COMM_OP_TIMEOUT": SECONDS}
    if rank == 0:
        environment = {**os.environ, **meeting, "MS_ROLE": "MS_SCHED"}
        _held.append(subprocess.Popen([sys.executable, "-c", SCHEDULER], stdin=subprocess.PIPE, env=environment))
    os.environ.update(meeting, MS_ROLE="MS_WORKER", MS_NODE_ID=str(rank))
    ms.set_context(device_target="CPU")
    init()
