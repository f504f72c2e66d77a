"""The norm at the end of a window: it is as exact as its dtype allows, and finite if
and only if every element is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
from gradaccum_jax.gradient_sum import measure

LARGEST = float(np.finfo(np.float32).max)
compiled_measure = jax.jit(lambda tree: measure(tree, jnp.dtype("float32")))


def norm_of(tree: Any) -> float:
    return float(compiled_measure(tree))


def exact(*tree: Any) -> Any:
    return np.sqrt(sum(np.sum(np.float64(abs(leaf)) ** 2) for leaf in tree))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e35])
def test_norm_of_any_magnitude(size: float) -> None:
    """Of small arrays beside large ones: none is measured twice, none is left out, and
    each is found that holds what is not finite.
    """
    random = np.random.default_rng(1)
    tree = [
        np.asarray(random.uniform(0.5, 1.0, shape) * size, np.float32)
        for shape in [(3,), (7, 11), (), *[(2**14,)] * 17]
    ]
    tree[0] *= 10
    tree[1] = tree[1] * np.complex64(0.6 - 0.8j)
    norm = norm_of([*tree, jnp.zeros((0, 4))])
    assert norm == pytest.approx(exact(*tree), rel=1e-6, abs=0)
    for place in (0, 2, len(tree) - 1):
        for value in (np.inf, -np.inf, np.nan):
            spoiled = [leaf.copy() for leaf in tree]
            spoiled[place].flat[-1] = value
            assert norm_of([*spoiled, jnp.zeros((0, 4))]) == np.inf


def test_norm_of_zeros_and_largest_numbers() -> None:
    assert norm_of([jnp.zeros((3, 4)), jnp.zeros(5)]) == 0.0
    assert norm_of([jnp.full((1024, 64), LARGEST)]) == LARGEST
    assert norm_of([]) == 0.0
    assert norm_of([jnp.ones(1)]) == 1.0
    # All rounding errors of equal elements have one sign.
    equal = [np.full((4, 131101), 0.1, np.float32)] * 2
    assert norm_of(equal) == pytest.approx(exact(*equal), rel=1e-5)


def test_clipped_window_can_be_differentiated() -> None:
    """Its derivative is that of the large batch's clipped gradient."""
    params = jnp.zeros(2)
    gradients = jnp.asarray([[3.0, 1.0], [1.0, 7.0]])
    clip = optax.clip_by_global_norm(1.0)

    def accumulated(gradients):
        tx = gradaccum.wrap(optax.sgd(1.0), steps=2, clip_norm=1.0)
        state = tx.init(params)
        for gradient in gradients:
            updates, state = tx.update(gradient, state, params)
        return -updates

    def large(gradients):
        mean = gradients.mean(0)
        return clip.update(mean, clip.init(params))[0]

    np.testing.assert_allclose(
        jax.jacobian(accumulated)(gradients), jax.jacobian(large)(gradients), rtol=1e-5
    )
