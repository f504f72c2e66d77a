"""What an open window depends on beside its state, as an array in the state: a checkpoint of any format then holds it.

Each micro-batch writes it, so that it says what the window was last added to under.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from gradaccum.kit import Options, State, decode_terms, encode_terms, resumed, select, steps_at, terms_of
from gradaccum_jax.state import AccumulationState, fields_of, with_fields

STEPS = 3
"""The place of ``steps`` among the codes."""


def first_terms(options: Options) -> Any:
    """Those before the first micro-batch; the steps of a callable are not asked for yet. int32, shape (4,)."""
    steps = options.steps
    return now(options, None if callable(steps) else steps_at(steps, 0, select))


def now(options: Options, steps: Any) -> Any:
    """The codes of the open window's terms: int32, shape (4,).

    Args:
        options: the optimizer's.
        steps: the size of the window, traced or not; None: the caller closes it.
    """
    codes = encode_terms(terms_of(options._replace(steps=None), 0))
    known = jnp.asarray(codes, jnp.int32)
    return known if steps is None else jnp.where(np.arange(len(codes)) == STEPS, jnp.asarray(steps, jnp.int32), known)


def resume(state: AccumulationState, options: Options) -> AccumulationState:
    """The state to go on with under `options`, of a restored one; looks at values.

    Raises:
        CheckpointError: a window is open, and one of its terms is another here.
    """
    steps = options.steps
    concrete = options._replace(steps=lambda step: steps(jnp.asarray(step, jnp.int32))) if callable(steps) else options
    saved = State(*(np.asarray(field).item() for field in fields_of(state)))
    fields = resumed(saved, decode_terms(np.asarray(state.terms).tolist()), concrete)
    own = jnp.asarray(encode_terms(terms_of(concrete, fields.optimizer_step)), jnp.int32)
    return (state if fields == saved else with_fields(state, fields))._replace(terms=own)
