"""The processes of the suite's workers: as msrun starts them, but one by one, each by
the call that the suite makes in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.communication import init

from gradaccum_conformance import Setup, WorkersHarness
from gradaccum_harnesses.mindspore.session import MindSporeHarness, MindSporeSession

HOST = "127.0.0.1"
SECONDS = "120"
"""For one reduction. A worker waits while another one compiles, on a busy machine for
longer than MindSpore's 30.
"""
SCHEDULER = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
from mindspore.communication import init
init()
"""
"""The process at which the workers meet. It ends as soon as its standard input does."""
_held: list[subprocess.Popen[bytes]] = []
"""The open end of the scheduler's standard input, which closes with this process."""

_kept: list[nn.Cell] = []
"""MindSpore takes a new cell for an old one whose address it has."""


class MindSporeWorkers(MindSporeHarness, WorkersHarness):
    """The harness, with processes that `join`."""

    worker_modes = MindSporeHarness.modes

    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        meeting = {
            "MS_WORKER_NUM": str(workers),
            "MS_SCHED_HOST": HOST,
            "MS_SCHED_PORT": str(port),
            "MS_CPU_COMM_OP_TIMEOUT": SECONDS,
        }
        if rank == 0:
            environment = {**os.environ, **meeting, "MS_ROLE": "MS_SCHED"}
            _held.append(
                subprocess.Popen(
                    [sys.executable, "-c", SCHEDULER],
                    stdin=subprocess.PIPE,
                    env=environment,
                )
            )
        os.environ.update(meeting, MS_ROLE="MS_WORKER", MS_NODE_ID=str(rank))
        ms.set_context(device_target="CPU")
        init()

    def start_shared(self, setup: Setup) -> MindSporeSession:
        return self.start(
            setup._replace(options={**(setup.options or {}), "data_parallel": True})
        )
