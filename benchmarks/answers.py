"""The output of one question's process, as rows of text and as lines to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.case import QUESTIONS

Record = Mapping[str, Any]

TIMED = ("case", "contestant", "median", "ratio", "quartiles", "counted")
DRAWN = ("case", "contestant", "last", "counted")
TEXTS = ("case", "contestant", "counted", "told")
"""The columns that are no numbers."""


class Answers(NamedTuple):
    """One question and its records."""

    question: str
    records: Sequence[Record]

    @property
    def title(self) -> str:
        return QUESTIONS[self.question].title

    @property
    def axis(self) -> str:
        return QUESTIONS[self.question].axis

    @property
    def cases(self) -> list[Record]:
        """The comparisons that were timed."""
        return [record for record in self.records if "rows" in record]

    @property
    def curves(self) -> list[Record]:
        """What was only drawn."""
        return [record["curve"] for record in self.records if "curve" in record]

    @property
    def loops(self) -> list[Record]:
        """The loops whose distances were measured."""
        return [record["loop"] for record in self.records if "loop" in record]

    @property
    def columns(self) -> tuple[str, ...]:
        if self.loops:
            return "case", "contestant", *self.loops[0]["distances"], "told"
        return TIMED if self.cases else DRAWN

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells, as texts."""
        timed = [_timed(case, row) for case in self.cases for row in case["rows"]]
        return (
            timed
            + [_drawn(curve) for curve in self.curves]
            + [_looped(loop) for loop in self.loops]
        )


def duration(milliseconds: float) -> str:
    """Three digits and a unit that suits them."""
    if milliseconds < 1:
        return f"{1e3 * milliseconds:.3g} us"
    return (
        f"{milliseconds:.3g} ms"
        if milliseconds < 1000
        else f"{milliseconds / 1000:.3g} s"
    )


def _timed(case: Record, row: Record) -> tuple[str, ...]:
    spread = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
    return (
        case["case"],
        row["contestant"],
        duration(row["median_ms"]),
        f"{row['ratio']:.3f}",
        spread,
        _counts(row),
    )


def _drawn(curve: Record) -> tuple[str, ...]:
    return curve["name"], curve["contestant"], f"{curve['ys'][-1]:.4g}", _counts(curve)


def _looped(loop: Record) -> tuple[str, ...]:
    distances = (
        "-" if value is None else f"{value:.1e}" for value in loop["distances"].values()
    )
    return loop["name"], loop["contestant"], *distances, loop["told"]


def _counts(row: Record) -> str:
    return ", ".join(f"{name}: {value:.3g}" for name, value in row["counts"].items())
