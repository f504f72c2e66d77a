"""A user's training script for JAX: a type checker names each line that ends in
`# wrong`, and no other line.
"""

import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

params = {"w": jnp.ones(3)}
tx = gradaccum.wrap(
    optax.adamw(1e-3),
    steps=4,
    reduction="sum_per_item",
    clip_norm=1.0,
    axis_name="data",
)
state = tx.init(params)
updates, state = tx.update(params, state, params, weight=3)
params = optax.apply_updates(params, updates)
assert gradaccum_jax.result(state).applied
assert state.optimizer_step == 3
updates, state = gradaccum_jax.flush(tx, state, params)
state = gradaccum_jax.discard(tx, state)
assert state.micro_step == 0
plain: optax.GradientTransformationExtraArgs = tx
typed = gradaccum_jax.wrap(
    optax.sgd(0.1), steps=gradaccum.until_weight(4096), master_weights=True
)
typed.init(params)

tx.initialise(params)  # wrong, but not to mypy
tx.flush(state, params)  # wrong, but not to mypy
print(state.optimiser_step)  # wrong
typed.initialise(params)  # wrong, but not to mypy
gradaccum.wrap(optax.sgd(0.1), steps="four")  # wrong
gradaccum.wrap(optax.sgd(0.1))  # wrong, but not to mypy
gradaccum.wrap(3, steps=4)  # wrong
gradaccum.wrap(optax.adamw, steps=4)  # wrong, but not to mypy
gradaccum.wrap(optax.sgd(0.1), steps=4, clip_nrom=1.0)  # wrong
gradaccum_jax.wrap(optax.sgd(0.1), steps=4, separate_sums=True)  # wrong
gradaccum_jax.wrap(3, steps=4)  # wrong, but not to mypy
