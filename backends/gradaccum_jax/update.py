"""Call the inner optimizer at the end of a window, without allocating a second buffer
as large as the parameters.

The inner optimizer runs in a branch of a `jax.lax.cond`, which is taken only if a
window ends with an update. The branch writes the updates over the gradient sum, and the
first micro-batch of the next window overwrites the updates. XLA can do this in place,
because the branch reads the parameters from its closure and does not return them. A
micro-batch in the middle of a window then costs only an addition and a select.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.interpreters import partial_eval

from gradaccum.kit import Scalar
from gradaccum_jax.arrays import (
    Array,
    Extra,
    GradientTypes,
    InnerState,
    Leaves,
    Params,
    Tree,
    Updates,
    cast_like,
    takes_part,
    wider,
)
from gradaccum_jax.gradient_sum import as_gradient, divide, has_sum, select, without_sum
from gradaccum_jax.sharding import ShardAxes, replicated
from gradaccum_jax.workers.group import same
from gradaccum_jax.xla import run_if


class Update(NamedTuple):
    """The inner optimizer and its arguments. The optimizer is called only if a window
    ends with an update.
    """

    optimizer: Callable[..., tuple[Any, Any]]
    """The inner optimizer's ``update``, which is called as
    ``optimizer(gradients, state, params, **extra)``.
    """
    types: GradientTypes
    params: Params
    extra: Extra
    axes: tuple[str, ...] = ()
    """The mesh axes along which devices share the window."""
    shard_axes: ShardAxes = None

    def run(
        self, accumulator: Tree, inner_state: InnerState, divisor: Scalar, apply: Scalar
    ) -> tuple[Updates, Tree, InnerState]:
        """Run the inner optimizer on the sum of the gradients if `apply` is true.
        ``divisor=None`` means that the sum has already been divided.

        Returns:
            If `apply` is true: the updates, the accumulator overwritten with the
            updates, and the inner optimizer's new state. Otherwise: all-zero updates,
            the unchanged accumulator, and the old state.
        """
        update_types = self._update_types(accumulator, inner_state, divisor)
        buffer = jax.tree.map(_wide_enough, accumulator, update_types)

        def optimize(operand: tuple[Tree, InnerState]) -> tuple[Updates, InnerState]:
            gradients = self._gradients(
                cast_like(operand[0], accumulator), divisor, self.types.dtypes
            )
            updates, new_state = self._optimize(gradients, operand[1])
            updates = _updates_that_move(updates, accumulator)
            return cast_like(updates, buffer), cast_like(new_state, inner_state)

        buffer, inner_state = run_if(apply, optimize, (buffer, inner_state))

        def update_of(leaf: Array, update: Array) -> Array:
            if not has_sum(leaf):
                return no_update(as_gradient(update))
            return select(apply, leaf, no_update(leaf)).astype(update.dtype)

        updates = replicated(jax.tree.map(update_of, buffer, update_types), self.axes)
        return updates, cast_like(buffer, accumulator), inner_state

    def _update_types(
        self, accumulator: Tree, inner_state: InnerState, divisor: Scalar
    ) -> Updates:
        """Return the shapes and dtypes of the updates. `jax.eval_shape` computes them
        without adding anything to the compiled program.
        """

        def updates_of(accumulator: Tree, inner_state: InnerState) -> Updates:
            gradients = self._gradients(accumulator, divisor, self.types.update_dtypes)
            return self._optimize(gradients, inner_state)[0]

        updates = jax.eval_shape(updates_of, accumulator, inner_state)
        return _updates_that_move(updates, accumulator)

    def _gradients(self, accumulator: Tree, divisor: Scalar, dtypes: list[Any]) -> Tree:
        if divisor is not None:
            accumulator = divide(accumulator, divisor)
        leaves, structure = jax.tree.flatten(accumulator)
        gradients = map(lax.convert_element_type, map(as_gradient, leaves), dtypes)
        return replicated(jax.tree.unflatten(structure, gradients), self.axes)

    def _optimize(self, gradients: Tree, inner_state: InnerState) -> tuple[Any, Any]:
        """Call the inner optimizer. If it does not accept the argument ``value``
        (optax's SAM does not), call it again without this argument.
        """
        extra = self.extra
        try:
            results = self.optimizer(gradients, inner_state, self.params, **extra)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            extra = {name: extra[name] for name in extra if name != "value"}
            results = self.optimizer(gradients, inner_state, self.params, **extra)
        return same("result of the inner optimizer", results, self.axes)


def _wide_enough(total: Array, update: Array) -> Array:
    return total.astype(wider(total.dtype, update.dtype))


def _updates_that_move(updates: Updates, accumulator: Tree) -> Updates:
    """Return `updates`, but replace the updates of parameters that never change.

    The update of an integer or bool parameter is replaced with the parameter's entry in
    `accumulator`, because this entry contains only zeros and has the parameter's dtype.
    The update of a frozen parameter is replaced with an empty array, because
    `accumulator`, which the updates overwrite, contains an empty array for this
    parameter too.
    """

    def update_that_moves(total: Array, update: Array) -> Array:
        if not takes_part(total):
            return total
        return update if has_sum(total) else without_sum(update)

    return jax.tree.map(update_that_moves, accumulator, updates)


def without_frozen(
    accumulator: Tree,
    optimizer: optax.GradientTransformation,
    inner_state: InnerState,
    params: Params,
) -> Tree:
    """Return `accumulator`, with an empty array instead of the gradient sum of each
    frozen parameter. A parameter is frozen if `optimizer` does not read its gradient,
    for example because of `optax.set_to_zero`.

    All sums are kept if an update could still change a frozen parameter, for example
    through weight decay.
    """
    totals, structure = jax.tree.flatten(accumulator)
    count = len(totals)

    def results(totals: Leaves, params: Params) -> tuple[Leaves, InnerState]:
        gradients = jax.tree.unflatten(structure, totals)
        updates, state = optimizer.update(gradients, inner_state, params)
        return jax.tree.leaves(updates), state

    try:
        program = jax.make_jaxpr(results)(totals, params).jaxpr
    except Exception:
        # The optimizer needs arguments that it gets only when a micro-batch is added.
        # So it is not yet known which parameters are frozen.
        return accumulator
    uses_state = [True] * len(program.outvars[count:])
    is_read = partial_eval.dce_jaxpr(program, [True] * count + uses_state)[1]
    is_frozen = [not read for read in is_read[:count]]
    ignores_state = [False] * len(uses_state)
    needed = partial_eval.dce_jaxpr(program, is_frozen + ignores_state)[1]
    if all(is_frozen) or any(needed[count:]):
        return accumulator
    for place, total in enumerate(totals):
        if takes_part(total) and is_frozen[place]:
            totals[place] = without_sum(total)
    return jax.tree.unflatten(structure, totals)


def no_update(leaf: Array) -> Array:
    """Return an all-zero update with the shape and dtype of `leaf`. Its elements are
    -0.0, because adding -0.0 leaves every parameter unchanged, bit for bit. Adding 0.0
    would change -0.0 to 0.0.
    """
    zero: complex = 0
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        zero = complex(-0.0, -0.0)
    elif jnp.issubdtype(leaf.dtype, jnp.floating):
        zero = -0.0
    return lax.full_like(leaf, zero)
