"""Inner optimizers, and extra arguments of theirs, that would make a window wrong. Each is refused by name, with its right place.

optax documents extra arguments that describe the batch of the gradient: `grad` and `value_fn` for line searches, `grad_fn` for SAM,
`obj_fn` for Sophia. The inner optimizer runs at the window's end, and a streaming loop then has those of the last micro-batch only.
Training would go on with a function that does not belong to the gradient. So an optimizer that reads one of them is refused; the caller
closes the window and gives those of the whole window. An optimizer that ignores them gets them as ever.

`value` is another matter: losses add up, and the inner optimizer gets the window's (see `knowledge`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import optax
import optax.contrib

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.trees import is_none
from gradaccum_jax.types import Extra, InnerState, Params

OF_A_BATCH = ("grad", "value_fn", "grad_fn", "obj_fn")
"""optax's extra arguments that describe the batch of the gradient."""

_WHOLE = (
    "Wrap with steps=None, where tx.update only notes its type, and close the window yourself with what belongs to all of it: "
    "gradaccum_jax.flush(tx, state, params, {}=...)."
)


def part_of_window(extra: Extra) -> tuple[Extra, Extra]:
    """The extra arguments for a trace of the inner optimizer that finds those of one micro-batch, and these as inputs of the trace.

    A function raises as soon as the optimizer calls it. Without any of a micro-batch, the first are `extra` itself.
    """
    found = {name: extra[name] for name in OF_A_BATCH if extra.get(name) is not None}
    if not found:
        return extra, {}
    functions: Extra = {name: _refusing(name) for name, given in found.items() if callable(given)}
    watched = {name: given for name, given in found.items() if name not in functions}
    return {name: given for name, given in {**extra, **functions}.items() if name not in watched}, watched


def require_unread(program: Any, watched: Extra) -> None:
    """Refuse an optimizer whose traced `program` reads one of the `watched` arguments, which are the program's first inputs.

    Raises:
        UsageError: it does.
    """
    names = [name for name in sorted(watched) for _ in jax.tree.leaves(watched[name])]  # JAX flattens a dict by its sorted keys
    jaxpr = program.jaxpr
    read = {id(variable) for variables in (jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns)) for variable in variables}
    for name, variable in zip(names, jaxpr.invars, strict=False):
        if id(variable) in read:
            _refuse_part(name)


def require_same_structure(after: InnerState, before: InnerState) -> None:
    """Refuse an optimizer whose state has another structure after its update, as that of `optax.monitor`.

    Raises:
        UsageError: it has.
    """
    try:
        jax.tree.map(lambda *_: None, after, before, is_leaf=is_none)  # a None stands for what `before` has there
    except ValueError as error:
        old, new = jax.tree.structure(before), str(jax.tree.structure(after))
        fix = "Its init must make what its update returns. If it only measures, as optax.monitor, call it outside of the wrapper."
        raise explain(UsageError, "optimizer", expected=f"one whose state keeps its structure, {old}", found=new, fix=fix) from error


def require_placeable(params: Params, inner_state: InnerState) -> None:
    """Refuse an optimizer of parameter pairs, and one that takes each item's gradient.

    Raises:
        ArgumentTypeError: the parameters are those of `optax.lookahead`, or the state is that of `differentially_private_aggregate`.
    """
    if _holds(params, optax.LookaheadParams):
        expected = "one whose updates are like its gradients"
        found = "optax.lookahead, whose gradients are those of its fast parameters only"
        fix = "Wrap its fast optimizer, and count in micro-batches: optax.lookahead(gradaccum.wrap(fast, steps=n), n * sync_period, ...)."
        raise explain(ArgumentTypeError, "optimizer", expected=expected, found=found, fix=fix)
    if _holds(inner_state, optax.contrib.DifferentiallyPrivateAggregateState):
        found = "differentially_private_aggregate, which clips the gradient of each item"
        fix = "Clip and sum in front of tx.update, by optax.per_example_global_norm_clip, and wrap optax.add_noise: see NEIGHBOURS.md."
        raise explain(ArgumentTypeError, "optimizer", expected="one that takes the gradient of a batch", found=found, fix=fix)


def _holds(tree: Any, kind: type) -> bool:
    return any(isinstance(node, kind) for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind)))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse_part(name)

    return refuse


def _refuse_part(name: str) -> NoReturn:
    expected = "nothing in a window of several micro-batches, as the inner optimizer reads it with the whole window's gradient"
    raise explain(UsageError, name, expected=expected, found="that of one micro-batch", fix=_WHOLE.format(name))
