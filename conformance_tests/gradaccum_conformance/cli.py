"""``gradaccum`` on the command line. Exit codes: 0, everything passed; 1, something
failed; 2, an argument is wrong.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradaccum import BackendNotFoundError
from gradaccum.__main__ import check as check_function
from gradaccum.versions import report as versions_report
from gradaccum_conformance.demo.command import run_demo
from gradaccum_conformance.report.command import run_conformance

app = typer.Typer(
    name="gradaccum",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help shows a flag as `--deep <bool>`
    help=(
        "Demonstrate and test gradient accumulation. `gradaccum --version` prints the"
        " version."
    ),
)

Backends = Annotated[
    list[str],
    typer.Option(
        "--backend",
        metavar="NAME",
        help=(
            "Run only this backend; repeat the option for several. Default: every"
            " installed backend."
        ),
    ),
]


@app.command()
def demo(
    backend: Backends = [],  # noqa: B006
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder for the loss curves and the results."
        ),
    ] = Path("gradaccum-demo"),
) -> None:
    """Train on digits in every installed framework.

    It trains with large batches, with accumulation and with the naive loop.
    """
    _finish(lambda: run_demo(Console(), backend, out))


@app.command()
def conformance(
    backend: Backends = [],  # noqa: B006
    report: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the report.")
    ] = Path("gradaccum-conformance"),
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Test every combination and longer sequences; takes tens of minutes.",
        ),
    ] = False,
) -> None:
    """Test that accumulated gradients equal the large batch's gradient.

    It tests every installed framework, and writes a report.
    """
    _finish(lambda: run_conformance(Console(), backend, report, deep=deep))


@app.command()
def versions() -> None:
    """Print the versions that a bug report needs."""
    print(versions_report())


@app.command()
def check(function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION")]) -> None:
    """Print the report of gradaccum.check_loop that a function returns.

    The exit status is 1 unless the loop is right.
    """
    sys.exit(check_function([function]))


def _finish(run: Callable[[], bool]) -> None:
    try:
        passed = run()
    except BackendNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if passed else 1)


def main() -> None:
    """Run the command line. On SIGTERM, end the processes that it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    app()
