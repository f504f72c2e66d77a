"""torch, float32: what a window costs beside the loop that people write by hand, and
beside Accelerate, Fabric and Keras.

Without clipping the hand-written loop promises less: gradaccum also measures the
window's norm, so that an inf or NaN skips the update, and watches ``.grad``.
``on_overflow="ignore"`` leaves the norm out. ``benchmarks/README.md`` counts what that
must cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.contestants.torch_least import least, least_separate
from benchmarks.contestants.torch_loops import (
    BASELINE,
    DEVICE,
    STEPS,
    Recipe,
    Window,
    accelerate,
    fabric,
    hand_written,
    recipes,
    wrapped,
)

ITEMS = 8
CLIP = 1e-3
SIZES = {
    "10 k parameters": (50, 4),
    "1 M parameters": (512, 4),
    "10 M parameters": (1600, 4),
    "100 M parameters": (5000, 4),
}
"""(width, layers) of an MLP of square layers."""
CLIPPING: dict[str, Recipe] = {
    BASELINE: lambda model, inner, loss: hand_written(model, inner, loss, CLIP),
    "gradaccum": lambda model, inner, loss: wrapped(model, inner, loss, clip_norm=CLIP),
    "Accelerate": lambda model, inner, loss: accelerate(model, inner, loss, CLIP),
    "Fabric": lambda model, inner, loss: fabric(model, inner, loss, CLIP),
}
SEPARATE: Recipe = partial(wrapped, separate_sums=True)
"""The sum beside ``.grad``: one pass over the gradients more per micro-batch, and one
buffer.
"""

DROPPING: Recipe = partial(wrapped, on_overflow="drop_micro_batch")
"""A look at each micro-batch before it is added to the sum."""

IGNORING: Recipe = partial(wrapped, on_overflow="ignore")
"""No norm and no finite check: what the hand-written loop promises, and the watch over
``.grad``.
"""


def cases(quick: bool) -> Iterator[Case]:
    for name, (width, layers) in list(SIZES.items())[: 2 if quick else None]:
        x = torch.randn(ITEMS, width, device=DEVICE)
        for kind in ("foreach", "fused"):
            windows = {
                label: _window(recipe, width, layers, kind, x)
                for label, recipe in recipes().items()
            }
            windows["gradaccum, ignoring overflow"] = _window(
                IGNORING, width, layers, kind, x
            )
            windows["the least with its promises"] = _window(
                least, width, layers, kind, x
            )
            windows["gradaccum, separate_sums"] = _window(
                SEPARATE, width, layers, kind, x
            )
            windows["gradaccum, drop_micro_batch"] = _window(
                DROPPING, width, layers, kind, x
            )
            windows["the least with separate_sums"] = _window(
                least_separate, width, layers, kind, x
            )
            if kind == "foreach" and find_spec("keras") and width <= 512:
                windows["Keras"] = _keras(width, layers, x)
            yield Case(f"{name}, {kind}", BASELINE, windows)
            yield Case(
                f"{name}, {kind}, clipped", BASELINE, _clipped(width, layers, kind, x)
            )


def _clipped(width: int, layers: int, kind: str, x: Tensor) -> dict[str, Window]:
    found = {label: CLIPPING[label] for label in recipes()}
    return {
        label: _window(recipe, width, layers, kind, x)
        for label, recipe in found.items()
    }


def _window(recipe: Recipe, width: int, layers: int, kind: str, x: Tensor) -> Window:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width) for _ in range(layers))
    ).to(DEVICE)
    inner = torch.optim.AdamW(
        model.parameters(), lr=1e-4, foreach=kind == "foreach", fused=kind == "fused"
    )
    return recipe(model, inner, lambda model: model(x).square().mean())


def _keras(width: int, layers: int, x: Tensor) -> Window:
    """Keras on torch, with its optimizers' ``gradient_accumulation_steps``, in a loop
    of one's own as its guide for torch shows.
    """
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    model = keras.Sequential(
        [keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(layers))]
    )
    optimizer = keras.optimizers.AdamW(
        1e-4, weight_decay=0.01, gradient_accumulation_steps=STEPS
    )
    variables = model.trainable_variables
    optimizer.build(variables)

    def window() -> None:
        for _ in range(STEPS):
            model.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                optimizer.apply(
                    [variable.value.grad for variable in variables], variables
                )

    return window
