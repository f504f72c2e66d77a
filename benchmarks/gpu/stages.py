"""The stages: their order, their time limits, and their processes.

What would kill trust comes first. A stage is a process of its own, because a failed
capture or an illegal memory access spoils its process for all that follows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.records import (
    BEGUN,
    ERROR,
    NOT_INSTALLED,
    Check,
    Record,
    Setting,
    append,
    is_installed,
    run_check,
)

ROOT = Path(__file__).parents[2]
THE_STAGE = "the stage"
"""In place of a check: what is said of all of them."""
TOTAL_SECONDS = 525.0
"""Of all stages, on a GPU: with its start and the table a run takes less than 540."""


class Stage(NamedTuple):
    """A group of checks in one process."""

    name: str
    """The module in this package."""
    title: str
    seconds: float
    """After which its process is ended in a run of `TOTAL_SECONDS`."""
    packages: tuple[str, ...] = ("torch",)
    """Packages without which none of its checks can run."""


STAGES = (
    Stage("ceilings", "Versions, the GPU and its measured limits", 30),
    Stage("exact", "Exact in float64", 50),
    Stage("graphs", "CUDA graphs", 75),
    Stage("half_precision", "Half precision", 40),
    Stage("waits", "Waits for the device", 25),
    Stage("compiling", "torch.compile", 60),
    Stage("memory", "Peak memory", 40),
    Stage("speed", "Host time and tokens per second", 90),
    Stage("streams", "Streams", 25),
    Stage("jax_windows", "JAX", 55, ("jax", "optax")),
    Stage("workers", "One worker on NCCL, or on gloo", 35),
)


def checks_of(name: str) -> list[Check]:
    """Import a stage, and its framework, and return its checks."""
    return list(import_module(f"benchmarks.gpu.{name}").CHECKS)


def run_here(name: str, setting: Setting, results: Path) -> None:
    """Run the checks of a stage in this process, and append each record at once."""
    (stage,) = (each for each in STAGES if each.name == name)
    missing = [package for package in stage.packages if not is_installed(package)]
    if missing:
        text = ", ".join(missing)
        append(results, Record(name, THE_STAGE, NOT_INSTALLED, text)._asdict())
        return
    for check in checks_of(name):
        append(results, Record(name, check.name, BEGUN)._asdict())
        append(results, run_check(name, check, setting)._asdict())


def run_all(
    stages: Sequence[Stage], setting: Setting, results: Path, total: float
) -> None:
    """Run each stage in a process of its own, within its share of `total` seconds,
    which is the limit for all.
    """
    share = total / TOTAL_SECONDS
    end = time.monotonic() + total
    for stage in stages:
        remaining = end - time.monotonic()
        print(f"{stage.title} ...", flush=True)
        if remaining < 5:
            text = f"no time was left of {total:.0f} s"
            append(results, Record(stage.name, THE_STAGE, BEGUN, text)._asdict())
        else:
            _run_process(stage, setting, results, min(share * stage.seconds, remaining))


def _run_process(stage: Stage, setting: Setting, results: Path, seconds: float) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", stage.name]
    command += ["--device", setting.device, "--results", str(results)]
    command += ["--seconds", f"{seconds:.1f}"]
    if setting.is_small:
        command.append("--small")
    log_path = results.with_name(f"{results.name}.{stage.name}.log")
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(setting.device),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(timeout=seconds)
            problem = "" if exit_code == 0 else f"its process ended with {exit_code}"
        except subprocess.TimeoutExpired:
            problem = f"ended after {seconds:.0f} s"
        finally:
            end_session(process)
    text = log_path.read_text(encoding="utf-8", errors="replace").strip()
    if problem:
        last_line = text.splitlines()[-1][:150] if text else "it printed nothing"
        text = f"{problem}; {last_line}"
        append(results, Record(stage.name, THE_STAGE, ERROR, text)._asdict())
    else:
        log_path.unlink()


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started, such as a compiler's workers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # All of them are gone.
    process.wait()


def environment(device: str) -> dict[str, str]:
    """Return the environment of a stage: JAX takes the memory that it needs; on a CPU
    no framework sees a GPU, and torch has one thread, as other work would stop several.
    """
    variables = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    variables["TOKENIZERS_PARALLELISM"] = "false"
    variables["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables["OMP_NUM_THREADS"] = "1"
        variables["JAX_PLATFORMS"] = "cpu"
    return variables
