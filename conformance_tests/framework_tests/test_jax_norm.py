"""The norm at the end of a window: it is as exact as its dtype allows, and finite if
and only if every element is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum_jax.gradient_sum import measure

LARGEST = float(np.finfo(np.float32).max)
SHAPES = [
    (),
    (1,),
    (7,),
    (1000,),
    (3, 5),
    (32, 48),
    (50257,),
    (3, 3, 16, 8),
    (2, 1031),
    (4, 131101),
    (1024, 1024),
]
"""Sizes with and without a power of two as a factor. 131101 is prime."""


compiled_measure = jax.jit(lambda tree: measure(tree, jnp.dtype("float32")))


def measured(tree: Any) -> tuple[float, bool]:
    norm, finite = compiled_measure(tree)
    return float(norm), bool(finite)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["equal", "random"])
def test_norm_is_exact_enough(shape: tuple[int, ...], kind: str) -> None:
    """Equal elements are the worst case: all rounding errors have one sign."""
    values = (
        np.full(shape, 0.1)
        if kind == "equal"
        else np.random.default_rng(0).normal(0.3, 1.0, shape)
    )
    held = np.asarray(values, np.float32)
    assert measured([held])[0] == pytest.approx(
        np.linalg.norm(held.astype(np.float64)), rel=1e-5
    )


def test_norm_of_any_magnitude() -> None:
    """Of large arrays beside a small one."""
    for size in (1e-30, 1e-20, 1.5e-19, 1e-13, 1.0, 1e15, 1e25, 1e36):
        values = np.random.default_rng(1).uniform(0.5, 1.0, (200, 100)).astype(
            np.float32
        ) * np.float32(size)
        small = np.full((5, 3), size * 10, np.float32)
        norm, finite = measured([values, small, values, jnp.zeros((0, 4))])
        expected = np.sqrt(
            sum(
                np.sum(leaf.astype(np.float64) ** 2) for leaf in (values, small, values)
            )
        )
        assert (norm, finite) == (pytest.approx(expected, rel=1e-6, abs=0), True)


def test_norm_of_zeros_and_largest_numbers() -> None:
    assert measured([jnp.zeros((3, 4)), jnp.zeros(5)]) == (0.0, True)
    assert measured([jnp.full((1024, 64), LARGEST)]) == (LARGEST, True)
    assert measured([]) == (0.0, True)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("beside", [1.0, 1e-30, 1e37, 0.0])
def test_norm_finds_any_nonfinite_element(value: float, beside: float) -> None:
    for columns, index in ((16, 0), (16, 47), (2**13, 17)):
        spoiled = jnp.full((3, columns), beside).at[index // 16, index % 16].set(value)
        assert measured([jnp.full(5, beside), spoiled]) == (np.inf, False)


def test_norm_that_tells_nothing_has_no_derivative() -> None:
    derivative = jax.jit(
        jax.grad(lambda total: measure([total], jnp.dtype("float32")).norm)
    )
    for value in (0.0, np.inf, np.nan):
        assert derivative(jnp.array([value, 0.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("size", [1e-30, 1e-13, 1.0, 1e25])
def test_norm_of_many_arrays(size: float) -> None:
    """None is measured twice, none is left out."""
    random = np.random.default_rng(2)
    tree = [
        random.uniform(0.5, 1.0, shape).astype(np.float32) * np.float32(size)
        for shape in [(3,), (7, 11), (), *[(2**14,)] * 17]
    ]
    expected = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in tree))
    norm, finite = measured(tree)
    assert finite
    assert norm == pytest.approx(expected, rel=1e-6, abs=0)
    for index in (0, 2, len(tree) - 1):
        spoiled = [
            np.full_like(leaf, np.nan) if place == index else leaf
            for place, leaf in enumerate(tree)
        ]
        assert measured(spoiled) == (np.inf, False)
