"""How the arguments of a step enter `jax.shard_map`, and how what it returns leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_jax.state import AccumulationState, find_states
from gradaccum_jax.types import Array, Axes, Tree, reshard, typeof
from gradaccum_jax.unreduced import axes_reduced
from gradaccum_jax.varying import axes_of, vary
from gradaccum_jax.workers.kinds import mapped, require_shared
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


def placed(leaves: list[Array], mesh: jax.sharding.Mesh, specs: list[Spec], axes: tuple[str, ...]) -> list[Array]:
    """Return the leaves typed by `specs` on a mesh whose types tell how arrays are shared (``AxisType.Explicit``, the default from 0.9 on).

    Args:
        leaves: the arguments' leaves.
        mesh: their mesh.
        specs: one for each leaf; with the axes of the batch.
        axes: along other axes a leaf stays sharded as it is.
    """
    spread = {name for spec in specs for entry in spec for name in _named(entry, axes)}
    if any(kind != jax.sharding.AxisType.Explicit for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if name in spread):
        return leaves

    def place(leaf: Array, spec: Spec) -> Array:
        wanted, own = ([_named(entry, axes) for entry in _entries(each)] for each in (spec, typeof(leaf).sharding.spec))
        wanted += [()] * (len(own) - len(wanted))
        return leaf if own == wanted and not axes_reduced(leaf) else reshard(leaf, jax.sharding.NamedSharding(mesh, spec))

    return [place(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]


def require_unsharded(params: Tree, name: str, axes: tuple[str, ...]) -> None:
    """Raise if parameters are sharded along the axes of the batch: `jax.shard_map` would gather them, and return replicated gradients.

    An array knows how it is sharded, a tracer does so on an explicit mesh only.

    Raises:
        UsageError: one is sharded so; names it.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not isinstance(leaf, jax.Array):
            continue
        sharding: Any = (typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf).sharding
        found = {axis for entry in _entries(getattr(sharding, "spec", ())) for axis in _named(entry, axes) if sharding.mesh.shape[axis] > 1}
        if found:
            fix = (
                "Leave mesh and axis_name out: XLA partitions the call under jax.jit. Or do so in a jax.shard_map of your own, "
                "and gather each parameter in the loss function (FSDP): jax.lax.all_gather(p, axis_name, tiled=True)."
            )
            where, expected = f"{name}{jax.tree_util.keystr(path)}", f"parameters that are replicated along {axes}"
            raise explain(UsageError, where, expected=expected, found=f"one that is sharded along {sorted(found)}", fix=fix)


def _entries(spec: Any) -> Any:
    """Return the entries of a PartitionSpec; JAX refuses to iterate over one that is typed ``reduced``."""
    return getattr(spec, "partitions", spec)


def _named(entry: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of `axes` an entry of a PartitionSpec names."""
    return tuple(axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis in axes)


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
