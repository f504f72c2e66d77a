"""What the doctor found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from gradaccum.doctor.environment import THIS, Environment, examine
from gradaccum.doctor.probing import Probe
from gradaccum.doctor.rules import Finding, findings_of

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
