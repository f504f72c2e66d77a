"""Facts in sections, and the file that holds them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

Facts = dict[str, list[str]]
"""Facts by section."""
FOLDER = Path(__file__).parent
HEADER = "# SECTION | FACT. Written by: python -m conformance_tests.record --write\n"


def file_of(part: str) -> Path:
    return FOLDER / f"{part}.txt"


def read(file: Path) -> Facts:
    facts = {}
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        if not line.startswith("#"):
            section, _, fact = line.partition(" | ")
            facts.setdefault(section, []).append(fact)
    return facts


def write(facts: Facts, file: Path) -> None:
    """Write the file anew, below its comment."""
    comment = [HEADER]
    if file.exists():
        text = file.read_text("utf-8").splitlines(keepends=True)
        comment = [line for line in text if line.startswith("#")]
    text = [f"{line}\n" for line in lines(facts)]
    file.write_text("".join([*comment, *text]), "utf-8")


def lines(facts: Facts) -> list[str]:
    return sorted(
        f"{section} | {fact}" for section, entries in facts.items() for fact in entries
    )


def changes(held: Facts, found: Facts) -> Iterator[str]:
    """The lines that differ, in the sections of `found` that are held; the facts of
    other sections cannot be compared here.
    """
    before, after = (
        lines({section: facts[section] for section in found.keys() & held.keys()})
        for facts in (held, found)
    )
    for line in difflib.ndiff(before, after):
        if line[0] in "-+":
            yield line
