"""Closing and forgetting a window by hand."""

from __future__ import annotations

from typing import Any

from gradaccum_jax.backend import require_accumulation
from gradaccum_jax.state import AccumulationState
from gradaccum_jax.variables import plain


def flush(tx: Any, state: AccumulationState, params: Any = None, **extra: Any) -> tuple[Any, AccumulationState]:
    """Close the open window: the update that its micro-batches amount to, divided by what it holds.

    An empty window changes nothing; its `result` has ``applied`` and ``skipped`` False. Where `tx` stands inside an
    `optax.chain`, wrap the whole chain instead, which flushes as one; or else flush its own part and pass the updates through what
    follows it in the chain:

        updates, states[i] = gradaccum_jax.flush(tx, states[i], params)
        updates, states[i + 1] = following.update(updates, states[i + 1], params)

    Args:
        tx: what `gradaccum.wrap` returned.
        state: its state; flax nnx's ``optimizer.opt_state`` too, as in the recipes.
        params: the parameters, if the inner optimizer wants them, and with master weights. They say the dtype of half-precision updates:
            nobody knows here whether the gradients were float32, so give a float32 copy to get float32 updates of those.
        extra: passed on to the inner optimizer.

    Returns:
        The updates, zeros if none was made, and the new state.

    Raises:
        ArgumentTypeError: `tx` is not wrapped, `state` is not its state, or `params` are missing.
    """
    return require_accumulation(tx).flush(plain(state), plain(params), **extra)


def discard(tx: Any, state: AccumulationState) -> AccumulationState:
    """Forget the open window: no update, nothing counted, the loss scale untouched.

    Raises:
        ArgumentTypeError: `tx` is not wrapped, or `state` is not its state.
    """
    return require_accumulation(tx).discard(plain(state))
