"""A step of one device, run on several: each gets its part of the batch, and all share
the window.

Parameters enter the user's step as copies, so that `jax.grad` gives each device its own
gradient without reduction. The devices' own sums enter and leave by a leading axis; all
else must come out the same on all devices, which is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.arrays import Array, Axes, Tree, typeof
from gradaccum_jax.checks import require_function
from gradaccum_jax.sharding import (
    axes_in_parts,
    axes_of,
    replicated,
    reshard,
    shard_map,
    vary,
)
from gradaccum_jax.state import AccumulationState, find_states
from gradaccum_jax.workers import group
from gradaccum_jax.workers.group import (
    copies_of_params,
    mapped,
    require_names,
    require_shared,
)
from gradaccum_jax.workers.layout import require_layout
from gradaccum_jax.xla import programs_in

Step = Callable[..., Any]
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def data_parallel(step: Step, mesh: Mesh, axis_name: str | tuple[str, ...]) -> Step:
    """Run `step` on all devices of a mesh axis, with the batch split over them: one
    window over all, reduced once at its end.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=4, axis_name="data", mesh=mesh)
        state = tx.init(params)
        train = gradaccum_jax.data_parallel(step, mesh, "data")
        train = jax.jit(train, donate_argnums=(0, 1))
        params, state, losses = train(params, state, x, y)

    In the step, differentiate the device's own loss, not the devices' average.
    ``weight=`` may differ between devices, and is 0 on a device without items. Random
    keys go into the batch, one for each device.

    Args:
        step: ``step(params, state, *batch)`` returns ``(params, state, *rest)``;
            ``step(params)`` returns a state, as ``tx.init`` does; flush and discard run
            as ``step(params, state)``. `state` is that of an optimizer wrapped with
            this `axis_name`, or a tree with it.
        mesh: a mesh with that axis. Along its other axes the compiler partitions the
            step, as under `jax.jit`.
        axis_name: the axis, or several in a tuple.

    Returns:
        A jitted function of the same arguments, for use under `jax.jit` too. Every
        array of the batch is split along its first axis, whose length the number of
        devices divides; a single bool, such as `last`, is the same on all. The open
        window's sums, weight and overflow flag, and each array of ``rest`` that differs
        between devices, come out with a leading axis of the devices: a loss has shape
        (devices,), or () if the step averages it by `jax.lax.pmean`.

    Raises:
        ArgumentTypeError, ArgumentValueError: `step` is no function, `mesh` no mesh or
            without the axis, or the batch cannot be split.
        UsageError: the state is not shared by these devices; or parameters, state or
            what the optimizer reads are made of a device's own batch, such as running
            averages that the step has not reduced.
    """
    axes = require_names(axis_name)
    require_function(
        "step", step, "Pass a function of (params, state, *batch), or tx.init."
    )
    devices = require_devices(mesh, axes, axis_name)

    def run(*args: Tree) -> Any:
        _require_arguments(args, devices)
        leaves, structure = jax.tree.flatten(args)
        specs = [
            spec for index, arg in enumerate(args) for spec in spec_of(index, arg, axes)
        ]
        leaves = placed(leaves, mesh, specs, axes)
        made: list[Made] = []

        def body(*local: Array) -> list[Array]:
            with copies_of_params():
                given = entered(jax.tree.unflatten(structure, local), axes)
                made.append(leaving(step(*given), given, axes))
            return made[-1].leaves

        def lifted(function: Step, out_specs: list[Spec]) -> Step:
            lift: Step = shard_map(
                function,
                mesh=mesh,
                in_specs=tuple(specs),
                out_specs=out_specs,
                axis_names=set(axes),
            )
            return lift

        # First for the types of what comes out alone, as jax.shard_map wants to be told
        # them.
        jax.eval_shape(lifted(lambda *local: body(*local)[:0], []), *leaves)
        program = jax.make_jaxpr(lifted(body, made[0].specs))(*leaves)
        out = core.jaxpr_as_fun(program)(*leaves)
        found = jax.tree.unflatten(made[0].structure, out)
        require_replicated(program, found, specs, made[-1].specs, axes)
        return found

    return jax.jit(run)


def require_devices(mesh: Any, axes: tuple[str, ...], axis_name: object) -> int:
    fix = "Write mesh = jax.make_mesh((4,), ('data',)) and axis_name='data'."
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise explain(
            ArgumentTypeError, "mesh", expected="a jax.sharding.Mesh", got=mesh, fix=fix
        )
    if not axes or not set(axes) <= set(mesh.axis_names):
        kind = ArgumentValueError if axes else ArgumentTypeError
        raise explain(
            kind,
            "axis_name",
            expected=f"axes of the mesh, which are {mesh.axis_names}",
            got=axis_name,
            fix=fix,
        )
    return math.prod(mesh.shape[axis] for axis in axes)


def _require_arguments(args: tuple[Tree, ...], devices: int) -> None:
    if not args or (len(args) > 1 and not find_states(args[1])):
        expected, found = (
            "the arguments (params, state, *batch)",
            "no state of a wrapped optimizer in the second place",
        )
        fix = "Write state = tx.init(params), of a tx with axis_name= and mesh=."
        raise explain(UsageError, "state", expected=expected, found=found, fix=fix)
    for tree in args[:2]:
        require_layout(tree, devices)
    for path, leaf in jax.tree_util.tree_flatten_with_path(args[2:])[0]:
        shape = jnp.shape(leaf)
        if not _is_flag(leaf) and (not shape or shape[0] % devices):
            name, expected = (
                f"batch{jax.tree_util.keystr(path)}",
                f"an array whose first axis {devices} devices divide",
            )
            fix = (
                "Pad the last items and give the padding no weight. What all devices"
                " share, the step can close over."
            )
            raise explain(
                ArgumentValueError,
                name,
                expected=expected,
                found=f"one of shape {shape}",
                fix=fix,
            )


def start_on(init: Step, mesh: Mesh | None, axes: tuple[str, ...]) -> Step:
    """Return `init` that makes a shared window's state outside of `jax.shard_map` too,
    on `mesh` or the mesh set around the call.
    """

    def start(params: Tree) -> Tree:
        found = mesh or jax.sharding.get_abstract_mesh()
        known = set(axes) <= set(found.axis_names) and not group.are_bound(axes)
        return data_parallel(init, found, axes)(params) if known else init(params)

    return start


# The arguments of a step on their way into `jax.shard_map`, and its results on their
# way out.


Spec = Any
"""A `jax.sharding.PartitionSpec`."""


class Made(NamedTuple):
    """The result of a step, ready to leave `jax.shard_map`."""

    structure: Any
    leaves: list[Array]
    specs: list[Spec]


def spec_of(index: int, arg: Tree, axes: tuple[str, ...]) -> list[Spec]:
    """Return how the devices share argument number `index`, leaf by leaf."""
    split, whole = _specs(axes)
    if index > 1:
        return [whole if _is_flag(leaf) else split for leaf in jax.tree.leaves(arg)]
    return jax.tree.leaves(
        mapped(arg, own=lambda _: split, shared=lambda _: whole, other=lambda _: whole)
    )


def placed(
    leaves: list[Array], mesh: Mesh, specs: list[Spec], axes: tuple[str, ...]
) -> list[Array]:
    """Return the leaves typed by `specs` on a mesh of ``AxisType.Explicit``, the
    default from JAX 0.9 on.
    """
    spread = {name for spec in specs for entry in spec for name in _named(entry, axes)}
    if any(
        kind != jax.sharding.AxisType.Explicit
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if name in spread
    ):
        return leaves

    def place(leaf: Array, spec: Spec) -> Array:
        wanted, own = (
            [_named(entry, axes) for entry in _entries(each)]
            for each in (spec, typeof(leaf).sharding.spec)
        )
        wanted += [()] * (len(own) - len(wanted))
        return (
            leaf
            if own == wanted and not axes_in_parts(leaf)
            else reshard(leaf, jax.sharding.NamedSharding(mesh, spec))
        )

    return [place(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]


def _entries(spec: Any) -> Any:
    """Return the entries of a PartitionSpec; JAX refuses to iterate over one that is
    typed ``reduced``.
    """
    return getattr(spec, "partitions", spec)


def _named(entry: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(
        axis
        for axis in (entry if isinstance(entry, tuple) else (entry,))
        if axis in axes
    )


def entered(args: tuple[Tree, ...], axes: tuple[str, ...]) -> list[Tree]:
    """Return the arguments for the step of one device: parameters that it can
    differentiate by alone, its own sums.
    """
    kept = [_own(arg) for arg in args[:2]]
    return [
        *(
            mapped(
                arg,
                own=_same,
                shared=_same,
                other=lambda leaf: vary(leaf, frozenset(axes)),
            )
            for arg in kept[:1]
        ),
        *kept[1:],
        *args[2:],
    ]


def leaving(made: Any, given: list[Tree], axes: tuple[str, ...]) -> Made:
    """Return what the step `made`: all replicated but for what differs, which gets a
    leading axis.
    """
    kept, rest = _parts(made, given)
    for state in find_states(kept):
        _require_shared_window(state, axes)
    over, (split, whole) = frozenset(axes), _specs(axes)
    leaves = mapped(
        kept,
        own=_stacked,
        shared=_same,
        other=lambda leaf: replicated(jnp.asarray(leaf), axes, known=False),
    )
    specs = mapped(
        kept, own=lambda _: split, shared=lambda _: whole, other=lambda _: whole
    )
    differing = jax.tree.map(lambda leaf: bool(axes_of(leaf) & over), rest)
    leaves = [
        *leaves,
        *jax.tree.map(
            lambda leaf, differs: _stacked(leaf) if differs else leaf, rest, differing
        ),
    ]
    specs = [
        *specs,
        *jax.tree.map(lambda differs: split if differs else whole, differing),
    ]
    return Made(
        jax.tree.structure(made), jax.tree.leaves(leaves), jax.tree.leaves(specs)
    )


def _parts(made: Any, given: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    if len(given) == 1:
        if find_states(made):
            return [made], []
        fix = "Pass tx.init, or a step with a state as its second argument."
        found = f"a {type(made).__name__} without one"
        raise explain(
            UsageError,
            "what step(params) returned",
            expected="the state of a wrapped optimizer",
            found=found,
            fix=fix,
        )
    if (
        type(made) is tuple
        and len(made) > 1
        and [_form(item) for item in made[:2]] == [_form(item) for item in given[:2]]
    ):
        return list(made[:2]), list(made[2:])
    expected, found = (
        "a tuple (params, state, *rest)",
        "something else, or parameters or a state of another form than the arguments",
    )
    fix = (
        "Return both as they came in, with the updates applied: return"
        " optax.apply_updates(params, updates), state, loss."
    )
    raise explain(
        UsageError, "what step returned", expected=expected, found=found, fix=fix
    )


def _form(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves]


def _require_shared_window(state: AccumulationState, axes: tuple[str, ...]) -> None:
    fix = (
        "Write tx = gradaccum.wrap(optimizer, steps=4,"
        f" axis_name={axes[0] if len(axes) == 1 else axes!r})."
    )
    require_shared(state, axes, fix)
    over: Axes = frozenset(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    if over - axes_of(state.weight):
        expected, found = (
            f"the state of an optimizer with axis_name {axes}",
            "one of an optimizer without it",
        )
        raise explain(UsageError, "state", expected=expected, found=found, fix=fix)


def _specs(axes: tuple[str, ...]) -> tuple[Spec, Spec]:
    """Return the specs of arrays that are split along the first axis, and of equal
    ones.
    """
    spec: Any = jax.sharding.PartitionSpec
    return spec(axes), spec()


def _own(tree: Tree) -> Tree:
    return mapped(tree, own=lambda leaf: leaf[0], shared=_same, other=_same)


def _is_flag(leaf: Array) -> bool:
    return bool(
        jnp.shape(leaf) == () and jnp.issubdtype(jnp.result_type(leaf), jnp.bool_)
    )


def _stacked(leaf: Array) -> Array:
    return jnp.asarray(leaf)[None]


def _same(leaf: Array) -> Array:
    return leaf


# The results of a step that differ from device to device, where JAX's types cannot
# tell.
#
# Parameters enter a step as copies, which are the same on all devices but of a type
# that may differ. The other way round, JAX types as the same on all devices what a
# device's own predicate chose, and what a callback returned. So the step's program is
# read from its arguments to its results, and types are not believed: what is made of a
# device's own batch, sums or place differs until a collective makes it the same.
#
# JAX renames the parameters of its primitives from version to version. So programs,
# axes and groups are found by what they are.


COPIES = ("pvary", "pcast", "reduced_vary_cast", "name")
"""The primitives that copy for each device what is the same on all, and one whose
parameter may be an axis's name by chance.
"""
REDUCING = (
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "pbroadcast",
)
"""The collectives that hand all devices along their axes the same, unlike all others.
"""
UNREAD = (
    "pure_callback",
    "io_callback",
    "new_ref",
    "array_ref",
    "empty_ref",
    "get",
    "swap",
    "freeze",
    "infeed",
)
"""The primitives whose results are not followed, and count as each device's own."""
NONE: Axes = frozenset()
Origins = list[Axes]
"""For each value the mesh axes along which it may differ."""
Specs = Sequence[Any]
"""A `jax.sharding.PartitionSpec` for each value."""


def require_replicated(
    program: Any, made: Tree, given: Specs, left: Specs, axes: tuple[str, ...]
) -> None:
    over = frozenset(axes)
    found = differing(program, [over if tuple(spec) else NONE for spec in given], over)
    for (path, _), differs, spec in zip(
        jax.tree_util.tree_flatten_with_path(made)[0], found, left, strict=True
    ):
        if differs and not tuple(spec):
            fix = (
                "Change parameters by what tx.update returns; average all else over the"
                " devices: jax.lax.pmean(value, axis_name)."
            )
            raise _own_error(f"what step returned, {jax.tree_util.keystr(path)}", fix)


def differing(jaxpr: Any, given: Origins, axes: Axes) -> Origins:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.invars, given, strict=True))

    def origin(atom: Any) -> Axes:
        return NONE if isinstance(atom, core.Literal) else known.get(atom, NONE)

    for equation in jaxpr.eqns:
        known |= zip(
            equation.outvars,
            _made(equation, [origin(atom) for atom in equation.invars], axes),
            strict=True,
        )
    return [origin(atom) for atom in jaxpr.outvars]


def _made(equation: Any, given: Origins, axes: Axes) -> Origins:
    name, params, results = (
        equation.primitive.name,
        equation.params,
        len(equation.outvars),
    )
    either = NONE.union(*given)
    if name == "replicated":
        if either and params["asked"]:
            fix = (
                "Give tx the parameters that the step was given, and average all else"
                " over the devices: jax.lax.pmean(value, axis_name)."
            )
            raise _own_error(params["asked"], fix)
        return [either - axes if params["known"] else either]
    if name == "together":
        return given
    if within := programs_in(equation):
        return _programmed(name, within, equation, given, axes)
    if name in UNREAD:
        return [axes] * results
    if name in COPIES:
        return [either] * results
    if along := _names(params) & axes:
        same = name in REDUCING and not any(
            _is_grouped(value) for value in params.values()
        )
        return [either - along if same else either | along] * results
    # A value of a type that differs, made of none of such a type, tells the device's
    # place.
    placed = not any(axes_of(atom.aval) & axes for atom in equation.invars)
    return [
        either | (axes_of(out.aval) & axes if placed else NONE)
        for out in equation.outvars
    ]


def _names(params: Any) -> Axes:
    """Return all words among a collective's parameters; the caller takes those that are
    axes.
    """
    held = [
        tuple(value) if isinstance(value, (set, frozenset)) else value
        for value in params.values()
    ]
    return frozenset(leaf for leaf in jax.tree.leaves(held) if isinstance(leaf, str))


def _is_grouped(value: object) -> bool:
    """True if a collective's parameter holds groups of devices, within which it
    reduces.
    """
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(group, (list, tuple)) for group in value)
    )


def _programmed(
    name: str, within: list[Any], equation: Any, given: Origins, axes: Axes
) -> Origins:
    """Return the same as `_made` of an equation that runs programs, such as a call or a
    loop.
    """
    results = len(equation.outvars)
    takes, returns = (
        {len(program.invars) for program in within},
        {len(program.outvars) for program in within},
    )
    if name == "cond" and takes == {len(given) - 1} and returns == {results}:
        branches = [differing(branch, given[1:], axes) for branch in within]
        return _chosen(
            given[0],
            within,
            [NONE.union(*one) for one in zip(*branches, strict=True)],
            axes,
        )
    if len(within) == 1 and takes == {len(given)} and returns == {results}:
        return (
            _scanned(equation, within[0], given, axes)
            if name == "scan"
            else differing(within[0], given, axes)
        )
    # Such as a while loop. Whatever it does, a result is made of its operands and of
    # what its programs make.
    either, before = NONE.union(*given), None
    while either != before:
        before = either
        either = either.union(
            *(
                made
                for program in within
                for made in differing(program, [before] * len(program.invars), axes)
            )
        )
    return _chosen(either, within, [either] * results, axes)


def _scanned(equation: Any, body: Any, given: Origins, axes: Axes) -> Origins:
    carries = sum(
        _rank(out) == _rank(inner)
        for out, inner in zip(equation.outvars, body.outvars, strict=True)
    )
    last = sum(
        _rank(atom) == _rank(inner)
        for atom, inner in zip(equation.invars, body.invars, strict=True)
    )
    first = last - carries
    while True:
        made = differing(body, given, axes)
        carried = [old | new for old, new in zip(given[first:last], made, strict=False)]
        if carried == given[first:last]:
            return made
        given = [*given[:first], *carried, *given[last:]]


def _chosen(predicate: Axes, programs: Any, made: Origins, axes: Axes) -> Origins:
    """Return `made` as differing along the axes along which devices choose differently
    which of `programs` runs, or how often.
    """
    waits = predicate & {
        getattr(effect, "name", "")
        for program in programs
        for effect in program.effects
    }
    if waits:
        fix = (
            "Take the collective out of the branch or loop, or decide by jax.lax.pmean"
            " or pmax, so that all devices decide alike."
        )
        expected = "the same collectives on all devices"
        found = (
            f"one over {sorted(waits)} in a branch or loop that each device decides on"
            " by itself"
        )
        raise explain(
            UsageError, "what step does", expected=expected, found=found, fix=fix
        )
    return [differs | predicate for differs in made]


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _own_error(name: str, fix: str) -> UsageError:
    expected, found = (
        "a value that is the same on all devices",
        "one that is made of a device's own batch or place, or by a callback",
    )
    return explain(UsageError, name, expected=expected, found=found, fix=fix)
