"""optax's `MultiSteps` and `microbatch`: one update of micro-batches is the update of
the large batch, for token means of ragged items and for a short last window.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

RANDOM = np.random.default_rng(1)
X = jnp.asarray(RANDOM.standard_normal((8, 6, 5)))
LABELS = jnp.asarray(RANDOM.integers(0, 3, (8, 6)))
KERNEL = jnp.asarray(RANDOM.standard_normal((5, 3)))
RAGGED = jnp.arange(6) < (2 + jnp.arange(8) % 5)[:, None]
FULL = jnp.ones((8, 6), bool)


def mean_loss(kernel: Any, x: Any, labels: Any, mask: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ kernel, labels)
    return (losses * mask).sum() / mask.sum()


def check_multi_steps(batch: tuple[Any, ...]) -> None:
    tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=4)
    kernel = KERNEL
    state = tx.init(kernel)
    for start in range(0, len(batch[0]), 2):
        micro_batch = (leaf[start : start + 2] for leaf in batch)
        gradient = jax.grad(mean_loss)(kernel, *micro_batch)
        updates, state = tx.update(gradient, state, kernel)
        kernel = optax.apply_updates(kernel, updates)
    large = -0.1 * jax.grad(mean_loss)(KERNEL, *batch)
    np.testing.assert_allclose(kernel - KERNEL, large, rtol=1e-4, atol=1e-6)


def test_multi_steps_of_equal_items() -> None:
    check_multi_steps((X, LABELS, FULL))


def test_multi_steps_of_ragged_items() -> None:
    check_multi_steps((X, LABELS, RAGGED))


def test_multi_steps_of_a_short_window() -> None:
    check_multi_steps((X[:6], LABELS[:6], FULL[:6]))


def test_microbatch_of_means() -> None:
    mean = optax.microbatching.AccumulationType.MEAN
    gradient = optax.microbatch(jax.grad(mean_loss), (1, 2, 3), 2, mean)
    large = jax.grad(mean_loss)(KERNEL, X, LABELS, RAGGED)
    accumulated = gradient(KERNEL, X, LABELS, RAGGED)
    np.testing.assert_allclose(accumulated, large, rtol=1e-4, atol=1e-6)
