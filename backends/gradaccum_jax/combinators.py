"""The one wrapped optimizer inside of what optax's combinators made.

`optax.chain`, `optax.partition` and `optax.masked` keep their parts in closures, and
hand extra arguments on to them. So a question to the wrapped part travels as such an
argument, and the part answers in place of taking in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.arrays import (
    Array,
    Extra,
    Params,
    Tree,
    Updates,
    is_masked,
    takes_part,
)
from gradaccum_jax.state import AccumulationState, the_state
from gradaccum_jax.update import no_update
from gradaccum_jax.workers.group import is_state

T = TypeVar("T")
QUESTION = "gradaccum_question"
"""The extra argument's name."""
Answer = Callable[[Any, AccumulationState, Params, Extra], tuple[Updates, Any]]
"""``answer(accumulation, state, params, extra)``."""


@jax.tree_util.register_static
class Question:
    """A question to the wrapped part of a transformation, and what the part
    answered.
    """

    def __init__(self, answer: Answer) -> None:
        self.answers: list[tuple[Any, Updates]] = []
        """The wrapped optimizer, and its updates."""
        self._answer = answer

    def ask(
        self, accumulation: Any, state: Any, params: Params, extra: Extra
    ) -> tuple[Updates, Any]:
        updates, state = self._answer(accumulation, state, params, extra)
        self.answers.append((accumulation, updates))
        return updates, state


def part_of(tx: optax.GradientTransformation, state: Tree, params: Params) -> Any:
    """Return the `Accumulation` that is a part of `tx`; `state` and `params` may be
    abstract.
    """
    question = Question(
        lambda accumulation, state, params, extra: (state.accumulator, state)
    )
    jax.eval_shape(
        lambda state, params: _asked(tx, state, params, {}, question), state, params
    )
    return question.answers[0][0]


def close_part(
    tx: optax.GradientTransformation,
    state: Tree,
    params: Params,
    extra: Extra,
    close: Answer,
) -> tuple[Updates, Tree]:
    """Close the window of the wrapped part by `close`; return updates of the whole tree
    and the new state.

    No other part takes in a micro-batch: the state and the parameters of a part beside
    the wrapped one stay. What follows the wrapped part in a chain changes its updates,
    so it must have no state.
    """
    question = Question(close)
    updates, made = _asked(tx, state, params, extra, question)
    own = question.answers[0][1]
    follows = not all(
        jax.tree.leaves(_by_part(own, updates, lambda a, b: a is b, lambda leaf: True))
    )
    if follows:
        _require_no_state_around(state, made)
    return _by_part(own, updates, lambda _, leaf: leaf, no_update), new_part(
        state, the_state(made)
    )


def new_part(state: T, part: AccumulationState) -> T:
    """Return `state` with another state of the wrapped optimizer in it."""
    made: T = jax.tree.map(
        lambda old: part if is_state(old) else old, state, is_leaf=is_state
    )
    return made


def the_part(tx: object, state: Tree) -> AccumulationState:
    """Return the state of the one wrapped optimizer inside of `tx`."""
    part = the_state(state)
    if part is state or not isinstance(tx, optax.GradientTransformation):
        raise not_wrapped_error(tx)
    return part


def _asked(
    tx: optax.GradientTransformation,
    state: Tree,
    params: Params,
    extra: Extra,
    question: Question,
) -> tuple[Updates, Tree]:
    part = the_part(tx, state)
    like = part.accumulator if params is None else params
    leaves = jax.tree.leaves(like, is_leaf=is_masked)
    if params is None and any(map(is_masked, leaves)):
        raise explain(
            ArgumentTypeError,
            "params",
            expected="all parameters, of which the wrapped optimizer has a part",
            found="nothing at all",
            fix="Write gradaccum_jax.flush(tx, state, params).",
        )
    gradients = jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf) if takes_part(leaf) else None, like
    )
    updates, made = optax.with_extra_args_support(tx).update(
        gradients, state, params, **extra, **{QUESTION: question}
    )
    if not question.answers:
        raise not_wrapped_error(tx)
    return updates, made


def _by_part(
    own: Updates,
    updates: Updates,
    inside: Callable[[Array, Array], Any],
    outside: Callable[[Array], Any],
) -> Tree:
    """Map `inside` over the wrapped part's updates and those of the same parameters in
    `updates`, and `outside` over all others.
    """

    def one(mine: Any, made: Tree) -> Tree:
        if is_masked(mine):
            return jax.tree.map(outside, made)
        return inside(mine, made)

    return jax.tree.map(one, own, updates, is_leaf=is_masked)


def _require_no_state_around(before: Tree, after: Tree) -> None:
    flat = jax.tree_util.tree_flatten_with_path(before, is_leaf=is_state)[0]
    for (path, old), new in zip(
        flat, jax.tree.leaves(after, is_leaf=is_state), strict=True
    ):
        if not is_state(old) and new is not old:
            fix = (
                "Wrap the whole of it, as in gradaccum.wrap(optax.chain(...)): around"
                " the wrapped part every micro-batch moves that state."
            )
            raise explain(
                UsageError,
                "tx",
                expected="no state around the wrapped part that its update would move",
                found=f"state{jax.tree_util.keystr(path)}",
                fix=fix,
            )


def not_wrapped_error(
    tx: object,
    fix: str = "Pass what gradaccum.wrap returned, or an optax.chain that holds it.",
) -> ArgumentTypeError:
    return explain(
        ArgumentTypeError,
        "tx",
        expected="a wrapped optimizer",
        found=f"a {type(tx).__name__} that is not wrapped",
        fix=fix,
    )
