"""Run something once or not at all, decided on the device.

Masking (run always, keep the result sometimes) would pay for the inner optimizer in every micro-batch. `lax.cond` does not,
until `vmap` gives it a batched predicate and turns it into both branches and a select. A `lax.while_loop` of zero or one trip
stays a loop under `vmap`: see `trip` for which members it runs, and for its derivative, which masks. So `"cond"` stays for those who
differentiate through the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum import ArgumentValueError
from gradaccum.kit import explain
from gradaccum_jax.trip import runner, zero_or_one
from gradaccum_jax.varying import settled

ControlFlow = Literal["while_loop", "cond"]
CONTROL_FLOWS = ("while_loop", "cond")

T = TypeVar("T")


def require_control_flow(value: Any) -> ControlFlow:
    """`value` if it is one of the two.

    Raises:
        ArgumentValueError: it is not.
    """
    if value == "while_loop":
        return "while_loop"
    if value == "cond":
        return "cond"
    raise explain(ArgumentValueError, "control_flow", expected=f"one of {CONTROL_FLOWS}", got=value, fix="Leave it out, or write 'cond'.")


def once(predicate: Any, function: Callable[[T], T], operand: T, control_flow: ControlFlow) -> T:
    """``function(operand)`` where `predicate` holds, else `operand` itself.

    Args:
        predicate: bool scalar.
        function: returns what it was given: same structure, shapes and dtypes.
        operand: a tree of arrays.
        control_flow: ``"while_loop"`` or ``"cond"``.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, operand))
    predicate = jnp.asarray(predicate)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(jax.tree.unflatten(structure, leaves)))

    closed, leaves = settled(predicate, flat, leaves)
    if control_flow == "cond":
        run = runner(closed.jaxpr, leaves)
        leaves = lax.cond(predicate, lambda constants, leaves: run(constants, leaves), lambda _, leaves: leaves, closed.consts, leaves)
    else:
        leaves = zero_or_one(predicate, closed, leaves)
    return cast(T, jax.tree.unflatten(structure, leaves))
