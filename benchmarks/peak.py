"""Memory that one run needs at its worst moment: what autograd keeps, or what a process
of its own grows by.

``python -m benchmarks.peak QUESTION CONTESTANT SIZE...`` prints the bytes by which one
run of ``QUESTION.window(CONTESTANT, SIZE...)`` raises the process's resident memory. A
process that ran something before keeps freed memory, and the next run would seem to
need less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SECONDS = 300
GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""For glibc: what is freed goes back to the system, so that the peak is what lives at
once and not what the heap has kept.
"""


def saved_bytes(run: Callable[[], object], beside: Iterable[Tensor] = ()) -> int:
    """The most bytes that autograd keeps for the backward pass at once: each storage
    counts once, those `beside` (parameters) do not.
    """
    import torch

    own = {tensor.untyped_storage().data_ptr() for tensor in beside}
    kept: dict[int, Tensor] = {}
    peak = 0

    class Kept:
        """A saved tensor. Autograd drops it when the backward pass has used it."""

        def __init__(self, tensor: Tensor) -> None:
            nonlocal peak
            self.tensor = kept[id(self)] = tensor
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in kept.values()
            }
            peak = max(
                peak, sum(size for place, size in storages.items() if place not in own)
            )

        def __del__(self) -> None:
            del kept[id(self)]

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda own: own.tensor):
        run()
    return peak


def live_bytes(run: Callable[[], object], own: Sequence[Tensor]) -> tuple[int, int]:
    """The most bytes of tensors beside `own` that live at once in `run`, and of these
    the most that are in ``.grad`` of `own`.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    alive, most = dict[int, int](), [0, 0]

    class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if (
                    isinstance(tensor, torch.Tensor)
                    and (place := (storage := tensor.untyped_storage())._cdata)
                    not in alive
                ):
                    alive[place] = storage.nbytes()
                    weakref.finalize(storage, alive.pop, place, None).atexit = False
            gradients = {
                each.grad.untyped_storage()._cdata
                for each in own
                if each.grad is not None
            }
            most[:] = (
                max(most[0], sum(alive.values())),
                max(most[1], sum(alive.get(place, 0) for place in gradients)),
            )
            return out

    # An update writes into them: they are not made anew.
    known = [each.untyped_storage() for each in own]
    alive.update((storage._cdata, 0) for storage in known)
    with Live():  # type: ignore[no-untyped-call]
        run()
    return most[0], most[1]


def peak_bytes(question: str, contestant: str, *sizes: int) -> int:
    """What one run of a contestant needs beside what is there before it, in a process
    of its own.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.peak",
        question,
        contestant,
        *map(str, sizes),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
        env={**os.environ, **GIVE_BACK},
    )
    return int(done.stdout.split()[-1])


def _main(question: str, contestant: str, *sizes: str) -> None:
    run = import_module(f"benchmarks.questions.{question}").window(
        contestant, *map(int, sizes)
    )
    CLEAR.write_text("5", encoding="utf-8")  # Linux: the peak begins anew.
    before = _kilobytes("VmRSS")
    run()
    print(1024 * (_kilobytes("VmHWM") - before))


def _kilobytes(field: str) -> int:
    line = next(
        line
        for line in STATUS.read_text(encoding="utf-8").splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1])


if __name__ == "__main__":
    _main(*sys.argv[1:])
