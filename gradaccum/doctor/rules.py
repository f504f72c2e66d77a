"""What is wrong with an environment, each with the fix. A problem makes results wrong or a call fail; a note is for the user to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gradaccum.doctor.environment import THIS, Environment
from gradaccum.doctor.probing import Probe
from gradaccum.doctor.versions import Requirement, satisfies

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
