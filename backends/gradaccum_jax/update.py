"""The inner optimizer's call at the end of a window: made once or not at all, with no second buffer of the parameters' size.

The accumulator doubles as the buffer of the updates. Where the inner optimizer runs, its updates take the accumulator's place. Where it
does not, the accumulator passes through. A select then tells them apart. The parameters are closed over, not carried. So XLA works in
place, and a micro-batch in mid-window costs the addition and the select. Nothing clears the updates from the accumulator: the next window's
first micro-batch writes over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.kit import Scalar
from gradaccum_jax.control_flow import named_axes, once
from gradaccum_jax.dtypes import Handed, cast_like, takes_part, wider
from gradaccum_jax.elementwise import fills, pick, to
from gradaccum_jax.jitted import traced_once
from gradaccum_jax.misplaced import part_of_window, require_same_structure, require_unread
from gradaccum_jax.sums import divide, emptied
from gradaccum_jax.types import Array, Axes, Extra, InnerState, Params, Tree, Updates
from gradaccum_jax.workers.kinds import same
from gradaccum_jax.workers.replicated import replicated

Call = Callable[[Tree, InnerState], tuple[Any, Any]]


class Traced(NamedTuple):
    """What JAX knows of the inner optimizer's call while it traces, before the call is made."""

    updates: Updates
    """The tree of the updates' shapes and dtypes."""
    axes: Axes
    """The named axes that the optimizer reduces over."""
    call: Call
    """The optimizer as `Update.run` calls it, ``call(gradients, state)``: for arguments of the same types it is not traced again."""


class Update(NamedTuple):
    """A call of the inner optimizer that the end of a window may make."""

    optimizer: Callable[..., tuple[Any, Any]]
    """``optimizer(gradients, state, params, **extra)``: the inner transformation's ``update``."""
    dtypes: Handed
    params: Params
    extra: Extra
    axes: tuple[str, ...] = ()
    """The mesh axes whose devices share the window: at its end the sums are the same along these."""
    shard_axes: tuple[str, ...] | None = None
    """The mesh axes along which parameters are sharded; None: nobody said."""
    part: bool = False
    """The extra arguments may be those of one micro-batch out of several."""

    def told(self, loss: Scalar) -> Update:
        """The same call, with the window's loss as the ``value`` that optax's optimizers read."""
        return self._replace(extra={**self.extra, "value": loss})

    def traced(self, accumulator: Tree, held: InnerState, divisor: Scalar) -> Traced:
        """Trace the call; nothing of it enters the program. One that takes no ``value``, such as SAM, is called without.

        Args:
            accumulator: the tree of sums.
            held: the inner optimizer's state.
            divisor: a scalar of the type that `run` gets.

        Raises:
            UsageError: the optimizer reads an extra argument of one micro-batch out of several, or its state changes its structure.
        """
        try:
            return self._traced(accumulator, held, divisor)
        except TypeError as error:
            if "value" not in self.extra or "unexpected keyword argument 'value'" not in str(error):
                raise
        rest = {name: given for name, given in self.extra.items() if name != "value"}
        return self._replace(extra=rest)._traced(accumulator, held, divisor)

    def _traced(self, accumulator: Tree, held: InnerState, divisor: Scalar) -> Traced:
        rest, watched = part_of_window(self.extra) if self.part else (self.extra, {})
        call = traced_once(self._call, (accumulator, held))

        def made(watched: Extra, accumulator: Tree, held: InnerState) -> tuple[Updates, InnerState]:
            leaves, structure = jax.tree.flatten(self._gradients(accumulator, divisor))
            gradients = [to(leaf, dtype) for leaf, dtype in zip(leaves, self.dtypes.like, strict=True)]
            given = jax.tree.unflatten(structure, gradients)
            return call(given, held) if rest is self.extra else self.optimizer(given, held, self.params, **rest, **watched)

        program, (updates, after) = jax.make_jaxpr(made, return_shape=True)(watched, accumulator, held)
        require_unread(program, watched)
        require_same_structure(after, held)
        return Traced(_still(updates, accumulator), named_axes(program), call)

    def run(self, accumulator: Tree, held: InnerState, divisor: Scalar, traced: Traced, apply: Scalar) -> tuple[Updates, Tree, InnerState]:
        """Run the inner optimizer where `apply` holds.

        Args:
            accumulator: the tree of sums.
            held: the inner optimizer's state.
            divisor: a scalar: ``accumulator / divisor`` is the gradient.
            traced: from `traced`.
            apply: bool scalar.

        Returns:
            The updates (zeros unless `apply`), the accumulator (the updates if `apply`) and the inner optimizer's state.
        """
        buffer = jax.tree.map(_wide_enough, accumulator, traced.updates)

        def call(operand: tuple[Tree, InnerState]) -> tuple[Updates, InnerState]:
            gradients = self._gradients(cast_like(operand[0], accumulator), divisor)
            made, after = traced.call(gradients, operand[1])
            return cast_like(_still(made, accumulator), buffer), cast_like(after, held)

        buffer, after = once(apply, call, (buffer, held))
        return self._updates_where(apply, buffer, traced.updates), cast_like(buffer, accumulator), after

    def keep(self, accumulator: Tree, updates: Updates, never: Scalar) -> tuple[Updates, Tree]:
        """The updates, all zeros, and the accumulator of a micro-batch that can end no window.

        Constant zeros would cost a copy of the parameters and a pass over it: nothing tells XLA that the gradient, which reads the old
        parameters, comes first. After a loop over all sums, even one that never runs, the gradient has come, and the select is free.

        Args:
            accumulator: the tree of sums.
            updates: `Traced.updates`.
            never: a bool scalar that is False, which only the running program knows.
        """
        accumulator = once(never, lambda held: emptied(held, never), accumulator)
        return self._updates_where(never, accumulator, updates), accumulator

    def _call(self, gradients: Tree, held: InnerState) -> tuple[Any, Any]:
        made = self.optimizer(gradients, held, self.params, **self.extra)
        if not self.axes:
            return made
        return same("what the inner optimizer made", made, self.axes, "Let the optimizer close over nothing that is a device's own.")

    def _gradients(self, accumulator: Tree, divisor: Scalar) -> Tree:
        return replicated(divide(accumulator, divisor, self.dtypes.given), self.axes)

    def _updates_where(self, apply: Scalar, buffer: Tree, updates: Updates) -> Updates:
        """The updates that `buffer` holds where `apply` holds, in the dtypes of `updates`; else zeros."""
        nothing = fills(_nothing)
        made = jax.tree.map(lambda leaf, update: to(pick(apply, leaf, nothing(leaf)), update.dtype), buffer, updates)
        return replicated(made, self.axes)


def _wide_enough(held: Array, update: Array) -> Array:
    return to(held, wider(held.dtype, update.dtype))


def _still(updates: Updates, accumulator: Tree) -> Updates:
    """`updates` with the sum, an exact 0 in the parameter's dtype, for each parameter that takes no part."""
    return jax.tree.map(lambda held, update: update if takes_part(held) else held, accumulator, updates)


def _nothing(leaf: Array) -> complex:
    """-0.0, the one zero that leaves every parameter bit for bit as it is: -0.0 + 0.0 is 0.0, but x + -0.0 is x."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return complex(-0.0, -0.0)
    return -0.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
