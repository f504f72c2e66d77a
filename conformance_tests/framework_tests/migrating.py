"""The pages on moving to gradaccum from another loop, as programs: each section's
blocks run after the page's first block.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from conformance_tests.programs import PYTHON_BLOCK, ROOT

BACKENDS = ROOT / "backends"


class Program(NamedTuple):
    """One section of a page that runs."""

    title: str
    """Its heading."""
    first: str
    """The block that all sections of the page begin with."""
    blocks: tuple[str, ...]
    """Before and after."""

    @property
    def of_neighbour(self) -> bool:
        """True if it imports a package that the framework's own tests do not have."""
        return "from transformers" in self.blocks[0]

    def run_here(self) -> None:
        """Run it in this process."""
        names = {"__name__": "__main__"}
        for block in (self.first, *self.blocks):
            exec(compile(block, f"MIGRATING.md, {self.title}", "exec"), names)

    def as_file(self) -> str:
        """All of it as the text of one file."""
        return "\n\n".join([self.first, *self.blocks])


def programs_of(framework: str) -> list[Program]:
    """The sections of the page of `framework` that have programs; each asserts its
    distance to the large batch.
    """
    page = (BACKENDS / f"gradaccum_{framework}" / "MIGRATING.md").read_text(
        encoding="utf-8"
    )
    start, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    (first,) = PYTHON_BLOCK.findall(start)
    found = [
        Program(section.split("\n", 1)[0], first, tuple(PYTHON_BLOCK.findall(section)))
        for section in sections
    ]
    return [program for program in found if program.blocks]
