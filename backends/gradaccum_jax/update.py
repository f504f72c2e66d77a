"""The end of a window: the inner optimizer, run once or not at all, with no second buffer of the parameters' size.

The accumulator doubles as the buffer of the update: where the inner optimizer runs, its update takes the accumulator's place;
where it does not, the accumulator passes through. Two selects then tell them apart. The parameters are closed over, not
carried. So XLA works in place, and an idle micro-batch costs the addition and those selects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum_jax.control_flow import ControlFlow, once
from gradaccum_jax.dtypes import takes_part, wider
from gradaccum_jax.sums import cast_like
from gradaccum_jax.trip import named_axes


class Kinds(NamedTuple):
    """What a trace of the inner optimizer says."""

    updates: Any
    """The tree of the updates' shapes and dtypes."""
    axes: frozenset[str]
    """The named axes that it reduces over."""


class Inner(NamedTuple):
    """A call of the inner optimizer that may be made."""

    update: Callable[..., tuple[Any, Any]]
    """``update(gradients, state, params, **extra)``: the optimizer's."""
    gradients: Callable[[Any], Any]
    """The gradient tree for it, from the accumulator."""
    like: list[Any]
    """The dtypes of gradients for which the updates would have the dtypes they are to have; see `dtypes.Handed`."""
    params: Any
    extra: dict[str, Any]
    control_flow: ControlFlow

    def run(self, accumulator: Any, state: Any) -> tuple[Any, Any]:
        return self.update(self.gradients(accumulator), state, self.params, **self.extra)

    def kinds(self, accumulator: Any, state: Any) -> Kinds:
        """What is known of the call while JAX traces. A parameter that takes no part keeps its dtype: its update is 0."""

        def made(accumulator: Any, state: Any) -> Any:
            leaves, structure = jax.tree.flatten(self.gradients(accumulator))
            gradients = [leaf.astype(dtype) for leaf, dtype in zip(leaves, self.like, strict=True)]
            return self.update(jax.tree.unflatten(structure, gradients), state, self.params, **self.extra)[0]

        traced, updates = jax.make_jaxpr(made, return_shape=True)(accumulator, state)
        return Kinds(_still(updates, accumulator), named_axes(traced))


def end_window(inner: Inner, accumulator: Any, state: Any, updates: Any, *, apply: Any, last: Any) -> tuple[Any, Any, Any]:
    """Run the inner optimizer where `apply` holds, and clear the accumulator where `last` does.

    Args:
        inner: the call.
        accumulator: the tree of sums.
        state: the inner optimizer's state.
        updates: the tree of the updates' shapes and dtypes; see `Inner.kinds`.
        apply: bool scalar; implies `last`.
        last: bool scalar.

    Returns:
        The updates (zeros unless `apply`), the accumulator (zeros if `last`) and the inner optimizer's state.
    """
    buffer = jax.tree.map(_wide_enough, accumulator, updates)

    def run(operand: tuple[Any, Any]) -> tuple[Any, Any]:
        made, new_state = inner.run(cast_like(operand[0], accumulator), operand[1])
        return cast_like(_still(made, accumulator), buffer), cast_like(new_state, state)

    buffer, new_state = once(apply, run, (buffer, state), inner.control_flow)
    made = jax.tree.map(lambda held, update: jnp.where(apply, held, _nothing(held)).astype(update.dtype), buffer, updates)
    cleared = jax.tree.map(lambda held, old: held.astype(old.dtype), _cleared(buffer, last), accumulator)
    return made, cleared, new_state


def keep_window(accumulator: Any, updates: Any, never: Any, control_flow: ControlFlow) -> tuple[Any, Any]:
    """The updates, zeros, and the accumulator of a micro-batch that can close nothing.

    Constant zeros would be added to copies of the parameters, in a pass of their own: nothing says that the gradient, which wants the
    parameters as they were, comes first. After a loop over all sums, even of no trips, it has, and a select of nothing costs nothing.

    Args:
        accumulator: the tree of sums.
        updates: the tree of the updates' shapes and dtypes.
        never: a bool scalar that is False, but only the running program knows.
        control_flow: how the loop is written.
    """
    accumulator = once(never, lambda held: _cleared(held, never), accumulator, control_flow)
    zeros = jax.tree.map(lambda held, update: jnp.where(never, held, _nothing(held)).astype(update.dtype), accumulator, updates)
    return zeros, accumulator


def _wide_enough(held: Any, update: Any) -> Any:
    return held.astype(wider(held.dtype, update.dtype))


def _still(updates: Any, accumulator: Any) -> Any:
    """`updates` with the sum, an exact 0 in the parameter's dtype, for each parameter that takes no part."""
    return jax.tree.map(lambda held, update: update if takes_part(held) else held, accumulator, updates)


def _cleared(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(where, jnp.zeros((), leaf.dtype), leaf), tree)


def _nothing(leaf: Any) -> Any:
    """-0.0, the one zero that leaves every parameter bit for bit as it is: -0.0 + 0.0 is 0.0, but x + -0.0 is x."""
    return -0.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
