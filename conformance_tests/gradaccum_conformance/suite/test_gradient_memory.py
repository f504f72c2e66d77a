"""Gradients come in memory that is not the sum's own: it is written over by the next
micro-batch, and shared by parameters.
"""

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest

from gradaccum_conformance.bounds import FLOAT64_RELATIVE, worst
from gradaccum_conformance.harness import Harness, Option, View
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import mean_of, start
from gradaccum_conformance.specs import MLP

SHAPES = MLP.parameter_shapes()
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
SIZE = sum(SIZES.values())
STARTS = dict(zip(SHAPES, accumulate(SIZES.values(), initial=0), strict=False))


def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an array that lies row after row."""
    return tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))


def columns(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an array that lies column after column, as the transposed one
    does.
    """
    return tuple(int(np.prod(shape[:axis])) for axis in range(len(shape)))


LAYOUTS: dict[str, Callable[[int, str, tuple[int, ...]], View]] = {
    "side by side": lambda _, name, shape: View(shape, STARTS[name], rows(shape)),
    "one for all": lambda _, name, shape: View(shape, 0, rows(shape)),
    "overlapping": lambda place, name, shape: View(shape, place, rows(shape)),
    "expanded": lambda place, name, shape: View(shape, place, (0,) * len(shape)),
    "transposed": lambda _, name, shape: View(shape, STARTS[name], columns(shape)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_of_others(backend: Harness, errors: Errors, layout: str) -> None:
    check(backend, errors, layout)


@pytest.mark.parametrize(
    "options",
    [
        {"on_overflow": "ignore"},
        {"on_overflow": "drop_micro_batch"},
        {"clip_norm": 1e9},
    ],
    ids=str,
)
def test_memory_of_others_under_options(
    backend: Harness, errors: Errors, options: dict[str, Option]
) -> None:
    check(backend, errors, "side by side", **options)


def test_memory_of_others_in_every_mode(
    backend: Harness, mode: str, errors: Errors
) -> None:
    check(backend, errors, "one for all", mode=mode)


def check(backend: Harness, errors: Errors, layout: str, **options: Option) -> None:
    """Two windows, the second after one that has freed or cleared its sum."""
    views = {
        name: LAYOUTS[layout](place, name, shape)
        for place, (name, shape) in enumerate(SHAPES.items())
    }
    session = start(backend, MLP, steps=3, dtype="float64", **options)
    rng, memory = np.random.default_rng(0), np.zeros(SIZE)
    for window in range(1, 3):
        trees = []
        for _ in range(3):
            memory[...] = rng.standard_normal(SIZE)
            trees.append({name: view.of(memory).copy() for name, view in views.items()})
            session.gradients_in(memory, views)
        captured = session.captured()
        assert captured.calls == window
        assert captured.gradient is not None
        errors.check(
            f"gradient, {layout}",
            worst(captured.gradient, mean_of(trees)),
            FLOAT64_RELATIVE,
        )
