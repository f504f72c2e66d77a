"""A job of two processes: the list of its checks, the report of each process, and the
start, which leaves none behind.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import gradaccum
from conformance_tests.programs import ROOT

from .common import WORLD

Check = Callable[[int], None]
"""A function of the rank; it raises if the check fails."""
Reports = Callable[[str], list[dict[str, str]]]
"""What each worker of a job said of each check."""
CHECKS = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def run_checks(checks: Mapping[str, Check], rank: int, folder: Path) -> None:
    """Run all of them as worker `rank`; the report goes to
    ``folder / f"{rank}.json"``.
    """
    torch.set_num_threads(1)
    if rank == 0:
        wrap_in_an_earlier_group(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    report = {}
    for name, run in checks.items():
        # Each check draws the same numbers on both workers, whatever ran before it.
        torch.manual_seed(0)
        try:
            run(rank)
            report[name] = "passed"
        except Exception:
            report[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(report), "utf-8")
        if report[name] != "passed":
            # The workers may be at different calls now, and each further check would
            # wait for the other.
            break


def wrap_in_an_earlier_group(folder: Path) -> None:
    """Wrap an optimizer for a process group that is destroyed before the job's own group
    is made. Only one worker does this, so the windows of the job close alike only if
    the earlier group does not count, although torch gives both groups one name.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'earlier_store'}", rank=0, world_size=1
    )
    gradaccum.wrap(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
        steps=2,
        process_group=dist.group.WORLD,
    )
    time.sleep(0.3)  # torch 2.6 may hang while gloo's threads still hold tensors.
    dist.destroy_process_group()


SECONDS = 500
"""A loaded machine took 240 for jobs of two workers that need 60."""


def reports_of(job: str, folder: Path) -> list[dict[str, str]]:
    """Run a job of two workers; return what each said of each check."""
    module = "conformance_tests.framework_tests.torch_workers"
    command = [sys.executable, "-m", module, job]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(WORLD):
            running.append(
                subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT)
            )
        for process in running:
            process.wait(timeout=SECONDS)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [
        json.loads((folder / f"{rank}.json").read_text("utf-8"))
        for rank in range(WORLD)
    ]


def require_passed(name: str, reports: Sequence[Mapping[str, str]]) -> None:
    for rank, report in enumerate(reports):
        assert report.get(name, "not run: a check before it failed") == "passed", (
            f"rank {rank}:\n{report.get(name)}"
        )
