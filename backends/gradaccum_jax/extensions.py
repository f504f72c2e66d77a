"""The observers of a window, which do not change it: its loss, and the parameters that
the inner optimizer does not train.
"""

from __future__ import annotations

import functools
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from gradaccum import GradAccumWarning, UsageError, kit
from gradaccum.kit import Options, Scalar, explain
from gradaccum_jax.arrays import DType, Tree, takes_part
from gradaccum_jax.gradient_sum import where_with_derivative_at_zero
from gradaccum_jax.programs import origins
from gradaccum_jax.state import (
    UNKNOWN,
    AccumulationState,
    as_read,
    as_stored,
    like,
)

# The loss of each window, in the fields ``loss`` and ``last_loss`` of the state.
#
# Losses have the derivative that gradients have, at weight 0 too. A loss that was not
# passed is NaN, stored as `state.UNKNOWN` says.


def first_losses(dtype: DType) -> dict[str, Scalar]:
    """Return the fields before the first micro-batch."""
    return {"loss": jnp.zeros((), dtype), "last_loss": jnp.full((), UNKNOWN, dtype)}


def add_loss(
    state: AccumulationState,
    loss: Scalar,
    weight: Scalar,
    adds: Scalar,
    options: Options,
) -> AccumulationState:
    if loss is None:
        total = jnp.where(adds, UNKNOWN, state.loss)
    else:
        where = where_with_derivative_at_zero(adds | (weight == 0))
        known_total = as_read(state.loss)
        total = as_stored(kit.add_loss(known_total, loss, weight, adds, options, where))
    return state._replace(loss=like(total, state.loss))


def close_loss(state: AccumulationState, loss: Scalar) -> AccumulationState:
    """Return the state after a window of this `loss`."""
    last_loss = like(as_stored(loss), state.last_loss)
    return discard_loss(state)._replace(last_loss=last_loss)


def discard_loss(state: AccumulationState) -> AccumulationState:
    return state._replace(loss=like(jnp.zeros_like(state.loss), state.loss))


# Parameters that the inner optimizer does not train.


class FrozenParameters:
    """A refusal, or one warning, of parameters that the inner optimizer does not train,
    but that count in the window's norm.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.has_warned = False

    def update_traced(self, program: Any, accumulator: Tree) -> None:
        """Look at the inner optimizer's closed program."""
        names = frozen_parameters(program, accumulator)
        if not names or not kit.measures(self.options):
            return
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        if (self.options.clip_norm, self.options.skip_norm) != (None, None):
            raise explain(
                UsageError,
                "tx",
                expected="trained parameters alone, as it measures their norm",
                found=f"{names[0]}{more}, which the optimizer does not train",
                fix=FREEZE,
            )
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"gradaccum: the optimizer does not train {names[0]}{more}, whose sum"
                " costs memory and counts in grad_norm and overflow. " + FREEZE,
                GradAccumWarning,
                stacklevel=2,
            )


FREEZE = (
    "Write optax.partition({'trained': gradaccum.wrap(...), 'frozen':"
    " optax.set_to_zero()}, labels); for value_and_update pass frozen parameters in the"
    " batch, with axes=None."
)


def frozen_parameters(program: Any, accumulator: Tree) -> list[str]:
    """Return the paths of parameters whose gradient reaches no result of the inner
    optimizer's closed `program`, or whose update is a constant; none if it is so of
    all.
    """
    leaves = jax.tree_util.tree_flatten_with_path(accumulator)[0]
    result_bits = origins(program.jaxpr, len(leaves))
    reaching_bits = functools.reduce(operator.or_, result_bits, 0)
    places = [
        place
        for place, (_, leaf) in enumerate(leaves)
        if takes_part(leaf) and leaf.shape != (0,)
    ]
    frozen_places = [
        place
        for place in places
        if not reaching_bits & 1 << place or not result_bits[place]
    ]
    if len(frozen_places) == len(places):
        return []
    return [
        f"params{jax.tree_util.keystr(leaves[place][0])}" for place in frozen_places
    ]
