"""Starts a script in several processes under msrun. None of them outlives the call."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_workers(
    script: Path,
    folder: Path,
    *arguments: str,
    seconds: int,
    for_one_reduction: int = 120,
    workers: int = 2,
) -> int | None:
    """Run `script` in `folder`, where the workers' logs are then; returns msrun's exit
    status, None if the time was up.

    A worker waits while another one compiles, on a busy machine for longer than
    MindSpore's 30 seconds for one reduction.
    """
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run"),
        f"--worker_num={workers}",
        f"--local_worker_num={workers}",
        "--join=True",
        f"--master_port={free_port()}",
        f"--log_dir={folder}",
        str(script),
        *arguments,
    ]
    with (folder / "msrun.log").open("w") as log:
        running = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(for_one_reduction),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return running.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(running)


def environment(for_one_reduction: int) -> dict[str, str]:
    return {
        **os.environ,
        "MS_CPU_COMM_OP_TIMEOUT": str(for_one_reduction),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        ),
    }


def end(msrun: subprocess.Popen[bytes]) -> None:
    """Each worker is in a process group of its own: msrun ends them when it is
    interrupted.
    """
    if msrun.poll() is None:
        msrun.send_signal(signal.SIGINT)
        try:
            msrun.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(msrun.pid, signal.SIGKILL)
            msrun.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
