"""Memory that one run needs at its worst moment: what autograd keeps, or what a process of its own grows by.

``python -m benchmarks.peak QUESTION CONTESTANT SIZE...`` prints the bytes by which one run of ``QUESTION.window(CONTESTANT, SIZE...)``
raises the process's resident memory. A process that ran something before keeps freed memory, and the next run would seem to need less.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SECONDS = 300
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""For glibc: what is freed goes back to the system, so that the peak is what lives at once and not what the heap has kept."""


def saved_bytes(run: Callable[[], object], beside: Iterable[Tensor] = ()) -> int:
    """The most bytes that autograd keeps for the backward pass at once: each storage counts once, those `beside` (parameters) do not."""
    import torch

    own = {tensor.untyped_storage().data_ptr() for tensor in beside}
    kept: dict[int, Tensor] = {}
    peak = 0

    class Kept:
        """A saved tensor. Autograd drops it when the backward pass has used it."""

        def __init__(self, tensor: Tensor) -> None:
            nonlocal peak
            self.tensor = kept[id(self)] = tensor
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.values()}
            peak = max(peak, sum(size for place, size in storages.items() if place not in own))

        def __del__(self) -> None:
            del kept[id(self)]

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda own: own.tensor):
        run()
    return peak


def peak_bytes(question: str, contestant: str, *sizes: int) -> int:
    """What one run of a contestant needs beside what is there before it, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peak", question, contestant, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS, env={**os.environ, **GIVE_BACK})
    return int(done.stdout.split()[-1])


def _main(question: str, contestant: str, *sizes: str) -> None:
    run = import_module(f"benchmarks.questions.{question}").window(contestant, *map(int, sizes))
    CLEAR.write_text("5", encoding="utf-8")  # Linux: the peak begins anew.
    before = _kilobytes("VmRSS")
    run()
    print(1024 * (_kilobytes("VmHWM") - before))


def _kilobytes(field: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(field))
    return int(line.split()[1])


if __name__ == "__main__":
    _main(*sys.argv[1:])
