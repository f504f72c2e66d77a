"""On what a measurement was made."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "gradaccum",
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "mindspore",
    "numpy",
    "accelerate",
    "lightning-fabric",
    "keras",
)


def machine() -> dict[str, str]:
    """Processor, cores, memory, GPU if there is one, system, date and versions, as
    texts.
    """
    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "memory": (
            f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
        ),
        "system": (
            f"{platform.system()} {platform.machine()}, Python"
            f" {platform.python_version()}"
        ),
        "date": datetime.now(UTC).date().isoformat(),
    }
    found |= {"gpu": gpu} if (gpu := _gpu()) else {}
    return found | {
        package: installed for package in PACKAGES if (installed := version_of(package))
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        ),
        platform.processor() or "unknown",
    )


def _gpu() -> str | None:
    """The names of all GPUs that NVIDIA's driver knows, with its version."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        " and ".join(done.stdout.split("\n")).removesuffix(" and ")
        if done.returncode == 0
        else None
    )


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
