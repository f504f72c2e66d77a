"""The tables of ``benchmarks/README.md`` and the front page's plot, from what was
measured: what gradaccum costs beside each baseline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.answers import Answers, Record, duration
from benchmarks.machine import machine
from benchmarks.plots import OURS, write_summary

ROOT = Path(__file__).parents[1]
PLOT = Path("benchmarks/figures/summary.png")
MARKED = re.compile(
    r"(<!-- benchmarks: begin -->\n).*(<!-- benchmarks: end -->)", re.DOTALL
)
HEAD = ("case", "baseline's time", "gradaccum / baseline", "quartiles")


def write_readme(answers: Sequence[Answers], root: Path = ROOT) -> None:
    """Put the tables in place of what ``benchmarks/README.md`` holds between its marks,
    and draw the plot.

    Raises:
        ValueError: the page has no such marks, or nothing was measured beside a
            baseline.
    """
    readme = root / "benchmarks" / "README.md"
    text = readme.read_text(encoding="utf-8")
    cases = [
        case
        for answer in answers
        for case in answer.cases
        if case["x"] is None and _row(case, OURS)
    ]
    if not MARKED.search(text) or not cases:
        raise ValueError(
            f"{readme}: expected the marks 'benchmarks: begin' and 'benchmarks: end',"
            f" and {len(cases)} cases to be more than 0."
        )
    (root / PLOT).parent.mkdir(parents=True, exist_ok=True)
    write_summary(cases, root / PLOT)
    block = "\n".join([_machine_line(machine()), "", *_table(answers), ""])
    readme.write_text(
        MARKED.sub(lambda found: found[1] + block + found[2], text), encoding="utf-8"
    )


def _machine_line(found: Mapping[str, str]) -> str:
    return (
        "Measured on: "
        + "; ".join(f"{name} {value}" for name, value in found.items())
        + "."
    )


def _table(answers: Sequence[Answers]) -> Iterator[str]:
    for answer in answers:
        cases = [
            case for case in answer.cases if case["x"] is None and _row(case, OURS)
        ]
        for baseline in dict.fromkeys(case["baseline"] for case in cases):
            yield from (
                "",
                f"**{answer.title}; baseline: {baseline}**",
                "",
                _line(HEAD),
                "|---" * len(HEAD) + "|",
            )
            yield from (
                _line(_cells(case)) for case in cases if case["baseline"] == baseline
            )


def _cells(case: Record) -> list[str]:
    ours, theirs = _row(case, OURS)[0], _row(case, case["baseline"])[0]
    spread = f"{ours['ratio_low']:.2f} to {ours['ratio_high']:.2f}"
    time = duration(theirs["median_ms"])
    return [case["case"], time, f"**{ours['ratio']:.2f}**", spread]


def _row(case: Record, contestant: str) -> list[Record]:
    return [row for row in case["rows"] if row["contestant"] == contestant]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
