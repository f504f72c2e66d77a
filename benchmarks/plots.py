"""The plots: bars of ratios, lines along a question's axis, curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.answers import Answers, Record
from benchmarks.case import LIMIT

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

OURS = "gradaccum"
BAR_LABEL = "time / baseline's in the same round (median, quartiles)"


def write_plots(answers: Answers, directory: Path) -> list[Path]:
    """Write the question's plots as PNG files to `directory`, which exists; a question
    without records has none.
    """
    figures = _figures(answers)
    paths = [
        directory / f"{answers.question}{f'-{index}' if index else ''}.png"
        for index in range(len(figures))
    ]
    for figure, path in zip(figures, paths, strict=True):
        figure.savefig(path, format="png", dpi=120, bbox_inches="tight")
        plt.close(figure)
    return paths


def write_summary(cases: list[Record], path: Path) -> None:
    """Write one plot for the front page: a row for each question, a dot for the ratio
    of `OURS` in each of its cases.
    """
    rows = list(dict.fromkeys((case["question"], case["baseline"]) for case in cases))
    frameworks = list(dict.fromkeys(_framework(question) for question, _ in rows))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.45 * len(rows)))
    for place, row in enumerate(rows):
        found = [case for case in cases if (case["question"], case["baseline"]) == row]
        ours = [
            next(entry for entry in case["rows"] if entry["contestant"] == OURS)
            for case in found
        ]
        heights = [
            place + 0.5 * ((index + 0.5) / len(ours) - 0.5)
            for index in range(len(ours))
        ]
        color = f"C{frameworks.index(_framework(row[0]))}"
        axes.errorbar(
            [entry["ratio"] for entry in ours],
            heights,
            xerr=_spread(ours),
            fmt="o",
            markersize=4,
            linewidth=1,
            color=color,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(
        range(len(rows)),
        [
            f"{question.replace('_', ' ')}, beside {baseline}"
            for question, baseline in rows
        ],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlabel(
        "faster than the baseline  |  slower     (a window's time, baseline = 1; median"
        " and quartiles)"
    )
    figure.savefig(path, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)


def _framework(question: str) -> str:
    return question.partition("_")[0]


def _figures(answers: Answers) -> list[Any]:
    curves = [
        _draw_curves(name, answers)
        for name in dict.fromkeys(curve["name"] for curve in answers.curves)
    ]
    lines = [case for case in answers.cases if case["x"] is not None]
    bars = [case for case in answers.cases if case["x"] is None]
    return (
        curves
        + ([_draw_lines(answers, lines)] if lines else [])
        + ([_draw_bars(bars)] if bars else [])
    )


def _draw_bars(cases: list[Record]) -> Any:
    names = _contestants(cases)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.28 * len(cases) * len(names)))
    for offset, name in enumerate(names):
        found = [
            (index, row)
            for index, case in enumerate(cases)
            for row in case["rows"]
            if row["contestant"] == name
        ]
        places = [index + 0.8 * offset / len(names) for index, _ in found]
        rows = [row for _, row in found]
        axes.barh(
            places,
            [row["ratio"] for row in rows],
            height=0.75 / len(names),
            xerr=_spread(rows),
            label=name,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(
        [index + 0.4 for index in range(len(cases))], [case["case"] for case in cases]
    )
    axes.invert_yaxis()
    axes.set_xlabel(BAR_LABEL)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_lines(answers: Answers, cases: list[Record]) -> Any:
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name in _contestants(cases):
        points = [
            (case["x"], row["median_ms"])
            for case in cases
            for row in case["rows"]
            if row["contestant"] == name
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=answers.axis, ylabel="median time, ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.legend()
    return figure


def _draw_curves(name: str, answers: Answers) -> Any:
    curves = [curve for curve in answers.curves if curve["name"] == name]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for curve in curves:
        axes.plot(
            curve["xs"],
            curve["ys"],
            label=curve["contestant"],
            marker="o" if len(curve["xs"]) < 8 else None,
        )
    for limit in {
        curve["counts"][LIMIT] for curve in curves if LIMIT in curve["counts"]
    }:
        axes.axhline(
            limit,
            color="black",
            linewidth=1,
            linestyle="--",
            label=f"a limit of {limit:.0f} MiB",
        )
    axes.set(title=name, xlabel=curves[0]["x_label"], ylabel=curves[0]["y_label"])
    axes.legend()
    return figure


def _contestants(cases: list[Record]) -> list[str]:
    return list(
        dict.fromkeys(row["contestant"] for case in cases for row in case["rows"])
    )


def _spread(rows: list[Record]) -> list[list[float]]:
    return [
        [row["ratio"] - row["ratio_low"] for row in rows],
        [row["ratio_high"] - row["ratio"] for row in rows],
    ]
