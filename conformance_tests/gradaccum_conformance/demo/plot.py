"""The demo's picture: every run of every framework in one pair of axes.

Colour and width tell the run: later lines are thinner, so that the earlier ones stay
visible below. The marker tells the framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gradaccum_conformance.demo.batches import LARGE_BATCH
from gradaccum_conformance.demo.curves import Curve
from gradaccum_conformance.demo.recipes import EQUAL, LARGE, NAIVE, RECIPES, UNEQUAL

STYLES: dict[str, dict[str, Any]] = {
    LARGE.name: {"color": "#c4c4c4", "linewidth": 8.0},
    EQUAL.name: {"color": "#56b4e9", "linewidth": 4.0},
    UNEQUAL.name: {"color": "#00405e", "linewidth": 1.5},
    NAIVE.name: {"color": "#d55e00", "linewidth": 1.5},
}
MARKERS = "os^Dv*XP"
MARKER_POINTS = 7
INCHES = (13, 5.6)
DOTS_PER_INCH = 130


def write_plot(path: Path, curves: Sequence[Curve]) -> None:
    """Draw the curves into a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    make_figure(curves).savefig(path, format="png")


def make_figure(curves: Sequence[Curve]) -> Figure:
    """The loss after each epoch, and how far the parameters then were from the
    large-batch run's.
    """
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    losses, differences = figure.subplots(1, 2)
    _draw(
        losses,
        curves,
        "losses",
        title="Training loss",
        label="mean cross-entropy (nats)",
    )
    rest = [curve for curve in curves if curve.recipe is not LARGE]
    _draw(
        differences,
        rest,
        "differences",
        title="Distance from the large-batch run",
        label="largest absolute difference of a parameter",
    )
    figure.suptitle(
        f"Handwritten digits: batches of {LARGE_BATCH} at once, and accumulated from"
        " micro-batches",
        fontsize=14,
    )
    losses.legend(handles=_framework_handles(curves), title="framework", frameon=False)
    figure.legend(
        handles=_run_handles(curves),
        loc="outside lower center",
        ncols=len(RECIPES),
        frameon=False,
    )
    return figure


def _draw(
    axes: Axes, curves: Sequence[Curve], field: str, *, title: str, label: str
) -> None:
    backends = _backends(curves)
    for recipe in RECIPES:
        for index, backend in enumerate(backends):
            for curve in curves:
                if (curve.recipe, curve.backend) == (recipe, backend):
                    _draw_curve(
                        axes,
                        getattr(curve, field),
                        index,
                        len(backends),
                        STYLES[recipe.name],
                    )
    axes.set(title=title, xlabel="epoch", ylabel=label, yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curve(
    axes: Axes,
    values: Sequence[float],
    index: int,
    backends: int,
    style: dict[str, Any],
) -> None:
    """Each framework has its markers at other epochs, so that no marker hides
    another.
    """
    marker: dict[str, Any] = {
        "marker": MARKERS[index % len(MARKERS)],
        "markevery": (index, backends),
        "markeredgecolor": "white",
    }
    axes.plot(
        range(1, len(values) + 1), values, markersize=MARKER_POINTS, **marker, **style
    )


def _run_handles(curves: Sequence[Curve]) -> list[Line2D]:
    runs = [
        recipe.name
        for recipe in RECIPES
        if any(curve.recipe is recipe for curve in curves)
    ]
    return [Line2D([], [], label=run, **STYLES[run]) for run in runs]


def _framework_handles(curves: Sequence[Curve]) -> list[Line2D]:
    return [
        Line2D(
            [],
            [],
            label=name,
            marker=MARKERS[index % len(MARKERS)],
            color="#555555",
            linestyle="none",
            markersize=MARKER_POINTS,
        )
        for index, name in enumerate(_backends(curves))
    ]


def _backends(curves: Sequence[Curve]) -> list[str]:
    return list(dict.fromkeys(curve.backend for curve in curves))
