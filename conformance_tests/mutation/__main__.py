"""The command: plant mutants in a package, and say which ones its tests let live."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from .packages import PACKAGES
from .running import sample, survivors


def main(
    package: Annotated[str, typer.Argument(help=f"one of {', '.join(PACKAGES)}")] = "core",
    count: Annotated[int, typer.Option(help="mutants to draw")] = 200,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
    only: Annotated[str, typer.Option(help="mutants whose file and line contain this text")] = "",
) -> None:
    """Plant a random sample of small changes in a package; list those that its tests do not notice."""
    if package not in PACKAGES:
        raise typer.BadParameter(f"expected one of {', '.join(PACKAGES)}; got {package!r}", param_hint="package")
    chosen = [mutant for mutant in sample(PACKAGES[package], count, seed) if only in str(mutant)]
    if not chosen:
        raise typer.BadParameter(f"no mutant of the sample contains {only!r}; draw more by --count", param_hint="--only")
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        runs = survivors(PACKAGES[package], chosen, Path(folder))
        for mutant, survived in track(runs, total=len(chosen), description=package, disable=not sys.stdout.isatty()):
            if survived:
                alive.append(mutant)
                print(mutant, flush=True)
    killed = len(chosen) - len(alive)
    print(f"{package}: {killed} of {len(chosen)} mutants killed ({killed / len(chosen):.1%})")


if __name__ == "__main__":
    typer.run(main)
