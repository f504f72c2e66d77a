"""The row of Flax: `nnx.Optimizer` of `optax.MultiSteps`, the way of its optimization
cookbook. Its examples do not accumulate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.optax_rows import ITEMS, LABELS, PART, X, kept, parts


def cookbook(*, micro: bool, even: bool) -> Gradients:
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    optimizer = nnx.Optimizer(
        model,
        optax.MultiSteps(optax.sgd(1.0), ITEMS // PART if micro else 1),
        wrt=nnx.Param,
    )

    def loss_fn(model: Any, x: Any, labels: Any, mask: Any) -> Any:
        return (
            optax.softmax_cross_entropy_with_integer_labels(model(x), labels) * mask
        ).sum() / mask.sum()

    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for batch in parts((X, LABELS, kept(even)), micro):
        optimizer.update(model, nnx.grad(loss_fn)(model, *batch))
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {name: before[name] - np.asarray(after[name]) for name in before}
