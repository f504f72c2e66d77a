"""``python -m benchmarks.scoreboard [ROW ...]``: other packages' own gradient
accumulation beside their own large batch.

Makes one environment after another, measures its rows in it and removes it. The results
stay in ``results.json``; the page's table is made of them. Fails if a row is not as
`benchmarks.scoreboard.rows` has it: then the package has changed, and its cause is to
be looked at.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlretrieve

import typer
from rich.console import Console

from benchmarks.scoreboard.rows import (
    BY_UV,
    CAUSES,
    ENVIRONMENTS,
    PYTHONS,
    ROWS,
    SCRIPTS,
    SOURCES,
    Row,
)
from conformance_tests.matrix import ROOT, python_in, run

RESULTS = Path(__file__).parent / "results.json"
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "benchmarks" / "SCOREBOARD.md"
START, END = "<!-- table: scoreboard -->", "<!-- end of table -->"
LONGEST_NAME = 22
"""Characters of a parameter's name in the table."""
ROUNDING = 1e-6
"""A relative distance that is rounding: of float64 some 1e-16, of a loop that computes
in float32 some 1e-7.
"""
Result = dict[str, Any]


def right(result: Result) -> bool:
    """True if the accumulated gradient is the large batch's."""
    return bool(result["unequal"]["distance"] <= ROUNDING)


def as_recorded(row: Row, result: Result) -> bool:
    """True if the row's verdict is the recorded one, and the harness is seen to be
    right on equal items.
    """
    return right(result) == (not row.cause) and bool(
        result["equal"]["distance"] <= ROUNDING
    )


def measured(row: Row, python: Path) -> Result:
    """Run one row in its environment.

    Raises:
        RuntimeError: it ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        module, function = row.place.split(".")
        command = [
            str(python),
            "-m",
            "benchmarks.scoreboard.measuring",
            module,
            function,
            str(file),
            row.package,
        ]
        passed, output = run(command, ROOT)
        if not passed:
            raise RuntimeError("\n".join([f"{row.place} failed:", *output[-30:]]))
        return {
            **json.loads(file.read_text(encoding="utf-8")),
            "day": date.today().isoformat(),
        }


def program_passes(program: str, python: Path) -> bool:
    """Run a row's smallest program in its environment, where a package's script may
    stand too.

    Raises:
        RuntimeError: it ended with another error than a failed comparison.
    """
    test = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        f"--rootdir={PROGRAMS}",
    ]
    plugins = ["-p", "conformance_tests.integration_tests.torchvision_ops"]
    plugins += ["-p", "no:cacheprovider", "-o", f"pythonpath={python.parent.parent}"]
    passed: bool
    passed, output = run([*test, *plugins, str(PROGRAMS / program)], ROOT)
    text = "\n".join(output)
    if not passed and ("AssertionError" not in text or "1 failed" not in text):
        raise RuntimeError(f"{program} ended without a comparison:\n{text}")
    return passed


def environment(name: str, folder: Path) -> Path:
    """Make an environment in `folder` unless it is there.

    Raises:
        RuntimeError: pip failed.
        OSError: a script could not be fetched.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        python = python_in(folder, PYTHONS.get(name, "3.11"))
        pip = [str(python), "-m", "pip", "install", "-q"]
        uv = [
            str(folder / "bin" / "uv"),
            "pip",
            "install",
            "-q",
            "--python",
            str(python),
        ]
        for command in (
            [[*pip, "uv"], [*uv, *ENVIRONMENTS[name]]]
            if name in BY_UV
            else [[*pip, *ENVIRONMENTS[name]]]
        ):
            passed, output = run([*command, f"-e{ROOT}", "numpy", "pytest"], folder)
            if not passed:
                raise RuntimeError("\n".join(output[-30:]))
        if name in SCRIPTS:
            urlretrieve(SCRIPTS[name], folder / SCRIPTS[name].rpartition("/")[2])
    return python


def table(results: dict[str, Result]) -> str:
    """The rows in Markdown, and what their causes mean."""
    lines = [
        "|package|what it trains|gradient|cause|reported|`verify`|loop check|",
        "|---" * 7 + "|",
    ]
    for row in ROWS:
        found = results[row.place]
        version = f"{row.package} {found['versions'][row.package]}"
        if row.package in SOURCES:
            repository, commit = SOURCES[row.package]
            version += (
                f" ([{commit[:7]}](https://github.com/{repository}/tree/{commit}))"
            )
        trains = row.trains
        if row.program:
            file = row.program.partition("::")[0]
            trains = f"[{trains}](scoreboard/programs/{file})"
        cause = f"{row.cause}{', documented' if row.documented else ''}"
        reported = ", ".join(
            f"[#{each.split('#')[1]}](https://github.com/{each.replace('#', '/issues/')})"
            for each in row.reported
        )
        lines.append(
            f"|{version}|{trains}|{verdict(found)}|{cause}|{reported}|{found['verify']}|"
            f"{found.get('loop_check', '')}|"
        )
    days = sorted(result["day"] for result in results.values())
    lines += [
        "",
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}.",
        "",
        *(f"- *{name}*: {words}." for name, words in CAUSES.items()),
    ]
    return "\n".join(lines)


def verdict(result: Result) -> str:
    """How far off a row is, in words; its length too where it is nothing but too long
    or too short.
    """
    found = result["unequal"]
    if right(result):
        return "the same"
    if abs(found["distance"] - abs(found["length"] - 1)) < ROUNDING:
        return f"{found['length']:.3g} times"
    parameter = short(found["worst"].removeprefix("net."))
    return f"{found['distance']:.0%} off ({parameter} {found['worst_distance']:.0%})"


def short(name: str) -> str:
    """The end of a parameter's name; a whole name may be as wide as the table."""
    if len(name) <= LONGEST_NAME:
        return name
    ends = (name[match.end() :] for match in re.finditer(r"[._]", name))
    fitting = (end for end in ends if len(end) <= LONGEST_NAME)
    return f"…{next(fitting, name[-LONGEST_NAME:])}"


def write_page(results: dict[str, Result]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(
        f"{before}{START}\n{table(results)}\n{END}{rest.partition(END)[2]}",
        encoding="utf-8",
    )


def main(
    row: Annotated[
        list[str] | None,
        typer.Argument(help="Rows to measure, such as trl_rows.sft. Default: all."),
    ] = None,
    environments: Annotated[
        Path | None,
        typer.Option(help="Folder of environments, by name, to use and to keep."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write results.json and the page.")
    ] = False,
) -> None:
    """Measure the scoreboard."""
    console, known = Console(), {each.place: each for each in ROWS}
    if unknown := set(row or ()) - known.keys():
        raise typer.BadParameter(
            f"expected some of {', '.join(known)}; got {', '.join(sorted(unknown))}"
        )
    results: dict[str, Result] = json.loads(RESULTS.read_text(encoding="utf-8"))
    changed = list[str]()
    asked = sorted(
        (known[name] for name in row or known),
        key=lambda each: list(ENVIRONMENTS).index(each.environment),
    )
    for name, rows in groupby(asked, key=lambda each: each.environment):
        with tempfile.TemporaryDirectory(prefix="gradaccum-") as folder:
            python = environment(name, (environments or Path(folder)) / name)
            for each in rows:
                found = measured(each, python)
                if not as_recorded(each, found):
                    changed.append(each.place)
                if each.program and program_passes(each.program, python) == bool(
                    each.cause
                ):
                    changed.append(each.program)
                results[each.place] = found
                console.print(
                    f"{each.place}: {verdict(found)}; on equal items"
                    f" {found['equal']['distance']:.1e}; verify: {found['verify']};"
                    f" loop check: {found['loop_check']}"
                )
        if record:
            kept = {place: results[place] for place in known if place in results}
            RESULTS.write_text(
                json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8"
            )
    if record:
        write_page(results)
    if changed:
        console.print(
            f"Not as benchmarks/scoreboard/rows.py has it: {', '.join(changed)}",
            style="bold red",
        )
    raise typer.Exit(bool(changed))


if __name__ == "__main__":
    typer.run(main)
