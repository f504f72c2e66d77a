"""``python -m conformance_tests.record`` prints what differs from the record;
``--write`` writes the record anew.

The golden bits, which the suite holds, are compared too. A part of another environment
stays as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradaccum import available_backends
from gradaccum_conformance import bits

from . import names, refusals
from .facts import Facts, changes, file_of, read, write

PARTS = ("bits", "names", "refusals")
Names = Annotated[list[str], typer.Option(help="Repeat the option for several.")]


def found(part: str, backends: list[str]) -> tuple[Path, Facts]:
    """The file of a part, and its facts here and now."""
    if part == "names":
        return file_of(part), names.found(backends)
    if part == "refusals":
        return file_of(part), refusals.found()
    # Each run is a section, because an environment may hold some of the runs only.
    facts = {name: [" ".join(hashes)] for name, hashes in bits.found(backends)}
    return bits.FILE, facts


def main(
    part: Names = list(PARTS),  # noqa: B006
    backend: Names = [],  # noqa: B006
    rewrite: Annotated[
        bool, typer.Option("--write", help="Write the record anew.")
    ] = False,
) -> None:
    """Compare the record with the code, of every part and every installed backend
    unless some are named, or write it anew.
    """
    os.environ.setdefault("GLOG_v", "4")
    backends = backend or [name for name in available_backends() if name != "numpy"]
    if unknown := set(part) - set(PARTS):
        raise typer.BadParameter(f"expected some of {PARTS}; got {unknown}")
    differs = False
    for name in part:
        file, facts = found(name, backends)
        recorded = read(file)
        lines = list(changes(recorded, facts))
        differs = differs or bool(lines)
        print("\n".join(lines) or f"the same: {name}")
        for section in sorted(facts.keys() - recorded.keys()):
            print(f"not held: {section}")
        if rewrite:
            write(recorded | facts, file)
            print(f"Written: {file}")
    raise typer.Exit(int(differs and not rewrite))


if __name__ == "__main__":
    sys.exit(typer.run(main))
