"""``gradaccum doctor``: the rules that find what is wrong with an environment, the report as text and JSON, the command.

The doctor needs the standard library only, since it must run where something is missing. It imports no framework into its own process,
which a broken one would end. Exit codes: 0, nothing is wrong; 1, something is; 2, an argument is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import NamedTuple

from gradaccum.doctor.environment import THIS, Environment, Probe, Requirement, examine, satisfies
from gradaccum.registry import BACKENDS

# What is wrong with an environment, each with the fix. A problem makes results wrong or a call fail; a note is for the user to judge.


NEEDED_FOR = {"torch": "torch", "jax": "jax", "mindspore": "mindspore", "conformance": "pytest"}
"""By extra of this package, the package without which nobody uses the extra, so that its bounds bind nobody."""

FRAMEWORKS = ("torch", "jax", "jaxlib", "optax", "mindspore")
"""Packages whose own bounds matter for training. Another package out of bounds is only noted."""

PARTNERS = {("conformance", "pytest"): "pytest-xdist"}
"""Bounds that hold only beside another package."""

REASONS = {
    ("mindspore", "numpy"): (
        "MindSpore 2.10 installs beside numpy 2, but Tensor * np.float32(2), bfloat16 .asnumpy() and its datasets then fail"
    ),
    ("mindspore", "mindspore"): "the backend is tested with these series only, and MindSpore's compiled code differs between series",
    ("conformance", "pytest"): "pytest-xdist 3.8 does not see groups of tests under pytest 9.2, and starts each group on every process",
    ("torch", "torch"): "the backend uses hooks of autograd and of optimizers that older releases do not have",
    ("jax", "jax"): "the backend uses jax.shard_map and types of devices that older releases do not have",
    ("jax", "jaxlib"): "jax calls compiled code of jaxlib, and refuses another version when it is imported, or fails later",
    ("jax", "numpy"): "jaxlib was compiled against the numpy that it asks for",
}
"""Why a bound stands, where a wrong version does not say so itself, by the one that asks and the package."""


class Finding(NamedTuple):
    """One thing that is wrong, or worth to know."""

    kind: str
    """``"problem"`` or ``"note"``."""
    where: str
    """The package, the backend or the entry point."""
    what: str
    """What was found, and what follows from it."""
    fix: str
    """What to do, as a sentence."""


def findings_of(environment: Environment) -> tuple[Finding, ...]:
    """All that is wrong with `environment`, problems first. One package out of one bound is named once."""
    found = dict.fromkeys(finding for rule in RULES for finding in rule(environment))
    return tuple(sorted(found, key=lambda finding: finding.kind != "problem"))


def unregistered(environment: Environment) -> Iterator[Finding]:
    """Without metadata no backend can be found."""
    if THIS not in environment.versions:
        what = "its code is on the path but it is not installed, so that none of its backends is registered"
        yield Finding("problem", THIS, what, "Run: pip install -e . (in its folder), or pip install gradaccum.")
    elif environment.versions[THIS] != environment.running:
        what = (
            f"version {environment.running} runs, but the metadata, which registers the backends, is that of {environment.versions[THIS]}"
        )
        yield Finding(
            "problem", THIS, what, "Install it again: pip install -e . (in its folder), or pip install --force-reinstall gradaccum."
        )


def own_bounds(environment: Environment) -> Iterator[Finding]:
    """Versions that this package's extras exclude, of the frameworks that are installed."""
    for one in environment.requirements.get(THIS, ()):
        partner = PARTNERS.get((one.extra, one.package))
        if NEEDED_FOR.get(one.extra) in environment.versions and (partner is None or partner in environment.versions):
            yield from _out_of_bounds(environment, one, f"gradaccum[{one.extra}]", one.extra)


def bounds_among_packages(environment: Environment) -> Iterator[Finding]:
    """What an installed package asks of another one: jax of jaxlib, optax of jax."""
    for package, requirements in environment.requirements.items():
        if package != THIS and package in environment.versions:
            for one in requirements:
                if not one.extra:
                    kind = "problem" if package in FRAMEWORKS else "note"
                    yield from _out_of_bounds(environment, one, f"{package} {environment.versions[package]}", package, kind)


def _out_of_bounds(environment: Environment, one: Requirement, asker: str, key: str, kind: str = "problem") -> Iterator[Finding]:
    """`asker` is shown; `key` is what `REASONS` knows it by."""
    installed = environment.versions.get(one.package)
    if installed is None or satisfies(installed, one.bounds):
        return
    reason = REASONS.get((key, one.package))
    what = f"version {installed} is installed; {asker} asks for {one.package}{one.bounds}" + (f": {reason}" if reason else "")
    yield Finding(kind, one.package, what, f"Run: pip install '{one.package}{one.bounds}'.")


def broken_installations(environment: Environment) -> Iterator[Finding]:
    """Two versions of one package in one folder: their files are mixed."""
    for package, versions in environment.twice.items():
        what = f"one folder holds the metadata of the versions {' and '.join(versions)}: an installation was broken off"
        yield Finding("problem", package, what, f"Remove its folders there by hand, then run: pip install {package}.")


def two_owners(environment: Environment) -> Iterator[Finding]:
    """A name that two packages register: neither can be loaded."""
    claims: dict[tuple[str, str], dict[str, str]] = {}
    for one in environment.owners:
        claims.setdefault((one.group, one.name), {})[one.value] = one.package
    for (group, name), owners in claims.items():
        if len(owners) > 1:
            listed = " and ".join(f"{package} ({value})" for value, package in owners.items())
            what = f"the name {name!r} of the group {group!r} has two owners: {listed}"
            yield Finding("problem", name, what, "Uninstall one of them.")


def broken_backends(environment: Environment) -> Iterator[Finding]:
    """Backends whose framework is there and that cannot be used."""
    for one in environment.probes:
        if one.outcome in _VERDICTS:
            what, fix = _VERDICTS[one.outcome]
            yield Finding("problem", one.backend, f"{what}: {one.detail}", fix)
    if not any(one.outcome == "works" for one in environment.probes):
        fix = "Run: pip install 'gradaccum[torch]', or [jax], or [mindspore]."
        yield Finding("problem", "backends", "none works here", fix)


_VERDICTS = {
    "fails": ("its import raises", "Mend the installation that the error names, or install the framework again."),
    "crashes": (
        "its import ends the process",
        "A compiled library does not fit: install the framework again, in an environment of its own.",
    ),
    "hangs": (
        "its import does not come back in time",
        "It may wait for a device: free it, hide it (CUDA_VISIBLE_DEVICES=, JAX_PLATFORMS=cpu), or allow more by --limit.",
    ),
}


def lacking_names(environment: Environment) -> Iterator[Finding]:
    """Names that a framework has dropped or renamed, and without which a backend does less."""
    for one in environment.probes:
        for name, lost in one.lacking:
            yield Finding("note", one.backend, f"this version lacks {name.replace(':', '.')}", f"What that costs: {lost}")


def unequal_devices(environment: Environment) -> Iterator[Finding]:
    """A framework on the CPU beside one that sees an accelerator: most often a build without it."""
    working = [one for one in environment.probes if one.outcome == "works" and one.devices]
    accelerated = [one for one in working if not _on_cpu(one)]
    for one in working:
        if accelerated and _on_cpu(one):
            other = accelerated[0]
            what = f"it sees {', '.join(one.devices)} only, although {other.backend} sees {', '.join(other.devices)}"
            yield Finding("note", one.backend, what, "Install its build for this device if you mean to train there.")


def _on_cpu(one: Probe) -> bool:
    return all("cpu" in device.lower() for device in one.devices)


RULES: tuple[Callable[[Environment], Iterator[Finding]], ...] = (
    unregistered,
    own_bounds,
    bounds_among_packages,
    broken_installations,
    two_owners,
    broken_backends,
    unequal_devices,
    lacking_names,
)


LIMIT = 120.0
"""Seconds for the import of one backend: a cold import of a framework from a slow disk takes tens of seconds."""


class Diagnosis(NamedTuple):
    """An environment and what is wrong with it."""

    environment: Environment
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem. Notes are none."""
        return all(finding.kind != "problem" for finding in self.findings)

    def to_json(self) -> str:
        """All of it as a JSON object, with the keys ``healthy``, ``findings`` and those of the environment."""
        facts = self.environment._asdict()
        facts["probes"] = [one._asdict() for one in self.environment.probes]
        facts["owners"] = [one._asdict() for one in self.environment.owners]
        facts["requirements"] = {name: [one._asdict() for one in found] for name, found in self.environment.requirements.items()}
        found = {"healthy": self.healthy, "findings": [finding._asdict() for finding in self.findings], **facts}
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        return "\n".join((*_facts(self.environment), "", *_verdict(self.findings)))


def diagnose(backends: Sequence[str] | None = None, limit: float = LIMIT) -> Diagnosis:
    """Look at this environment.

    Args:
        backends: import only these; None: all that are registered.
        limit: seconds after which the import of a backend is given up.
    """
    environment = examine(backends, limit)
    return Diagnosis(environment, findings_of(environment))


def _facts(environment: Environment) -> list[str]:
    lines = [f"gradaccum {environment.running} · Python {environment.python} · {environment.system}"]
    lines += [f"  {name}={value}" for name, value in environment.settings.items()]
    direct = dict.fromkeys(one.package for one in environment.requirements.get(THIS, ()))
    versions = [f"  {name} {environment.versions[name]}" for name in direct if name in environment.versions]
    lines += ["", "Packages", *versions]
    return [*lines, "", "Backends", *(f"  {one.backend}: {_state(one)}" for one in environment.probes)]


def _state(one: Probe) -> str:
    if one.outcome == "missing":
        return f"not installed (it needs {one.detail}). To have it: pip install 'gradaccum[{one.backend}]'"
    if one.outcome == "works":
        return f"works, imported in {one.seconds:.1f} s" + (f"; sees {', '.join(one.devices)}" if one.devices else "")
    return f"{one.outcome}; see below"


def _verdict(findings: Sequence[Finding]) -> list[str]:
    lines = [f"{finding.kind.upper()}  {finding.where}: {finding.what}. {finding.fix}" for finding in findings]
    problems = sum(finding.kind == "problem" for finding in findings)
    return [*lines, f"{problems} problem{'' if problems == 1 else 's'}." if problems else "No problem found."]


# The command's arguments and exit code. `argparse`, since the package that the other commands use may not be installed.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. On SIGTERM it first ends the processes that it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = _parser().parse_args(arguments)
    diagnosis = diagnose(options.backend, options.limit)
    print(diagnosis.to_json() if options.json else diagnosis)
    return 0 if diagnosis.healthy else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradaccum doctor", description="Is this environment one in which gradaccum works?")
    parser.add_argument("--backend", action="append", type=_known, help="Import this backend only; repeat it for several. Default: all.")
    parser.add_argument("--limit", type=_seconds, default=LIMIT, help="Seconds for the import of one backend (default: %(default)g).")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def _known(name: str) -> str:
    known = sorted({entry.name for entry in entry_points(group=BACKENDS)})
    if name not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known) or 'none: no backend is registered'}; got {name!r}")
    return name


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0; got {text!r}")
    return seconds
