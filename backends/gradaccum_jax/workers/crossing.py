"""How the arguments of a step enter `jax.shard_map`, and how what it returns leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_jax.state import AccumulationState, find_states
from gradaccum_jax.types import Array, Axes, Tree
from gradaccum_jax.varying import axes_of, vary
from gradaccum_jax.workers.kinds import require_shared
from gradaccum_jax.workers.layout import mapped
from gradaccum_jax.workers.replicated import replicated

Spec = Any
"""A `jax.sharding.PartitionSpec`."""


class Made(NamedTuple):
    """What a step returned, ready to leave `jax.shard_map`."""

    structure: Any
    leaves: list[Array]
    specs: list[Spec]


def spec_of(index: int, arg: Tree, axes: tuple[str, ...]) -> list[Spec]:
    """How the devices share argument number `index`, leaf by leaf: parameters and state by its fields, the batch split."""
    split, whole = _specs(axes)
    tree = (
        jax.tree.map(lambda _: split, arg) if index > 1 else mapped(arg, own=lambda _: split, shared=lambda _: whole, other=lambda _: whole)
    )
    return jax.tree.leaves(tree)


def placed(leaves: list[Array], mesh: jax.sharding.Mesh, specs: tuple[Spec, ...]) -> list[Array]:
    """The arguments' leaves with types that say how they are shared, where the types of the whole mesh do (``AxisType.Explicit``)."""
    kinds: Any = mesh
    if any(kind != jax.sharding.AxisType.Explicit for kind in kinds.axis_types):
        return leaves
    reshard: Any = jax.sharding.reshard
    return [reshard(leaf, jax.sharding.NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)]


def entered(args: tuple[Tree, ...], axes: tuple[str, ...]) -> list[Tree]:
    """The arguments as the step of one device wants them: parameters that it can differentiate by alone, its own sums."""
    kept = [_own(arg) for arg in args[:2]]
    return [
        *(mapped(arg, own=_same, shared=_same, other=lambda leaf: vary(leaf, frozenset(axes))) for arg in kept[:1]),
        *kept[1:],
        *args[2:],
    ]


def leaving(made: Any, given: list[Tree], axes: tuple[str, ...]) -> Made:
    """What the step `made` of the arguments `given`: all of it replicated but for what differs, which gets a leading axis.

    Raises:
        UsageError: it is not (params, state, *rest), or the state is not one that the devices share.
    """
    kept, rest = _parts(made, given)
    for state in find_states(kept):
        _require_shared_window(state, axes)
    over, (split, whole) = frozenset(axes), _specs(axes)
    leaves = mapped(kept, own=_stacked, shared=_same, other=lambda leaf: replicated(jnp.asarray(leaf), axes, known=False))
    specs = mapped(kept, own=lambda _: split, shared=lambda _: whole, other=lambda _: whole)
    differing = jax.tree.map(lambda leaf: bool(axes_of(leaf) & over), rest)
    leaves = [*leaves, *jax.tree.map(lambda leaf, differs: _stacked(leaf) if differs else leaf, rest, differing)]
    specs = [*specs, *jax.tree.map(lambda differs: split if differs else whole, differing)]
    return Made(jax.tree.structure(made), jax.tree.leaves(leaves), jax.tree.leaves(specs))


def _parts(made: Any, given: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """What must be the same on all devices, and the rest."""
    if len(given) == 1:
        if find_states(made):
            return [made], []
        fix = "Pass tx.init, or a step with a state as its second argument."
        found = f"a {type(made).__name__} without one"
        raise explain(UsageError, "what step(params) returned", expected="the state of a wrapped optimizer", found=found, fix=fix)
    if type(made) is tuple and len(made) > 1 and [_form(item) for item in made[:2]] == [_form(item) for item in given[:2]]:
        return list(made[:2]), list(made[2:])
    expected, found = "a tuple (params, state, *rest)", "something else, or parameters or a state of another form than the arguments"
    fix = "Return both as they came in, with the updates applied: return optax.apply_updates(params, updates), state, loss."
    raise explain(UsageError, "what step returned", expected=expected, found=found, fix=fix)


def _form(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves]


def _require_shared_window(state: AccumulationState, axes: tuple[str, ...]) -> None:
    fix = f"Write tx = gradaccum.wrap(optimizer, steps=4, axis_name={axes[0] if len(axes) == 1 else axes!r})."
    require_shared(state, axes, fix)
    over: Axes = frozenset(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    if over - axes_of(state.weight):
        expected, found = f"the state of an optimizer with axis_name {axes}", "one of an optimizer without it"
        raise explain(UsageError, "state", expected=expected, found=found, fix=fix)


def _specs(axes: tuple[str, ...]) -> tuple[Spec, Spec]:
    """One entry for each device along its first axis; the same on all."""
    spec: Any = jax.sharding.PartitionSpec
    return spec(axes), spec()


def _own(tree: Tree) -> Tree:
    return mapped(tree, own=lambda leaf: leaf[0], shared=_same, other=_same)


def _stacked(leaf: Array) -> Array:
    return jnp.asarray(leaf)[None]


def _same(leaf: Array) -> Array:
    return leaf
