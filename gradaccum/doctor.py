"""The ``gradaccum doctor`` command, which looks for what is missing or broken in an
environment.

It needs the standard library only and imports each framework in a child process, since
an import can end its process or hang. Exit codes: 0, nothing is wrong; 1, something is;
2, an argument is wrong.
"""

from __future__ import annotations

import argparse
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
from contextlib import suppress
from importlib import import_module
from importlib.metadata import (
    EntryPoint,
    PackageNotFoundError,
    entry_points,
    requires,
    version,
)
from importlib.util import find_spec
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any, NamedTuple

from gradaccum.registry import BACKENDS, TYPES, DeviceBackend, copied, load

THIS = "gradaccum"
LIMIT = 120.0
"""Seconds for the import of one backend, cold, from a slow disk."""

NEEDED_FOR = {
    "torch": "torch",
    "jax": "jax",
    "mindspore": "mindspore",
    "conformance": "pytest-xdist",
}
"""By extra, the package without which nobody uses it, so that its bounds bind nobody.
"""

REASONS = {
    ("mindspore", "numpy"): (
        "MindSpore 2.10 installs beside numpy 2, but Tensor * np.float32(2), bfloat16"
        " .asnumpy() and its datasets then fail"
    ),
    (
        "mindspore",
        "mindspore",
    ): (
        "the backend is tested with these series only, and MindSpore's compiled code"
        " differs between series"
    ),
    (
        "conformance",
        "pytest",
    ): (
        "pytest-xdist 3.8 does not see groups of tests under pytest 9.2, and starts"
        " each group on every process"
    ),
    (
        "torch",
        "torch",
    ): (
        "the backend uses hooks of autograd and of optimizers that older releases do"
        " not have"
    ),
    (
        "jax",
        "jax",
    ): (
        "the backend uses types of arrays and rules of batching that older releases do"
        " not have"
    ),
    (
        "jax",
        "jaxlib",
    ): (
        "jax calls compiled code of jaxlib, and refuses another version when it is"
        " imported, or fails later"
    ),
}
"""Why a bound stands, where a wrong version does not say so itself, by the one that
asks and the package.
"""

SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "XLA_FLAGS",
)
"""Environment variables that change which devices a framework sees, or its numbers."""


class Requirement(NamedTuple):
    """A package's requirement: `package` within `bounds`, such as ``>=1.26,<2``. Empty
    bounds allow every version.
    """

    package: str
    bounds: str
    extra: str
    """The extra that asks for it; empty if the package itself does."""


class Probe(NamedTuple):
    """The result of importing one backend."""

    backend: str
    outcome: str
    """``"works"``, ``"fails"`` (it raised), ``"crashes"`` (its process ended),
    ``"hangs"`` or ``"missing"``.
    """
    detail: str = ""
    """The error, the process's last words, or the missing package."""
    devices: tuple[str, ...] = ()
    """The devices that its framework sees, as it calls them."""
    lacking: tuple[tuple[str, str], ...] = ()
    """Private names that this framework does not have, and what its user loses without
    each.
    """


class Environment(NamedTuple):
    """Everything that the doctor looks at, as plain values."""

    running: str
    versions: dict[str, str]
    """Installed versions of this package and of what is asked for."""
    requirements: dict[str, tuple[Requirement, ...]]
    """What this package and each framework ask for."""
    probes: tuple[Probe, ...]


class Finding(NamedTuple):
    """A ``"problem"`` (results are wrong or a call fails) or a ``"note"``."""

    kind: str
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.kind.upper()}  {self.where}: {self.what}. {self.fix}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="gradaccum doctor",
        description="Is this environment one in which gradaccum works?",
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=_backends(),
        help="Import this backend only; repeat it for several.",
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=LIMIT,
        help="Seconds for the import of the backends (default: %(default)g).",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args(arguments)
    environment = examine(options.backend or _backends(), options.limit)
    findings = findings_of(environment)
    healthy = all(finding.kind != "problem" for finding in findings)
    if options.json:
        probes, found = (
            [one._asdict() for one in environment.probes],
            [one._asdict() for one in findings],
        )
        print(
            json.dumps(
                {
                    "healthy": healthy,
                    "findings": found,
                    "versions": environment.versions,
                    "probes": probes,
                },
                indent=2,
            )
        )
    else:
        print(report(environment, findings))
    return 0 if healthy else 1


def _backends() -> list[str]:
    return sorted({entry.name for entry in _entries(BACKENDS)})


def _entries(group: str) -> list[EntryPoint]:
    """Return all entry points, also where two owners have one name."""
    return [*entry_points(group=group), *copied(group).values()]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def report(environment: Environment, findings: Sequence[Finding]) -> str:
    lines = [
        f"gradaccum {environment.running} · Python {platform.python_version()}"
        f" ({sys.executable}) · {platform.platform()}"
    ]
    lines += [f"  {name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    direct = dict.fromkeys(one.package for one in environment.requirements[THIS])
    lines += [
        "",
        "Packages",
        *(
            f"  {name} {environment.versions[name]}"
            for name in direct
            if name in environment.versions
        ),
    ]
    lines += [
        "",
        "Backends",
        *(f"  {one.backend}: {_state(one)}" for one in environment.probes),
        "",
    ]
    return "\n".join(
        [*lines, *(map(str, findings) if findings else ["No problem found."])]
    )


def _state(one: Probe) -> str:
    if one.outcome == "missing":
        return (
            f"not installed (it needs {one.detail}). To have it: pip install"
            f" 'gradaccum[{one.backend}]'"
        )
    if one.outcome == "works":
        return f"works; sees {', '.join(one.devices)}" if one.devices else "works"
    return f"{one.outcome}; see below"


# What is installed, as pip's metadata tells it. The bounds stand there alone.


def examine(backends: Iterable[str], limit: float) -> Environment:
    """Inspect this environment and import `backends`, for at most `limit` seconds."""
    missing = {name: package for name in backends for package in _missing(name)}
    probed = probes_of([name for name in backends if name not in missing], limit)
    requirements = {
        package: requirements_of(package)
        for package in (THIS, "torch", "jax", "optax", "mindspore")
    }
    packages = dict.fromkeys(
        [THIS, *(one.package for asked in requirements.values() for one in asked)]
    )
    versions = {
        package: found for package in packages if (found := installed_version(package))
    }
    absent = [Probe(name, "missing", package) for name, package in missing.items()]
    return Environment(
        import_module(THIS).__version__, versions, requirements, (*probed, *absent)
    )


def _missing(name: str) -> Iterator[str]:
    values = {entry.value for entry in _entries(BACKENDS) if entry.name == name}
    for entry in _entries(TYPES):
        with suppress(ValueError):  # A module without a spec, which is there.
            if entry.value in values and find_spec(entry.name) is None:
                yield entry.name


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_of(package: str) -> tuple[Requirement, ...]:
    """Return what `package` requires on every machine; a requirement with a marker
    other than an extra is left out.
    """
    try:
        lines = requires(package) or ()
    except PackageNotFoundError:
        return ()
    return tuple(found for line in lines for found in _parsed(line))


def _parsed(line: str) -> Iterator[Requirement]:
    match = re.fullmatch(
        r"""([\w.-]+)\s*(?:\[.*?\])?\s*\(?([^;)]*)\)?\s*(?:;\s*extra\s*==\s*['"](.+)['"]\s*)?""",
        line.strip(),
    )
    if match:
        yield Requirement(
            re.sub(r"[-_.]+", "-", match[1]).lower(), match[2].strip(), match[3] or ""
        )


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}


def satisfies(installed: str, bounds: str) -> bool:
    """True if `installed` lies within `bounds`. An unreadable clause counts as
    fulfilled.
    """
    clauses = (
        re.fullmatch(r"\s*([=!<>]=?)\s*([\d.]*\d)\s*", clause)
        for clause in bounds.split(",")
    )
    readable = (
        clause.groups() for clause in clauses if clause and clause[1] in _COMPARISONS
    )
    return all(
        _COMPARISONS[operator](_key(installed), _key(bound))
        for operator, bound in readable
    )


def _key(text: str) -> tuple[tuple[int, ...], bool]:
    """Return a sort key: pre-releases stand before their release."""
    release, before = re.match(r"([\d.]*)(?:[-_.]?(a|b|c|rc|dev|pre))?", text).groups()  # type: ignore[union-attr]  # Empty texts match.
    return (
        tuple(
            int(part) for part in re.sub(r"(\.0+)*\.?$", "", release).split(".") if part
        ),
        before is None,
    )


# Imports each backend in a process of its own, in an empty folder, into which a
# framework may write.

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from gradaccum.doctor"
    " import describe; describe(*sys.argv[2:])"
)
_LAST_WORDS = 400


def probes_of(backends: Sequence[str], limit: float) -> list[Probe]:
    """Import all `backends` at once, for at most `limit` seconds, and kill what still
    runs then.
    """
    places = json.dumps([os.path.abspath(place) for place in sys.path])
    children: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(
        prefix="gradaccum-doctor-", ignore_cleanup_errors=True
    ) as folder:
        try:
            for name in backends:
                command = [sys.executable, "-c", _CHILD, places, name, f"{name}.json"]
                # A file: a pipe stays open as long as any process that the framework
                # started, and would be waited for.
                with Path(folder, f"{name}.txt").open("wb") as said:
                    children[name] = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=said,
                        cwd=folder,
                        start_new_session=True,
                    )
            deadline = time.monotonic() + limit
            return [
                _judged(name, child, deadline, Path(folder))
                for name, child in children.items()
            ]
        finally:
            for child in children.values():
                _kill(child)


def _judged(
    name: str, child: subprocess.Popen[bytes], deadline: float, folder: Path
) -> Probe:
    try:
        ended = f"exit code {child.wait(max(0.0, deadline - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        ended = ""
    result = folder / f"{name}.json"
    if result.exists() and ended:
        found = json.loads(result.read_text(encoding="utf-8"))
        return Probe(
            name,
            found["outcome"],
            found["detail"],
            tuple(found["devices"]),
            tuple(map(tuple, found["lacking"])),
        )
    words = (
        (folder / f"{name}.txt")
        .read_text(encoding="utf-8", errors="replace")
        .strip()[-_LAST_WORDS:]
    )
    said = f"Its last words: {words}" if words else "It said nothing"
    return (
        Probe(name, "crashes", f"{ended}. {said}")
        if ended
        else Probe(name, "hangs", said)
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def describe(name: str, result: str) -> None:
    """Import the backend in this child process and write the outcome into the file
    `result`.
    """
    found: dict[str, Any] = {
        "outcome": "works",
        "detail": "",
        "devices": [],
        "lacking": [],
    }
    try:
        backend = load(BACKENDS, name)
        found["devices"] = (
            list(map(str, backend.devices()))
            if isinstance(backend, DeviceBackend)
            else []
        )
        found["lacking"] = list(getattr(backend, "lacking", dict)().items())
    except Exception as error:
        texts = (
            "".join(traceback.format_exception_only(type(one), one)).strip()
            for one in _chain(error)
        )
        found |= {"outcome": "fails", "detail": " Caused by: ".join(texts)}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


# The rules: each yields what is wrong, with the fix.


def findings_of(environment: Environment) -> tuple[Finding, ...]:
    """Return all that is wrong, problems first, each package out of bounds once."""
    found = dict.fromkeys(finding for rule in RULES for finding in rule(environment))
    return tuple(sorted(found, key=lambda finding: finding.kind != "problem"))


def unregistered(environment: Environment) -> Iterator[Finding]:
    """Report missing metadata, which has the bounds on other packages' versions."""
    installed = environment.versions.get(THIS)
    if installed is None:
        what = (
            "its code is on the path but it is not installed, so that nothing compares"
            " the other packages' versions with its bounds"
        )
        yield Finding(
            "note",
            THIS,
            what,
            "To have them compared: pip install -e . (in its folder).",
        )
    elif installed != environment.running:
        what = (
            f"version {environment.running} runs, but the metadata, which registers the"
            f" backends, is that of {installed}"
        )
        yield Finding(
            "problem",
            THIS,
            what,
            "Install it again: pip install --force-reinstall gradaccum.",
        )


def out_of_bounds(environment: Environment) -> Iterator[Finding]:
    """Report versions that this package's extras, or a framework's own requirements,
    exclude.
    """
    for asker, requirements in environment.requirements.items():
        for one in requirements:
            key = one.extra if asker == THIS else asker
            used = (
                NEEDED_FOR.get(key, "") in environment.versions
                if asker == THIS
                else asker in environment.versions and not one.extra
            )
            installed = environment.versions.get(one.package)
            if used and installed is not None and not satisfies(installed, one.bounds):
                shown = (
                    f"gradaccum[{key}]"
                    if asker == THIS
                    else f"{asker} {environment.versions[asker]}"
                )
                reason = (
                    f": {REASONS[key, one.package]}"
                    if (key, one.package) in REASONS
                    else ""
                )
                what = (
                    f"version {installed} is installed; {shown} asks for"
                    f" {one.package}{one.bounds}{reason}"
                )
                yield Finding(
                    "problem",
                    one.package,
                    what,
                    f"Run: pip install '{one.package}{one.bounds}'.",
                )


_VERDICTS = {
    "fails": (
        "its import raises",
        "Mend the installation that the error names, or install the framework again.",
    ),
    "crashes": (
        "its import ends the process",
        (
            "A compiled library does not fit: install the framework again, in an"
            " environment of its own."
        ),
    ),
    "hangs": (
        "its import does not come back in time",
        (
            "It may wait for a device: free it, hide it (CUDA_VISIBLE_DEVICES=,"
            " JAX_PLATFORMS=cpu), or allow more by --limit."
        ),
    ),
}


def broken_backends(environment: Environment) -> Iterator[Finding]:
    """Report backends whose framework is installed and that cannot be used."""
    for one in environment.probes:
        if one.outcome in _VERDICTS:
            what, fix = _VERDICTS[one.outcome]
            yield Finding("problem", one.backend, f"{what}: {one.detail}", fix)
    if all(one.outcome == "missing" for one in environment.probes):
        yield Finding(
            "problem",
            "backends",
            "none works here",
            "Run: pip install 'gradaccum[torch]', or [jax], or [mindspore].",
        )


def lacking_names(environment: Environment) -> Iterator[Finding]:
    """Report names that a framework has dropped or renamed and that a backend uses."""
    for one in environment.probes:
        for name, lost in one.lacking:
            yield Finding(
                "note",
                one.backend,
                f"this version lacks {name.replace(':', '.')}",
                f"What that costs: {lost}",
            )


def unequal_devices(environment: Environment) -> Iterator[Finding]:
    """Report a framework that sees only the CPU where another framework sees an
    accelerator.
    """
    on_cpu = {
        one: all("cpu" in device.lower() for device in one.devices)
        for one in environment.probes
        if one.devices
    }
    for other in [one for one, cpu in on_cpu.items() if not cpu][:1]:
        for one in (one for one, cpu in on_cpu.items() if cpu):
            what = (
                f"it sees {', '.join(one.devices)} only, although {other.backend} sees"
                f" {', '.join(other.devices)}"
            )
            yield Finding(
                "note",
                one.backend,
                what,
                "Install its build for this device if you mean to train there.",
            )


RULES: tuple[Callable[[Environment], Iterator[Finding]], ...] = (
    unregistered,
    out_of_bounds,
    broken_backends,
    unequal_devices,
    lacking_names,
)
