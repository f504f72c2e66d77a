"""An epoch's last windows in three loops of torch: how large each update is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradaccum
from benchmarks.pictures.drawing import (
    INK,
    LARGE,
    OURS,
    PALE,
    SMALL,
    USUAL,
    figure_of,
)

FILE = "gradaccum/figures/usual_loop.svg"
STEPS = 4
RATE = 0.05
WINDOWS = ((8, 8, 8, 8), (8, 1, 8, 1), (2, 8, 8, 1), (8, 4))
"""Items of the micro-batches; the last window is short."""
Batches = Sequence[tuple[Tensor, Tensor]]
Model = nn.Module


class Sizes(NamedTuple):
    """By loop, the length of each window's update."""

    large: list[float]
    ours: list[float]
    usual: list[float]


def sizes() -> Sizes:
    """Train three times from the same start, on the same items."""
    return Sizes(*(_lengths(loop) for loop in (large_batch, wrapped, by_hand)))


def by_hand(model: Model, loader: Batches) -> Iterator[None]:
    optimizer = _sgd(model)
    for index, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / STEPS
        loss.backward()  # type: ignore[no-untyped-call]
        if (index + 1) % STEPS == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
        yield


def wrapped(model: Model, loader: Batches) -> Iterator[None]:
    optimizer = gradaccum.wrap(_sgd(model), steps=STEPS)
    for x, y in optimizer.epoch(loader):
        optimizer.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
        yield
    yield  # the last window ended with the loader


def large_batch(model: Model, loader: Batches) -> Iterator[None]:
    optimizer = _sgd(model)
    for start in range(0, len(loader), STEPS):
        pairs = zip(*loader[start : start + STEPS], strict=True)
        x, y = map(torch.cat, pairs)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def _lengths(loop: Callable[[Model, Batches], Iterator[None]]) -> list[float]:
    torch.manual_seed(1)
    model = nn.Linear(6, 1).double()
    x = torch.randn(sum(map(sum, WINDOWS)), 6, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin() * 2 + 1
    items = [count for window in WINDOWS for count in window]
    loader = list(zip(torch.split(x, items), torch.split(y, items), strict=True))
    lengths = []
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _ in loop(model, loader):
        now = nn.utils.parameters_to_vector(model.parameters()).detach()
        if not torch.equal(now, before):
            lengths.append(float((now - before).norm()))
        before = now
    return lengths


def _sgd(model: Model) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def picture() -> tuple[Figure, str]:
    """The picture and its description."""
    shown = sizes()
    return draw(shown), description(shown)


def description(shown: Sizes) -> str:
    loops = {
        "large batch": shown.large,
        "gradaccum": shown.ours,
        "usual loop": shown.usual,
    }
    return "; ".join(
        f"{name}: {', '.join(f'{length:.4f}' for length in lengths)}"
        for name, lengths in loops.items()
    )


def draw(shown: Sizes) -> Figure:
    figure, axes = figure_of(3.6)
    loops = {
        "large batch": (shown.large, LARGE),
        "gradaccum": (shown.ours, OURS),
        "usual loop": (shown.usual, USUAL),
    }
    for index, (name, (lengths, color)) in enumerate(loops.items()):
        places = [place + 0.27 * (index - 1) for place in range(len(WINDOWS))]
        axes.bar(places, lengths, width=0.25, color=color, label=name)
    for place, (large, usual) in enumerate(zip(shown.large, shown.usual, strict=True)):
        ratio = usual / large
        axes.annotate(
            f"x {ratio:.2f}",
            (place + 0.15, usual),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=SMALL,
            color=PALE if abs(ratio - 1) < 1e-6 else INK,
        )
    windows = [" ".join(map(str, window)) for window in WINDOWS]
    axes.set_xticks(range(len(WINDOWS)), windows, fontsize=SMALL)
    axes.set_xlabel("an epoch's last windows: items of their micro-batches")
    axes.set_yticks([])
    axes.set_ylabel("length of the update")
    axes.margins(y=0.12)
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=3,
        frameon=False,
        fontsize=SMALL,
        handlelength=1,
        columnspacing=1,
    )
    return figure
