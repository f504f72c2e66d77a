"""Run a function so that its activations are computed again for the gradient: `jax.checkpoint`, traced anew in every call.

`jax.checkpoint` remembers what it traced by the identity of the function. A function that reads something else the next time, a parameter
of an object say, would give the old values. So each call hands JAX a function of its own, as a call without recomputation would trace
the original again.

Two runs must do the same. JAX's randomness and functional state do; a `Ref` that the function reads or writes from outside does not, and
is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_jax.recomputation.held import held
from gradaccum_jax.recomputation.keys import kind_of, raw, typed
from gradaccum_jax.recomputation.policy import Policy
from gradaccum_jax.types import Array, Leaves, Tree

_TRACED = (jax.Array, np.ndarray, np.generic)


class Rules(NamedTuple):
    """How a function is recomputed."""

    policy: Policy | None
    """What is kept; None keeps the inputs only."""
    prevent_cse: bool
    """Whether XLA is kept from merging the second run with the first one."""
    hold: bool
    """Whether XLA:CPU is kept from starting the second run early: see `held`."""


def replay(function: Callable[..., Tree], arguments: Tree, rules: Rules) -> Tree:
    """``function(*arguments)``, recomputed for the gradient by `rules`.

    Args:
        function: pure, of the arguments; it may read traced values from outside.
        arguments: a tuple of nests. Arrays are inputs; the function sees any other leaf as it is.
        rules: how it is recomputed.

    Raises:
        UsageError: the function reads or writes a `Ref` that it did not make.
    """
    leaves, structure = jax.tree.flatten(arguments)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, _TRACED) or hasattr(leaf, "__jax_array__")]
    inputs = [leaves[index] for index in places]

    def of_inputs(*given: Any) -> Tree:
        filled = list(leaves)
        for index, leaf in zip(places, given, strict=True):
            filled[index] = leaf
        return function(*jax.tree.unflatten(structure, filled))

    traced, shape = jax.make_jaxpr(of_inputs, return_shape=True)(*inputs)
    _require_no_refs(traced)
    return jax.tree.unflatten(jax.tree.structure(shape), _run(traced, inputs, rules))


def _run(traced: core.ClosedJaxpr, inputs: Leaves, rules: Rules) -> Leaves:
    """The results of a traced function. Values from outside are inputs of the second run too, so that gradients flow to them."""
    given = [*traced.consts, *inputs]
    kinds, made_kinds = [kind_of(leaf) for leaf in given], list[Any]()

    def again(*numbers: Array) -> Leaves:
        leaves = [typed(leaf, kind) for leaf, kind in zip(numbers, kinds, strict=True)]
        consts, inputs = leaves[: len(traced.consts)], leaves[len(traced.consts) :]
        made = core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, consts))(*inputs)
        made_kinds[:] = map(kind_of, made)
        return [raw(leaf) for leaf in made]

    library: Any = jax
    once_more = library.checkpoint(again, policy=rules.policy, prevent_cse=rules.prevent_cse)
    numbers = [raw(leaf) for leaf in given]
    made = held(once_more, numbers) if rules.hold else once_more(*numbers)
    return [typed(leaf, kind) for leaf, kind in zip(made, made_kinds, strict=True)]


def _require_no_refs(traced: core.ClosedJaxpr) -> None:
    """Refuse effects on a `Ref` from outside: JAX 0.10 would write it twice, and read at the second run what others wrote meanwhile."""
    if any(type(effect).__module__.startswith("jax._src.state") for effect in traced.effects):
        fix = "Pass the value in and return the new one."
        raise explain(UsageError, "recompute", expected="a pure function", found="one that reads or writes a Ref from outside", fix=fix)
