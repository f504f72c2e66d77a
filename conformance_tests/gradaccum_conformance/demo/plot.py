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


def write_plot(path: Path, curves: Sequence[Curve]) -> None:
    """Draw the loss after each epoch, and how far the parameters then were from the
    large-batch run's, into a PNG file.
    """
    figure = Figure(figsize=(13, 5.6), dpi=130, layout="constrained")
    losses, differences = figure.subplots(1, 2)
    backends = list(dict.fromkeys(curve.backend for curve in curves))
    for curve in sorted(curves, key=lambda curve: RECIPES.index(curve.recipe)):
        place = backends.index(curve.backend)
        draw_curve(losses, curve, curve.losses, place, len(backends))
        if curve.recipe is not LARGE:
            draw_curve(differences, curve, curve.differences, place, len(backends))
    losses.set(title="Training loss", ylabel="mean cross-entropy (nats)")
    differences.set(
        title="Distance from the large-batch run",
        ylabel="largest absolute difference of a parameter",
    )
    for axes in (losses, differences):
        axes.set(xlabel="epoch", yscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    losses.legend(frameon=False)
    figure.suptitle(
        f"Handwritten digits: batches of {LARGE_BATCH} at once, and accumulated from"
        " micro-batches",
        fontsize=14,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def draw_curve(
    axes: Axes, curve: Curve, values: Sequence[float], place: int, backends: int
) -> None:
    """Draw a line; each framework has its markers at other epochs, so that no marker
    hides another.
    """
    axes.plot(
        range(1, len(values) + 1),
        values,
        label=f"{curve.recipe.name}, {curve.backend}",
        marker=MARKERS[place % len(MARKERS)],
        markevery=(place, backends),
        markeredgecolor="white",
        markersize=7,
        **STYLES[curve.recipe.name],
    )
