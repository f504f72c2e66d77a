"""The inner optimizer's call at the end of a window: made once or not at all, with no
second buffer of the parameters' size.

If the inner optimizer runs, its updates take the sum's place, where the next window's
first micro-batch overwrites them. The parameters are closed over, not carried. So XLA
works in place, and a micro-batch in mid-window costs the addition and a select.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from gradaccum import UsageError
from gradaccum.kit import Scalar, explain
from gradaccum_jax.arrays import (
    Array,
    Axes,
    DType,
    Extra,
    GradientTypes,
    InnerState,
    Params,
    Tree,
    Updates,
    cast_like,
    takes_part,
    wider,
)
from gradaccum_jax.gradient_sum import (
    divide,
    emptied,
    is_left_out,
    select,
)
from gradaccum_jax.programs import named_axes, origins
from gradaccum_jax.sharding import ShardAxes, replicated
from gradaccum_jax.workers.group import same
from gradaccum_jax.xla import run_if

Optimizer = Callable[[Tree, InnerState], tuple[Any, Any]]
"""``optimizer(gradients, state)``."""


class TracedUpdate(NamedTuple):
    """The facts that JAX knows of the inner optimizer's call while it traces."""

    updates: Updates
    optimizer: Optimizer
    """For arguments of the same types it is not traced again."""


class Update(NamedTuple):
    """A call of the inner optimizer that the end of a window may make.

    Where a divisor is None, the sum is divided already.
    """

    optimizer: Callable[..., tuple[Any, Any]]
    """``optimizer(gradients, state, params, **extra)``: the inner transformation's
    ``update``.
    """
    types: GradientTypes
    params: Params
    extra: Extra
    axes: tuple[str, ...] = ()
    """The mesh axes whose devices share the window."""
    shard_axes: ShardAxes = None
    when_traced: Callable[[Any, Tree], None] | None = None
    """Called with the optimizer's closed program and the sum."""

    def with_loss(self, loss: Scalar) -> Update:
        """Return the same call with the window's loss as the ``value`` that optax's
        optimizers read.
        """
        return self._replace(extra={**self.extra, "value": loss})

    def trace(
        self, accumulator: Tree, inner_state: InnerState, divisor: Scalar
    ) -> TracedUpdate:
        """Trace the call; nothing of it enters the program. A call that takes no
        ``value``, such as SAM's, is made without.
        """
        try:
            return self._trace(accumulator, inner_state, divisor)
        except TypeError as error:
            is_about_value = "unexpected keyword argument 'value'" in str(error)
            if "value" not in self.extra or not is_about_value:
                raise
        extra = {name: given for name, given in self.extra.items() if name != "value"}
        return self._replace(extra=extra)._trace(accumulator, inner_state, divisor)

    def _trace(
        self, accumulator: Tree, inner_state: InnerState, divisor: Scalar
    ) -> TracedUpdate:
        optimizer = self._optimize

        def optimize(accumulator: Tree, inner_state: InnerState) -> tuple[Any, Any]:
            gradients = self._gradients(accumulator, divisor)
            leaves, structure = jax.tree.flatten(gradients)
            typed_leaves = map(to, leaves, self.types.like)
            gradients = jax.tree.unflatten(structure, typed_leaves)
            made: tuple[Any, Any] = optimizer(gradients, inner_state)
            return made

        program, (updates, _) = jax.make_jaxpr(optimize, return_shape=True)(
            accumulator, inner_state
        )
        require_no_reduction(named_axes(program), self.shard_axes)
        if self.when_traced is not None:
            self.when_traced(program, accumulator)
        return TracedUpdate(_updates_that_move(updates, accumulator), optimizer)

    def run(
        self,
        accumulator: Tree,
        inner_state: InnerState,
        divisor: Scalar,
        traced: TracedUpdate,
        apply: Scalar,
    ) -> tuple[Updates, Tree, InnerState]:
        """Run the inner optimizer if `apply` holds.

        Returns:
            The updates twice and the new state; otherwise zeros, the sum and the state.
        """
        buffer = jax.tree.map(_wide_enough, accumulator, traced.updates)

        def optimize(operand: tuple[Tree, InnerState]) -> tuple[Updates, InnerState]:
            gradients = self._gradients(cast_like(operand[0], accumulator), divisor)
            updates, new_state = traced.optimizer(gradients, operand[1])
            updates = _updates_that_move(updates, accumulator)
            updates = jax.tree.map(_in_place_of, accumulator, updates)
            return cast_like(updates, buffer), cast_like(new_state, inner_state)

        buffer, inner_state = run_if(apply, optimize, (buffer, inner_state))
        updates = self._updates_where(apply, buffer, traced.updates)
        return updates, cast_like(buffer, accumulator), inner_state

    def keep(
        self, accumulator: Tree, updates: Updates, never: Scalar
    ) -> tuple[Updates, Tree]:
        """Return the updates, all zeros, and the sum of a micro-batch that can end no
        window.

        Constant zeros would cost a copy of the parameters: nothing tells XLA that the
        gradient, which reads the old parameters, comes first. After a conditional over
        all sums, even one that never runs, the gradient has come, and the select is
        free.
        """
        accumulator = run_if(never, lambda total: emptied(total, never), accumulator)
        return self._updates_where(never, accumulator, updates), accumulator

    def _optimize(self, gradients: Tree, inner_state: InnerState) -> tuple[Any, Any]:
        made = self.optimizer(gradients, inner_state, self.params, **self.extra)
        if not self.axes:
            return made
        return same(
            "what the inner optimizer made",
            made,
            self.axes,
            "Let the optimizer close over nothing that is a device's own.",
        )

    def _gradients(self, accumulator: Tree, divisor: Scalar) -> Tree:
        if divisor is not None:
            accumulator = divide(accumulator, divisor)
        leaves, structure = jax.tree.flatten(accumulator)
        leaves = list(map(to, leaves, self.types.given))
        for place, shape in enumerate(self.types.shapes):
            if leaves[place].shape != shape:  # nothing reads it
                leaves[place] = jnp.zeros(shape, leaves[place].dtype)
        return replicated(jax.tree.unflatten(structure, leaves), self.axes)

    def _updates_where(self, apply: Scalar, buffer: Tree, updates: Updates) -> Updates:
        """Return the updates in `buffer` if `apply` holds, in the dtypes of `updates`;
        otherwise zeros.
        """

        def chosen(leaf: Array, update: Array) -> Array:
            if is_left_out(leaf, update):
                return jnp.full(update.shape, _zero_of(update), update.dtype)
            return to(select(apply, leaf, no_update(leaf)), update.dtype)

        return replicated(jax.tree.map(chosen, buffer, updates), self.axes)


def _wide_enough(total: Array, update: Array) -> Array:
    return to(total, wider(total.dtype, update.dtype))


def _in_place_of(total: Array, update: Array) -> Array:
    return total if is_left_out(total, update) else update


def _updates_that_move(updates: Updates, accumulator: Tree) -> Updates:
    """Replace the update of each parameter that takes no part by the sum, an exact 0 in
    its dtype.
    """
    return jax.tree.map(
        lambda total, update: update if takes_part(total) else total,
        accumulator,
        updates,
    )


def without_unread(
    accumulator: Tree,
    inner: optax.GradientTransformationExtraArgs,
    inner_state: InnerState,
    params: Params,
) -> Tree:
    """Return the sum with an array of shape (0,) for each parameter whose gradient the
    inner optimizer does not read, such as those under `optax.set_to_zero`; with none if
    it reads no gradient at all.
    """
    leaves, structure = jax.tree.flatten(accumulator)
    try:
        program = jax.make_jaxpr(inner.update)(accumulator, inner_state, params)
    except Exception:
        # The optimizer wants arguments that only a micro-batch has.
        return accumulator
    read_bits = functools.reduce(operator.or_, origins(program.jaxpr, len(leaves)), 0)
    is_read = [bool(read_bits & 1 << place) for place in range(len(leaves))]
    if not any(is_read):
        return accumulator
    return jax.tree.unflatten(
        structure,
        [
            leaf if read or not takes_part(leaf) else jnp.zeros((0,), leaf.dtype)
            for leaf, read in zip(leaves, is_read, strict=True)
        ],
    )


def no_update(leaf: Array) -> Array:
    return lax.full_like(leaf, _zero_of(leaf))


def to(leaf: Array, dtype: DType) -> Array:
    return leaf.astype(dtype)


def _zero_of(leaf: Array) -> complex:
    """Return -0.0, the one zero that leaves every parameter bit for bit as it is: -0.0
    + 0.0 is 0.0, but x + -0.0 is x.
    """
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return complex(-0.0, -0.0)
    return -0.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0


def require_no_reduction(axes: Axes, shard_axes: ShardAxes) -> None:
    """Raise unless the inner optimizer reduces over no mesh axes but those that shard
    parameters.

    Each device decides by its own gradient. If one skipped the optimizer, the others
    would wait for it for ever.
    """
    reduced_axes = sorted(axes - frozenset(shard_axes or ()))
    if reduced_axes:
        raise explain(
            UsageError,
            "optimizer",
            expected="one that does not reduce",
            found=f"one that reduces over {reduced_axes}",
            fix="Reduce the gradients before tx.update, jax.lax.pmean(grads, axis), or"
            " wrap with axis_name=, which reduces once per window.",
        )
