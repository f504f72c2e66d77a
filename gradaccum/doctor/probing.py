"""Imports each backend in a process of its own, which may crash or hang without harm to the others.

An import of a framework can end the process (a library of another version), or wait for a device for ever. So each backend gets a process,
a time limit, and files in place of pipes: a pipe stays open as long as any process that the framework started, and would be waited for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from gradaccum.registry import BACKENDS, DeviceBackend, load

_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[4]); from gradaccum.doctor.probing import describe; describe(*sys.argv[1:4])"
_GRACE = 10
_LAST_WORDS = 400


class Probe(NamedTuple):
    """What became of the import of one backend."""

    backend: str
    outcome: str
    """``"works"``, ``"fails"`` (it raised), ``"crashes"`` (its process ended), ``"hangs"`` (past the time limit) or ``"missing"``."""
    devices: tuple[str, ...]
    """The devices that its framework sees, as it calls them."""
    detail: str
    """The error, or the process's last words; empty if it works."""
    seconds: float
    """How long the import took."""
    lacking: tuple[tuple[str, str], ...] = ()
    """Private names that the backend uses where its framework has them, and what this framework's user loses without each."""


class _Child(NamedTuple):
    backend: str
    process: subprocess.Popen[bytes]
    said: Path
    result: Path
    started: float


def probe(backends: Sequence[str], limit: float) -> tuple[Probe, ...]:
    """Import every one of `backends`, all at once, each for `limit` seconds at most. No process of theirs is left."""
    with tempfile.TemporaryDirectory(prefix="gradaccum-doctor-", ignore_cleanup_errors=True) as folder, _ended() as children:
        for name in backends:
            children.append(_start(name, Path(folder), limit))
        return tuple(_wait(child, limit) for child in children)


@contextmanager
def _ended() -> Iterator[list[_Child]]:
    """A list of children that have ended after the block, however it ends."""
    children: list[_Child] = []
    try:
        yield children
    finally:
        for child in children:
            if child.process.returncode is None:
                _kill(child.process)


def _start(name: str, folder: Path, limit: float) -> _Child:
    """The child runs in an empty folder, into which a framework may write; so the places to import from are given in full."""
    said, result = folder / f"{name}.txt", folder / f"{name}.json"
    places = json.dumps([os.path.abspath(place) for place in sys.path])
    command = [sys.executable, "-c", _CHILD, name, str(result), str(limit), places]
    with said.open("wb") as stream:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, cwd=folder, start_new_session=True)
    return _Child(name, process, said, result, time.monotonic())


def _wait(child: _Child, limit: float) -> Probe:
    hung = False
    try:
        child.process.wait(max(0.0, child.started + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        hung = True
    _kill(child.process)
    return _judge(child, hung=hung)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and all that it started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _judge(child: _Child, *, hung: bool) -> Probe:
    found = _read(child.result)
    words = child.said.read_text(encoding="utf-8", errors="replace").strip()[-_LAST_WORDS:]
    seconds = float(found.get("seconds", time.monotonic() - child.started))
    if "devices" in found:
        return Probe(child.backend, "works", tuple(found["devices"]), "", seconds, tuple(map(tuple, found["lacking"])))
    if "error" in found:
        return Probe(child.backend, "fails", (), found["error"], seconds)
    stage = "it is imported, and was asked for its devices" if found else "it was being imported"
    if hung:
        return Probe(child.backend, "hangs", (), _joined(stage, words), seconds)
    return Probe(child.backend, "crashes", (), _joined(f"exit code {child.process.returncode} while {stage}", words), seconds)


def _joined(stage: str, words: str) -> str:
    return f"{stage}. Its last words: {words}" if words else stage


def _read(result: Path) -> dict[str, Any]:
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe(name: str, result: str, limit: str) -> None:
    """In the child: import the backend called `name`, and write what came of it into the file `result`, after each stage.

    The alarm ends the child some seconds after `limit` if the doctor itself was killed and can no longer do so.
    """
    if hasattr(signal, "alarm"):
        signal.alarm(int(float(limit)) + _GRACE)
    started = time.monotonic()
    try:
        backend = load(BACKENDS, name)
        seconds = time.monotonic() - started
        _write(result, {"imported": True, "seconds": seconds})
        _write(
            result, {"devices": list(_devices(backend)), "lacking": list(getattr(backend, "lacking", dict)().items()), "seconds": seconds}
        )
    except Exception as error:
        causes = _chain(error)
        text = " Caused by: ".join("".join(traceback.format_exception_only(type(one), one)).strip() for one in causes)
        _write(result, {"error": text[:2000], "seconds": time.monotonic() - started})


def _devices(backend: object) -> Iterable[str]:
    return map(str, backend.devices()) if isinstance(backend, DeviceBackend) else ()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _write(result: str, found: dict[str, Any]) -> None:
    """In one move: a process that is ended in the middle leaves what stood there before."""
    unfinished = Path(f"{result}.unfinished")
    unfinished.write_text(json.dumps(found), encoding="utf-8")
    unfinished.replace(result)
