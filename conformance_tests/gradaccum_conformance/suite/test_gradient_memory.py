"""Gradients come in memory that is not the sum's own: it is written over by the next
micro-batch, and shared by parameters.
"""

from itertools import accumulate, pairwise

import numpy as np
import pytest

from gradaccum_conformance.bounds import FLOAT64_RELATIVE, worst
from gradaccum_conformance.harness import Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import start, window_gradient
from gradaccum_conformance.specs import MLP, Array, Arrays

SHAPES = MLP.parameter_shapes()
EDGES = [*accumulate((int(np.prod(shape)) for shape in SHAPES.values()), initial=0)]


def side_by_side(memory: Array) -> Arrays:
    parts = (memory[start:stop] for start, stop in pairwise(EDGES))
    return {
        name: part.reshape(shape)
        for part, (name, shape) in zip(parts, SHAPES.items(), strict=True)
    }


def overlapping(memory: Array) -> Arrays:
    return {
        name: memory[place : place + int(np.prod(shape))].reshape(shape)
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def expanded(memory: Array) -> Arrays:
    """Each gradient is one number, with strides of 0."""
    return {
        name: np.lib.stride_tricks.as_strided(memory[place:], shape, [0] * len(shape))
        for place, (name, shape) in enumerate(SHAPES.items())
    }


def transposed(memory: Array) -> Arrays:
    """Each gradient lies column after column."""
    return {
        name: array.reshape(array.shape[::-1]).T
        for name, array in side_by_side(memory).items()
    }


LAYOUTS = (side_by_side, overlapping, expanded, transposed)
CASES = [
    *((place, {}) for place in range(len(LAYOUTS))),
    (0, {"on_overflow": "ignore"}),
    (0, {"on_overflow": "drop_micro_batch"}),
    (0, {"clip_norm": 1e9}),
]


@pytest.mark.parametrize(("place", "options"), CASES, ids=str)
def test_memory_of_others(
    backend: Harness, errors: Errors, place: int, options: dict[str, Option]
) -> None:
    check(backend, errors, place, **options)


def test_memory_of_others_in_every_mode(
    backend: Harness, mode: str, errors: Errors
) -> None:
    check(backend, errors, 1, mode=mode)


def check(backend: Harness, errors: Errors, place: int, **options: Option) -> None:
    """Two windows, the second after one that has freed or cleared its sum."""
    memory = np.zeros(EDGES[-1])
    tree = LAYOUTS[place](memory)
    session = start(backend, MLP, steps=3, dtype="float64", **options)
    rng = np.random.default_rng(0)
    for window in range(1, 3):
        trees = []
        for _ in range(3):
            memory[...] = rng.standard_normal(memory.size)
            trees.append({name: array.copy() for name, array in tree.items()})
            session.gradients_in(tree)
        captured = session.captured()
        assert captured.calls == window
        errors.check(
            "gradient",
            worst(captured.gradient, window_gradient(trees)),
            FLOAT64_RELATIVE,
        )
