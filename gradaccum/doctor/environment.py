"""An environment as the doctor's rules see it: what is installed, what it asks of its packages, and whether each backend imports.

These are plain values, so that a rule can be tested on an environment that nobody has.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gradaccum.registry import BACKENDS, TYPES, DeviceBackend, load

# Imports each backend in a process of its own, which may crash or hang without harm to the others.
#
# An import of a framework can end the process (a library of another version), or wait for a device for ever. So each backend gets a
# process, a time limit, and files in place of pipes: a pipe stays open as long as any process that the framework started, and would be
# waited for.


_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); from gradaccum.doctor.environment import describe; describe(*sys.argv[1:4])"
)
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


# Version numbers and what a package asks of them, read from the metadata that pip wrote.
#
# The bounds themselves stand once, in the metadata: the doctor repeats none of them. The package ``packaging`` would parse them, but need
# not be installed.


_REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_CLAUSE = re.compile(r"^(~=|===?|!=|<=|>=|<|>)\s*(\S+)$")
_EXTRA = re.compile(r"""^\s*extra\s*==\s*['"]([^'"]+)['"]\s*$""")
_VERSION = re.compile(r"^v?(?:\d+!)?(\d+(?:\.\d+)*)[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)?", re.IGNORECASE)

Key = tuple[tuple[int, ...], bool]


class Requirement(NamedTuple):
    """One line of a package's metadata: it needs `package` within `bounds`."""

    package: str
    """The package's name, lower case, with hyphens."""
    bounds: str
    """As in the metadata, such as ``>=1.26,<2``; empty if every version will do."""
    extra: str
    """The extra that asks for it; empty if the package itself does."""


def normalised(name: str) -> str:
    """The name by which an index knows a package: ``ml_dtypes`` is ``ml-dtypes``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(package: str) -> str | None:
    """The version of `package`, or None where no metadata of it is found."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_of(package: str) -> tuple[Requirement, ...]:
    """What `package` asks for on every machine. A requirement with a marker other than an extra is left out: it holds on some machines."""
    try:
        lines = requires(package) or ()
    except PackageNotFoundError:
        return ()
    return tuple(found for line in lines for found in _parse(line))


def _parse(line: str) -> Iterator[Requirement]:
    match = _REQUIREMENT.match(line.strip())
    if not match:
        return
    name, bounds, marker = match.groups()
    extra = _EXTRA.match(marker or "extra == ''") if marker else None
    if marker is None or extra:
        yield Requirement(normalised(name), bounds.strip(), extra.group(1) if extra else "")


def satisfies(installed: str, bounds: str) -> bool:
    """Whether the version `installed` lies within `bounds`. A clause that cannot be read is taken as fulfilled: it accuses nobody."""
    return all(_holds(installed, clause.strip()) for clause in bounds.split(",") if clause.strip())


def _holds(installed: str, clause: str) -> bool:
    match = _CLAUSE.match(clause)
    if not match:
        return True
    operator, wanted = match.groups()
    if operator in ("==", "!=") and wanted.endswith(".*"):
        return _starts_with(installed, wanted[:-2]) is (operator == "==")
    if operator == "~=":
        return _key(installed) >= _key(wanted) and _starts_with(installed, wanted.rpartition(".")[0])
    return _COMPARISONS[operator](_key(installed), _key(wanted))


_COMPARISONS: dict[str, Callable[[Key, Key], bool]] = {
    "==": lambda a, b: a == b,
    "===": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _starts_with(installed: str, prefix: str) -> bool:
    release = _key(installed)[0]
    start = tuple(int(part) for part in re.findall(r"\d+", prefix))
    return (release + (0,) * len(start))[: len(start)] == start


def _key(text: str) -> Key:
    """What versions are ordered by: the numbers without zeros at the end, and a pre-release before its release."""
    match = _VERSION.match(text.strip())
    if not match:
        return (), False
    numbers = [int(part) for part in match.group(1).split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), match.group(2) is None


THIS = "gradaccum"
SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "PYTORCH_CUDA_ALLOC_CONF",
    "GLOG_v",
)
"""Environment variables that change which devices a framework sees, how much of their memory it takes, or what it says."""


class Owner(NamedTuple):
    """One entry point: `package` registers `value` as `name` in `group`."""

    group: str
    name: str
    value: str
    package: str


class Environment(NamedTuple):
    """All that the doctor looks at."""

    python: str
    system: str
    settings: dict[str, str]
    """Those of `SETTINGS` that are set."""
    running: str
    """The version of the code that runs."""
    versions: dict[str, str]
    """Installed versions by normalised name, of this package, of what it asks for and of what that asks for."""
    requirements: dict[str, tuple[Requirement, ...]]
    """What each of those asks for."""
    twice: dict[str, tuple[str, ...]]
    """Packages with several versions in one folder: an installation that was broken off."""
    owners: tuple[Owner, ...]
    """Who registers backends, and the packages that they wrap."""
    probes: tuple[Probe, ...]


def examine(backends: Iterable[str] | None, limit: float) -> Environment:
    """Look at this environment. Only `backends` are imported, all that are registered if None, each for `limit` seconds at most."""
    owners = tuple(_owners())
    names = sorted({one.name for one in owners if one.group == BACKENDS}) if backends is None else list(dict.fromkeys(backends))
    missing = {name: package for name in names for package in _missing(name, owners)}
    probes = {one.backend: one for one in probe([name for name in names if name not in missing], limit)}
    probes |= {name: Probe(name, "missing", (), package, 0.0) for name, package in missing.items()}
    packages = _packages()
    requirements = {package: asked for package in packages if (asked := requirements_of(package))}
    versions = {package: found for package in packages if (found := installed_version(package))}
    return Environment(
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        settings={name: os.environ[name] for name in SETTINGS if name in os.environ},
        running=import_module("gradaccum").__version__,
        versions=versions,
        requirements=requirements,
        twice=_installed_twice(versions),
        owners=owners,
        probes=tuple(probes[name] for name in names),
    )


def _owners() -> Iterator[Owner]:
    """Every entry point once, although a folder may stand on the path twice."""
    for group in (BACKENDS, TYPES):
        for entry in entry_points(group=group):
            yield Owner(group, entry.name, entry.value, entry.dist.name if entry.dist else "")


def _missing(name: str, owners: Iterable[Owner]) -> Iterator[str]:
    """The packages that the backend called `name` wraps and that are not installed. Imports none."""
    values = {one.value for one in owners if one.group == BACKENDS and one.name == name}
    for one in owners:
        if one.group == TYPES and one.value in values and not _can_be_found(one.name):
            yield one.name


def _can_be_found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module without a spec, or None in sys.modules
        return False


def _packages() -> list[str]:
    """Names: gradaccum, what its extras ask for, what those ask for by themselves."""
    direct = [one.package for one in requirements_of(THIS)]
    indirect = [one.package for package in direct for one in requirements_of(package) if not one.extra]
    return list(dict.fromkeys([THIS, *direct, *indirect]))


def _installed_twice(packages: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of `packages`, those with several versions in one folder."""
    wanted, found = set(packages), dict[tuple[str, str], set[str]]()
    for one in distributions():
        name = normalised(one.metadata["Name"] or "")
        if name in wanted:
            found.setdefault((name, str(one.locate_file(""))), set()).add(one.version)
    return {name: tuple(sorted(versions)) for (name, _), versions in found.items() if len(versions) > 1}
