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
    ] = 60,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="keeps which test runs which line, for a later run on the same sources"
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option(help="name the test that notices, too")
    ] = False,
) -> None:
    """Plant a random sample of small changes in a package; list those that its tests do
    not notice.
    """
    if package not in PACKAGES:
        raise typer.BadParameter(
            f"expected one of {', '.join(PACKAGES)}; got {package!r}",
            param_hint="package",
        )
    chosen = [
        mutant
        for mutant in sample(PACKAGES[package], count, seed)
        if only in str(mutant)
    ]
    if not chosen:
        raise typer.BadParameter(
            f"no mutant of the sample contains {only!r}; draw more by --count",
            param_hint="--only",
        )
    begin, survived = time.monotonic(), 0
    reasons = {mutant: why_equivalent(mutant) for mutant in chosen}
    tried = [mutant for mutant in chosen if not reasons[mutant]]
    for mutant, reason in reasons.items():
        if reason:
            print(f"{mutant}\n    equivalent, because {reason}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for mutant, killer in verdicts(
            PACKAGES[package], tried, folder or Path(temporary), most_seconds
        ):
            survived += not killer
            if verbose or not killer:
                print(
                    f"{mutant}\n    {f'noticed by {killer}' if killer else 'survived'}",
                    flush=True,
                )
    print(
        HEADING,
        row(package, len(tried), len(chosen), survived, time.monotonic() - begin),
        sep="\n",
    )


HEADING = (
    "package      mutants  drawn  equivalent  noticed  survived   rate  seconds  date"
)


def row(package: str, tried: int, drawn: int, survived: int, seconds: float) -> str:
    """Return one line of the table in the documentation."""
    made, rate = len(mutants_of(PACKAGES[package])), (tried - survived) / max(1, tried)
    counts = (
        f"{made:>9,}{drawn:>7}{drawn - tried:>12}{tried - survived:>9}{survived:>10}"
    )
    return (
        f"{package:<11}{counts}{rate:>7.1%}{seconds:>9.0f}  {time.strftime('%Y-%m-%d')}"
    )


if __name__ == "__main__":
    typer.run(main)
