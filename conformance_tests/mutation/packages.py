"""The packages whose mutants are counted: their files, and the tests that must notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Package(NamedTuple):
    """What is mutated, and by what it is held."""

    folder: Path
    """The package, relative to the checkout."""
    parts: tuple[str, ...]
    """Its files and rooms that are mutated, relative to `folder`."""
    tests: tuple[str, ...]
    """Tests below ``conformance_tests``, the quickest first: pytest stops at the first failure."""
    backend: str
    """The suite runs on this one."""
    imported: tuple[str, ...]
    """Modules that the tests' process has imported already; none of them imports the package."""

    def files(self) -> list[Path]:
        found = [self.folder / part for part in self.parts]
        return [file for part in found for file in (sorted((ROOT / part).rglob("*.py")) if not part.suffix else [ROOT / part])]


CORE = Package(
    Path("gradaccum"),
    (
        "transitions.py",
        "state.py",
        "window_loop.py",
        "splitting.py",
        "statistics.py",
        "saving.py",
        "nests.py",
        "options.py",
        "refusals.py",
        "watching",
        "verification",
    ),
    ("core_tests", "gradaccum_conformance/suite"),
    "numpy",
    ("pytest", "numpy"),
)
PACKAGES = {"core": CORE}
