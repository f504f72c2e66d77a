"""`nnx.Optimizer` of `optax.MultiSteps`, as Flax's cookbook accumulates: one update of
ragged micro-batches is the update of the large batch.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def test_multi_steps_of_ragged_items() -> None:
    random = np.random.default_rng(1)
    x = jnp.asarray(random.standard_normal((8, 6, 5)), jnp.float32)
    labels = jnp.asarray(random.integers(0, 3, (8, 6)))
    mask = jnp.arange(6) < (2 + jnp.arange(8) % 5)[:, None]

    def loss_fn(model: Any, x: Any, labels: Any, mask: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), labels)
        return (losses * mask).sum() / mask.sum()

    kernels = []
    for size, steps in ((8, 1), (2, 4)):
        model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
        tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=steps)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for start in range(0, 8, size):
            part = slice(start, start + size)
            gradients = nnx.grad(loss_fn)(model, x[part], labels[part], mask[part])
            optimizer.update(model, gradients)
        kernels.append(np.asarray(model.kernel[...]))
    np.testing.assert_allclose(kernels[1], kernels[0], rtol=1e-4, atol=1e-6)
