"""A step of one device, run on several: each gets its part of the batch, and all share
the window.

Parameters enter the user's step as copies, so that `jax.grad` gives each device its own
gradient without reduction. The devices' own sums enter and leave by a leading axis; all
else must come out the same on all devices. The types of copies cannot tell whether it
does. So the step is traced once more before, with parameters that are typed as the same
on all devices, and there JAX's types tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
)
from gradaccum.kit import explain
from gradaccum_jax.arrays import Array, Tree, typeof
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
    AVERAGE,
    ParamsType,
    mapped,
    params_typed_as,
    require_names,
    require_same,
    require_shared,
    spread_axes,
)
from gradaccum_jax.workers.layout import require_layout

Step = Callable[..., Any]
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Spec = Any
"""A `jax.sharding.PartitionSpec`."""


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

        def on_each_device(
            function: Callable[..., Any], out_specs: Any
        ) -> Callable[..., Any]:
            def body(*local_leaves: Array) -> Any:
                local_args = jax.tree.unflatten(structure, local_leaves)
                return function(*_without_device_axis(local_args))

            mapped_body: Callable[..., Any] = shard_map(
                body,
                mesh=mesh,
                in_specs=tuple(specs),
                out_specs=out_specs,
                axis_names=set(axes),
            )
            return mapped_body

        _require_same_results(step, on_each_device, leaves, axes)
        results: list[Results] = []

        def step_with_copies(*args: Tree) -> list[Array]:
            with params_typed_as(ParamsType.COPY):
                made = step(*_with_copied_params(args, axes))
            results.append(results_of(made, args, axes))
            return results[-1].leaves

        # First for the types of what comes out alone, as jax.shard_map must be given
        # their specs.
        jax.eval_shape(
            on_each_device(lambda *args: step_with_copies(*args)[:0], []), *leaves
        )
        out = on_each_device(step_with_copies, results[0].specs)(*leaves)
        return jax.tree.unflatten(results[0].structure, out)

    return jax.jit(run)


def require_devices(mesh: Any, axes: tuple[str, ...], axis_name: object) -> int:
    fix = "Write mesh = jax.make_mesh((4,), ('data',)) and axis_name='data'."
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise explain(
            ArgumentTypeError, "mesh", expected="a jax.sharding.Mesh", got=mesh, fix=fix
        )
    if not axes or not set(axes) <= set(mesh.axis_names):
        raise explain(
            ArgumentValueError if axes else ArgumentTypeError,
            "axis_name",
            expected=f"axes of the mesh, which are {mesh.axis_names}",
            got=axis_name,
            fix=fix,
        )
    return math.prod(mesh.shape[axis] for axis in axes)


def _require_arguments(args: tuple[Tree, ...], devices: int) -> None:
    if not args or (len(args) > 1 and not find_states(args[1])):
        raise explain(
            UsageError,
            "state",
            expected="the arguments (params, state, *batch)",
            found="no state of a wrapped optimizer in the second place",
            fix="Write state = tx.init(params), of a tx with axis_name= and mesh=.",
        )
    for tree in args[:2]:
        require_layout(tree, devices)
    for path, leaf in jax.tree_util.tree_flatten_with_path(args[2:])[0]:
        shape = jnp.shape(leaf)
        if not _is_flag(leaf) and (not shape or shape[0] % devices):
            raise explain(
                ArgumentValueError,
                f"batch{jax.tree_util.keystr(path)}",
                expected=f"an array whose first axis {devices} devices divide",
                found=f"one of shape {shape}",
                fix="Pad the last items and give the padding no weight. What all"
                " devices share, the step can close over.",
            )


def _require_same_results(
    step: Step,
    on_each_device: Callable[..., Callable[..., Any]],
    leaves: list[Array],
    axes: tuple[str, ...],
) -> None:
    """Raise if JAX's types tell that parameters or a state would come out of the step
    different from device to device.
    """

    def check(*args: Tree) -> list[Array]:
        with params_typed_as(ParamsType.SAME):
            made = step(*args)
            updated, _ = split_results(made, args)
            for state in find_states(updated):
                _require_shared_window(state, axes)
            shared = mapped(updated, own=lambda _: None, shared=_same, other=_same)
            require_same("what step returned, ", shared, axes, AVERAGE)
        return []

    try:
        jax.eval_shape(on_each_device(check, []), *leaves)
    except GradAccumError:
        raise
    except Exception:
        # Some steps have these types for copies alone: that of a `jax.custom_vjp`
        # whose gradient is a device's own, or of a scan that begins with a parameter.
        # What is wrong in the step itself is raised again where copies are traced.
        pass


def start_on(init: Step, mesh: Mesh | None, axes: tuple[str, ...]) -> Step:
    """Return `init` that makes a shared window's state outside of `jax.shard_map` too,
    on `mesh` or the mesh set around the call.
    """

    def start(params: Tree) -> Tree:
        known_mesh = mesh or jax.sharding.get_abstract_mesh()
        is_known = set(axes) <= set(known_mesh.axis_names)
        if is_known and not group.are_bound(axes):
            return data_parallel(init, known_mesh, axes)(params)
        return init(params)

    return start


# The arguments of a step on their way into `jax.shard_map`.


def spec_of(index: int, arg: Tree, axes: tuple[str, ...]) -> list[Spec]:
    """Return how the devices share argument number `index`, leaf by leaf."""
    split, same = _specs(axes)
    if index > 1:
        return [same if _is_flag(leaf) else split for leaf in jax.tree.leaves(arg)]
    specs = mapped(
        arg, own=lambda _: split, shared=lambda _: same, other=lambda _: same
    )
    return jax.tree.leaves(specs)


def _specs(axes: tuple[str, ...]) -> tuple[Spec, Spec]:
    """Return the specs of arrays that are split along the first axis, and of equal
    ones.
    """
    spec: Any = jax.sharding.PartitionSpec
    return spec(axes), spec()


def placed(
    leaves: list[Array], mesh: Mesh, specs: list[Spec], axes: tuple[str, ...]
) -> list[Array]:
    """Return the leaves typed by `specs` on a mesh of ``AxisType.Explicit``, the
    default from JAX 0.9 on.
    """
    used_axes = {
        name for spec in specs for entry in spec for name in _named(entry, axes)
    }
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types[name] != jax.sharding.AxisType.Explicit for name in used_axes):
        return leaves
    return [
        _placed_leaf(leaf, mesh, spec, axes)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def _placed_leaf(leaf: Array, mesh: Mesh, spec: Spec, axes: tuple[str, ...]) -> Array:
    wanted = [_named(entry, axes) for entry in spec]
    own_spec = typeof(leaf).sharding.spec
    # JAX refuses to iterate over a PartitionSpec that is typed ``reduced``.
    entries = getattr(own_spec, "partitions", own_spec)
    given = [_named(entry, axes) for entry in entries]
    wanted += [()] * (len(given) - len(wanted))
    if given == wanted and not axes_in_parts(leaf):
        return leaf
    return reshard(leaf, jax.sharding.NamedSharding(mesh, spec))


def _named(entry: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name in axes)


def _without_device_axis(args: tuple[Tree, ...]) -> list[Tree]:
    """Return the arguments for the step of one device, with its own sums."""
    own = [
        mapped(arg, own=lambda leaf: leaf[0], shared=_same, other=_same)
        for arg in args[:2]
    ]
    return [*own, *args[2:]]


def _with_copied_params(args: tuple[Tree, ...], axes: tuple[str, ...]) -> list[Tree]:
    params, *rest = args
    over = frozenset(axes)
    copies = mapped(
        params, own=_same, shared=_same, other=lambda leaf: vary(leaf, over)
    )
    return [copies, *rest]


# The results of a step on their way out of `jax.shard_map`.


class Results(NamedTuple):
    """The results of a step, ready to leave `jax.shard_map`."""

    structure: Any
    leaves: list[Array]
    specs: list[Spec]


def results_of(made: Any, args: tuple[Tree, ...], axes: tuple[str, ...]) -> Results:
    """Return what the step `made`: all typed as the same on all devices but for what
    differs, which gets a leading axis.
    """
    updated, rest = split_results(made, args)
    for state in find_states(updated):
        _require_shared_window(state, axes)
    split, same = _specs(axes)
    leaves = mapped(
        updated,
        own=_with_device_axis,
        shared=_same,
        other=lambda leaf: replicated(jnp.asarray(leaf), axes),
    )
    specs = mapped(
        updated, own=lambda _: split, shared=lambda _: same, other=lambda _: same
    )
    rest_leaves = jax.tree.leaves(rest)
    differs = [bool(axes_of(leaf) & frozenset(axes)) for leaf in rest_leaves]
    rest_leaves = [
        _with_device_axis(leaf) if leaf_differs else leaf
        for leaf, leaf_differs in zip(rest_leaves, differs, strict=True)
    ]
    rest_specs = [split if leaf_differs else same for leaf_differs in differs]
    return Results(
        jax.tree.structure(made),
        [*jax.tree.leaves(leaves), *rest_leaves],
        [*jax.tree.leaves(specs), *rest_specs],
    )


def split_results(made: Any, args: tuple[Tree, ...]) -> tuple[Tree, Tree]:
    """Return the parameters and the state that a step made, or the state that an init
    made, and the rest.
    """
    if len(args) == 1:
        if find_states(made):
            return made, ()
        raise explain(
            UsageError,
            "what step(params) returned",
            expected="the state of a wrapped optimizer",
            found=f"a {type(made).__name__} without one",
            fix="Pass tx.init, or a step with a state as its second argument.",
        )
    if (
        type(made) is tuple
        and len(made) > 1
        and [_form(item) for item in made[:2]] == [_form(item) for item in args[:2]]
    ):
        return made[:2], made[2:]
    raise explain(
        UsageError,
        "what step returned",
        expected="a tuple (params, state, *rest)",
        found="something else, or parameters or a state of another form than the"
        " arguments",
        fix="Return both as they came in, with the updates applied: return"
        " optax.apply_updates(params, updates), state, loss.",
    )


def _form(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [jnp.shape(leaf) for leaf in leaves]


def _require_shared_window(state: AccumulationState, axes: tuple[str, ...]) -> None:
    name = axes[0] if len(axes) == 1 else axes
    fix = f"Write tx = gradaccum.wrap(optimizer, steps=4, axis_name={name!r})."
    require_shared(state, axes, fix)
    if spread_axes(axes) - axes_of(state.weight):
        raise explain(
            UsageError,
            "state",
            expected=f"the state of an optimizer with axis_name {axes}",
            found="one of an optimizer without it",
            fix=fix,
        )


def _is_flag(leaf: Array) -> bool:
    is_bool = jnp.issubdtype(jnp.result_type(leaf), jnp.bool_)
    return bool(jnp.shape(leaf) == () and is_bool)


def _with_device_axis(leaf: Array) -> Array:
    return jnp.asarray(leaf)[None]


def _same(leaf: Array) -> Array:
    return leaf
