"""torch, models of 10 k parameters: how much of a window's time each promise takes.

Each contestant keeps the promises of the contestant before it except for one. The
contestants exist for this measurement only: they reach into the window's private parts,
and none of them is safe to train with. The last contestant is the least Python that
keeps all promises of gradaccum's default options but the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    Recipe,
    Window,
    hand_written,
    wait,
    wrapped,
)
from gradaccum_torch.optimizer import AccumulatingOptimizer

ITEMS = 8
SIZES = {"10 k parameters": (50, 4), "1 M parameters": (512, 4)}
"""(width, layers) of an MLP of square layers."""

Removal = Callable[[AccumulatingOptimizer], None]


def no_warnings(optimizer: AccumulatingOptimizer) -> None:
    """No window loss, and no warning about a learning rate that changes inside a
    window, about a divided loss, or about a loop that still counts by itself.
    """
    optimizer._window.extensions = []


def no_watch(optimizer: AccumulatingOptimizer) -> None:
    """Clipping, clearing or an interrupted backward pass inside a window would give a
    wrong gradient without an error.
    """
    window = optimizer._window
    window.watch.follow([])
    window._require_right_gradient = lambda weight: None  # type: ignore[method-assign]


def without(*removals: Removal) -> Recipe:
    """Return a loop with a wrapped optimizer, from which `removals` have taken some of
    its promises.
    """

    def recipe(model: nn.Module, inner: torch.optim.Optimizer, loss: Loss) -> Window:
        optimizer = gradaccum.wrap(inner, steps=STEPS, on_overflow="ignore")
        for remove in removals:
            remove(optimizer)

        def window() -> None:
            for _ in range(STEPS):
                loss(model).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            wait()

        return window

    return recipe


CONTESTANTS: dict[str, Recipe] = {
    BASELINE: hand_written,
    "gradaccum": wrapped,
    "without the norm": without(),
    "and without warnings": without(no_warnings),
    "and without the watch over .grad": without(no_warnings, no_watch),
    "the least with the watch": least,
}


def cases(quick: bool) -> Iterator[Case]:
    for name, (width, layers) in list(SIZES.items())[: 1 if quick else None]:
        x = torch.randn(ITEMS, width, device=DEVICE)
        for kind in ("foreach", "fused"):
            windows = {
                label: _window(recipe, width, layers, kind, x)
                for label, recipe in CONTESTANTS.items()
            }
            yield Case(f"{name}, {kind}", BASELINE, windows)


def _window(recipe: Recipe, width: int, layers: int, kind: str, x: Tensor) -> Window:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(DEVICE)
    inner = torch.optim.AdamW(
        model.parameters(), lr=1e-4, foreach=kind == "foreach", fused=kind == "fused"
    )
    return recipe(model, inner, lambda model: model(x).square().mean())
