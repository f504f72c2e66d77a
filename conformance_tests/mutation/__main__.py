"""The command: plant mutants in a package, and say which ones its tests let live."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from .equivalent import why_equivalent
from .packages import PACKAGES
from .running import mutants_of, sample, verdicts


def main(
    package: Annotated[
        str, typer.Argument(help=f"one of {', '.join(PACKAGES)}")
    ] = "core",
    count: Annotated[int, typer.Option(help="mutants to draw")] = 200,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
    only: Annotated[
        str, typer.Option(help="mutants whose file and line contain this text")
    ] = "",
    most_seconds: Annotated[
        float, typer.Option(help="of CPU, for the tests of one mutant")
    ] = 300,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="keeps which test runs which line, for a later run on the same sources"
        ),
    ] = None,
) -> None:
    """Plant a random sample of small changes in a package; list those that its tests do
    not notice.
    """
    mutated = PACKAGES[package]
    drawn = [mutant for mutant in sample(mutated, count, seed) if only in str(mutant)]
    tried = [mutant for mutant in drawn if not why_equivalent(mutant)]
    begin = time.monotonic()
    survived = 0
    with tempfile.TemporaryDirectory() as temporary:
        kept = folder or Path(temporary)
        for mutant, killer in verdicts(mutated, tried, kept, most_seconds):
            if not killer:
                survived += 1
                print(f"{mutant}\n    survived", flush=True)
    noticed = len(tried) - survived
    equivalent = len(drawn) - len(tried)
    seconds = time.monotonic() - begin
    counts = f"{len(mutants_of(mutated)):>9,}{len(drawn):>7}{equivalent:>12}"
    rate = f"{noticed:>9}{survived:>10}{noticed / max(1, len(tried)):>7.1%}"
    print(
        "package      mutants  drawn  equivalent  noticed  survived   rate  seconds  date"
    )
    print(f"{package:<11}{counts}{rate}{seconds:>9.0f}  {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    typer.run(main)
