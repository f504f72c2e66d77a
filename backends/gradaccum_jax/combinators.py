"""Find the wrapped optimizer inside a transformation that was built with optax's
combinators.

`optax.chain`, `optax.partition` and `optax.masked` hide their transformations in
closures, but pass extra arguments on to them. So a `Question`, which contains a
function, is passed to ``update`` as an extra argument. The wrapped optimizer calls this
function instead of adding a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum_jax.arrays import (
    Extra,
    Params,
    Tree,
    Updates,
    is_masked,
    takes_part,
)
from gradaccum_jax.state import AccumulationState, is_state, the_state
from gradaccum_jax.update import no_update

T = TypeVar("T")
QUESTION = "gradaccum_question"
"""The name of the extra argument of ``update`` that contains a `Question`, an object
with a function that the wrapped optimizer calls instead of adding a micro-batch.
"""
Answer = Callable[[Any, AccumulationState, Params, Extra], tuple[Updates, Any]]
"""The type of a function ``answer(accumulation, state, params, extra)`` that returns
the updates and the new state of a wrapped optimizer.
"""


@jax.tree_util.register_static
class Question:
    """An extra argument of ``update`` that makes a wrapped optimizer call the function
    `answer` instead of adding a micro-batch. The argument also reaches a wrapped
    optimizer inside a combined transformation, such as an `optax.chain`.

    The ``update`` of the wrapped optimizer calls
    ``answer(accumulation, state, params, extra)``, and returns the updates and the new
    state that `answer` returns. `accumulation` is the wrapped optimizer's own
    `Accumulation` (its inner optimizer and its options), and `state` is its own state.

    The method `ask` calls `answer`. It also stores the `Accumulation` and the updates
    in this object, because they cannot be read from the results of a combined
    transformation.
    """

    accumulation: Any = None
    """The `Accumulation` of the wrapped optimizer that called `ask`; None before the
    call.
    """
    updates: Updates = None
    """The updates that `answer` returned; None before `ask` has been called."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def ask(
        self, accumulation: Any, state: Any, params: Params, extra: Extra
    ) -> tuple[Updates, Any]:
        self.accumulation = accumulation
        self.updates, state = self._answer(accumulation, state, params, extra)
        return self.updates, state


def part_of(tx: optax.GradientTransformation, state: Tree, params: Params) -> Any:
    """Return the `Accumulation` of the wrapped optimizer inside `tx`. `state` and
    `params` may be abstract, because only their shapes and dtypes matter.
    """
    question = Question(
        lambda accumulation, state, params, extra: (state.accumulator, state)
    )
    jax.eval_shape(
        lambda state, params: _ask_part(tx, state, params, {}, question), state, params
    )
    return question.accumulation


def close_part(
    tx: optax.GradientTransformation,
    state: Tree,
    params: Params,
    extra: Extra,
    close: Answer,
) -> tuple[Updates, Tree]:
    """Close the window of the wrapped optimizer inside `tx` by calling `close`. Return
    the updates for all parameters, and the new state of `tx`.

    Only the state of the wrapped optimizer changes; the new states of all other
    transformations are discarded. Because there is no micro-batch, `tx` is called with
    zero gradients. Parameters that the wrapped optimizer does not update get an update
    of zero. In an `optax.chain`, the transformations after the wrapped optimizer are
    applied to its updates. They must be stateless, because their new states are
    discarded too.
    """
    question = Question(close)
    updates, new_state = _ask_part(tx, state, params, extra, question)
    is_changed = False

    def update_of(part_update: Any, update: Tree) -> Tree:
        nonlocal is_changed
        if is_masked(part_update):
            return jax.tree.map(no_update, update)
        is_changed = is_changed or update is not part_update
        return update

    updates = jax.tree.map(update_of, question.updates, updates, is_leaf=is_masked)
    if is_changed:
        _require_no_state_around(state, new_state)
    return updates, new_part(state, the_state(new_state))


def new_part(state: T, part: AccumulationState) -> T:
    """Return a copy of `state` in which `part` is the new state of the wrapped
    optimizer.
    """
    new_state: T = jax.tree.map(
        lambda node: part if is_state(node) else node, state, is_leaf=is_state
    )
    return new_state


def _ask_part(
    tx: optax.GradientTransformation,
    state: Tree,
    params: Params,
    extra: Extra,
    question: Question,
) -> tuple[Updates, Tree]:
    if isinstance(params, optax.LookaheadParams):
        raise not_wrapped_error(tx)  # because lookahead drops extra arguments
    gradients = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if takes_part(leaf) else None,
        the_state(state).accumulator if params is None else params,
    )
    updates, new_state = optax.with_extra_args_support(tx).update(
        gradients, state, params, **extra, **{QUESTION: question}
    )
    if question.accumulation is None:
        raise not_wrapped_error(tx)
    return updates, new_state


def _may_change(node: Any) -> bool:
    """True if `node` is the state of the wrapped optimizer, or of an
    `optax.apply_if_finite` directly around it. A flush may change only these states.
    `optax.apply_if_finite` is allowed because it returns a flush's updates unchanged.
    """
    is_checked = isinstance(node, optax.ApplyIfFiniteState)
    return is_state(node.inner_state if is_checked else node)


def _require_no_state_around(before: Tree, after: Tree) -> None:
    flat = jax.tree_util.tree_flatten_with_path(before, is_leaf=_may_change)[0]
    new_leaves = jax.tree.leaves(after, is_leaf=_may_change)
    for (path, leaf), new_leaf in zip(flat, new_leaves, strict=True):
        if not _may_change(leaf) and new_leaf is not leaf:
            raise UsageError(
                "tx: expected no stateful transformation after the wrapped optimizer,"
                " because flush cannot update the state of such a transformation; got a"
                " stateful transformation, which changed"
                f" state{jax.tree_util.keystr(path)}. Wrap the whole chain:"
                " gradaccum.wrap(optax.chain(...))."
            )


def not_wrapped_error(tx: object) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"tx: expected a wrapped optimizer; got a {type(tx).__name__} that is not"
        " wrapped. Pass the optimizer that gradaccum.wrap returned. flush, discard and"
        " check_state also accept an optax.chain that contains this optimizer."
        " value_and_update does not accept a chain. To freeze parameters in"
        " value_and_update, pass them in the batch, with axes=None."
    )
