"""Gradient accumulation for JAX and optax. `gradaccum.wrap` wraps an
`optax.GradientTransformation`:

tx = gradaccum.wrap(optax.adamw(1e-3), steps=4)
state = tx.init(params)
updates, state = tx.update(grads, state, params)   # zeros until the fourth micro-batch
params = optax.apply_updates(params, updates)
"""

from gradaccum_jax.backend import backend as backend
from gradaccum_jax.backend import wrap
from gradaccum_jax.large_batch.coupled import coupled_value_and_grad
from gradaccum_jax.large_batch.value_and_grad import value_and_grad, value_and_update
from gradaccum_jax.layered import layered_value_and_update
from gradaccum_jax.master_weights import apply_updates
from gradaccum_jax.multisteps import MultiSteps
from gradaccum_jax.optimizer import discard, epoch, flush
from gradaccum_jax.recording import LoopRecorder
from gradaccum_jax.saving import check_state
from gradaccum_jax.state import AccumulationState, describe, result, scale_loss
from gradaccum_jax.workers.data_parallel import data_parallel
from gradaccum_jax.workers.layout import redistributed

__all__ = [
    "AccumulationState",
    "LoopRecorder",
    "MultiSteps",
    "apply_updates",
    "check_state",
    "coupled_value_and_grad",
    "data_parallel",
    "describe",
    "discard",
    "epoch",
    "flush",
    "layered_value_and_update",
    "redistributed",
    "result",
    "scale_loss",
    "value_and_grad",
    "value_and_update",
    "wrap",
]
