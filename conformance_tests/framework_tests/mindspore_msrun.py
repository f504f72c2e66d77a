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


def run_by_hand(
    script: Path,
    folder: Path,
    *arguments: str,
    seconds: int,
    for_one_reduction: int,
    workers: int,
) -> list[int]:
    """Run `script` as workers that no msrun ends when one of them is lost; returns
    their exit statuses, by rank.
    """
    group = {
        **environment(for_one_reduction),
        "MS_WORKER_NUM": str(workers),
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(free_port()),
    }
    running = []
    try:
        for place in range(-1, workers):
            role, rank = ("MS_SCHED", "0") if place < 0 else ("MS_WORKER", str(place))
            with (folder / f"{role.removeprefix('MS_').lower()}_{rank}.log").open(
                "w"
            ) as log:
                process = subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    cwd=folder,
                    env={**group, "MS_ROLE": role, "MS_NODE_ID": rank, "RANK_ID": rank},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            running.append(process)
        return [worker.wait(timeout=seconds) for worker in running[1:]]
    finally:
        for process in running:
            process.kill()
            process.wait()


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
