"""torch: how much of a window's time each promise takes, in small models and for a
sparse embedding.

Each contestant keeps the promises of the contestant before it except for one. The
contestants exist for this measurement only: they reach into the window's private parts,
and none of them is safe to train with. The last contestant of the small models is the
least Python that keeps the watch over ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
from benchmarks.case import Case
from benchmarks.contestants.torch_least import least
from benchmarks.contestants.torch_loops import (
    BASELINE,
    DEVICE,
    STEPS,
    Loss,
    Window,
    hand_written,
    without_accumulation,
)
from gradaccum_torch.optimizer import AccumulatingOptimizer

ITEMS = 8
SIZES = {"10 k parameters": (50, 4), "1 M parameters": (512, 4)}
"""(width, layers) of an MLP of square layers."""

SPARSE_STEPS = (1, 4, 8)
ROWS = 10_000
COLUMNS = 64
LOOKUPS = 256

Removal = Callable[[AccumulatingOptimizer], None]
Recipe = Callable[[nn.Module, torch.optim.Optimizer, Loss, int], Window]


def no_warnings(optimizer: AccumulatingOptimizer) -> None:
    """No window loss, and no warning about a learning rate that changes inside a
    window, about a divided loss, or about a loop that still counts by itself.
    """
    optimizer._window.extensions = []


def no_watch(optimizer: AccumulatingOptimizer) -> None:
    """Without the checks in ``step``, a missing or interrupted backward pass, a loss
    that was not scaled, and a ``.grad`` that was clipped or cleared inside a window
    would all give a wrong gradient without an error.
    """
    window = optimizer._window
    window.watch.follow([])
    window._require_right_gradient = lambda weight: None  # type: ignore[method-assign]


def wrapped(*removals: Removal, **options: Any) -> Recipe:
    """Return a recipe with a wrapped optimizer, from which `removals` have taken some
    of its promises.
    """

    def recipe(
        model: nn.Module, inner: torch.optim.Optimizer, loss: Loss, steps: int
    ) -> Window:
        optimizer = gradaccum.wrap(inner, steps=steps, **options)
        for remove in removals:
            remove(optimizer)
        return without_accumulation(model, optimizer, loss, steps)

    return recipe


CONTESTANTS: dict[str, Recipe] = {
    BASELINE: lambda model, inner, loss, steps: hand_written(
        model, inner, loss, steps=steps
    ),
    "gradaccum": wrapped(),
    "without the norm": wrapped(on_overflow="ignore"),
    "and without warnings": wrapped(no_warnings, on_overflow="ignore"),
    "and without the watch over .grad": wrapped(
        no_warnings, no_watch, on_overflow="ignore"
    ),
}


def cases(quick: bool) -> Iterator[Case]:
    for name, (width, layers) in list(SIZES.items())[: 1 if quick else None]:
        x = torch.randn(ITEMS, width, device=DEVICE)
        for kind in ("foreach", "fused"):
            windows = {
                label: _window(recipe, width, layers, kind, x)
                for label, recipe in CONTESTANTS.items()
            }
            windows["the least with the watch"] = _window(
                lambda model, inner, loss, steps: least(model, inner, loss),
                width,
                layers,
                kind,
                x,
            )
            yield Case(f"{name}, {kind}", BASELINE, windows)
    for steps in SPARSE_STEPS:
        windows = {
            label: _sparse_window(recipe, steps)
            for label, recipe in CONTESTANTS.items()
        }
        yield Case(f"sparse embedding, windows of {steps}", BASELINE, windows)


def _sparse_window(recipe: Recipe, steps: int) -> Window:
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, COLUMNS, sparse=True, device=DEVICE)
    inner = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    index = torch.randint(ROWS, (LOOKUPS,), device=DEVICE)
    return recipe(model, inner, lambda model: model(index).square().mean(), steps)


def _window(recipe: Recipe, width: int, layers: int, kind: str, x: Tensor) -> Window:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(DEVICE)
    inner = torch.optim.AdamW(
        model.parameters(), lr=1e-4, foreach=kind == "foreach", fused=kind == "fused"
    )
    return recipe(model, inner, lambda model: model(x).square().mean(), STEPS)
