"""Run programs one after the other, each in a process of its own that has imported a
framework already.

Importing a framework takes longer than most programs of a page. So one process imports
it, and each program runs in a fork of that one: nothing that a program sets is there
for the next.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 300


class Preloaded:
    """A process with `modules` imported; a context manager.

    Args:
        modules: their names.
        environment: added to that of this process.
    """

    def __init__(self, *modules: str, **environment: str) -> None:
        self.environment = environment
        command = [sys.executable, "-m", __name__, *modules]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # Without a buffer: what stands in one does not show that there is more to read.
        self.server = subprocess.Popen(
            command,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Preloaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.communicate(timeout=SECONDS)

    def run(self, file: Path, seconds: float | None = None) -> tuple[int, str]:
        """Run a program in the folder that it lies in: its exit status, and what it
        said. No process outlives the call.

        It has `seconds`, `SECONDS` unless given; so long may the server take until it
        starts the program.
        """
        assert self.server.stdin is not None
        self.server.stdin.write(f"{file}\n".encode())
        process = self._answer()
        try:
            status = self._answer(seconds)
        except TimeoutError:
            os.killpg(process, signal.SIGKILL)
            self._answer()
            raise
        return status, _output_of(file).read_text("utf-8")

    def _answer(self, seconds: float | None = None) -> int:
        assert self.server.stdout is not None
        seconds = SECONDS if seconds is None else seconds
        if not select.select([self.server.stdout], [], [], seconds)[0]:
            raise TimeoutError(
                f"a program was still running after {seconds:.10g} seconds"
            )
        answer: int = json.loads(self.server.stdout.readline())
        return answer


def _output_of(file: Path) -> Path:
    return file.with_suffix(".said")


def _next_program() -> Path | None:
    """In a fork: the program to run. In the process that forks: None, at the end."""
    for line in sys.stdin:
        file = Path(line.strip())
        process = os.fork()
        if not process:
            return file
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return None


def _run(file: Path) -> Any:
    os.setsid()
    os.chdir(file.parent)
    with (
        _output_of(file).open("w", encoding="utf-8") as said,
        open(os.devnull, encoding="utf-8") as nothing,
    ):
        os.dup2(nothing.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.argv, sys.path[0] = [file.name], str(file.parent)
    return runpy.run_path(file.name, run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # A fork's own collections pass over what was imported.
    if program := _next_program():
        _run(program)
