"""What is installed, as the rules see it: plain values, so that a rule can be tested on an environment that nobody has."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec
from typing import NamedTuple

from gradaccum import __version__
from gradaccum.doctor.probing import Probe, probe
from gradaccum.doctor.versions import Requirement, installed_version, normalised, requirements_of
from gradaccum.registry import BACKENDS, TYPES

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
        running=__version__,
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
