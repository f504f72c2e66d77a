"""A step of one device, run on several: each gets its part of the batch, and all share
the window.

Parameters enter the user's step as copies, so that `jax.grad` gives each device its own
gradient without reduction. The devices' own sums enter and leave by a leading axis; all
else must come out the same on all devices. The types of copies cannot tell whether it
does. So the step is traced once more before, with parameters that are typed as the same
on all devices, and there JAX's types tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum import GradAccumError, UsageError
from gradaccum_jax.arrays import Array, Tree, typeof
from gradaccum_jax.sharding import axes_of, replicated, vary
from gradaccum_jax.state import find_states
from gradaccum_jax.workers.group import (
    ParamsType,
    are_bound,
    map_by_kind,
    names_of,
    params_typed_as,
    require_shared,
    spread_axes,
)

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
        window's sums, loss, weight and overflow flag, and each array of ``rest`` that
        differs between devices, come out with a leading axis of the devices: a loss has
        shape (devices,), or () if the step averages it by `jax.lax.pmean`.

    Raises:
        UsageError: `step` returns no state of an optimizer with this `axis_name`, or
            parameters, state or what the optimizer reads are made of a device's own
            batch, such as running averages that the step has not reduced.
    """
    axes = names_of(axis_name)

    def run(*args: Tree) -> Any:
        specs = [
            spec
            for index, arg in enumerate(args)
            for spec in specs_of(index, arg, axes)
        ]
        leaves, structure = jax.tree.flatten(args)
        leaves = list(map(_typed_by, leaves, specs, [mesh] * len(specs)))

        def on_each_device(function: Step, out_specs: Any) -> Callable[..., Any]:
            def body(*local_leaves: Array) -> Any:
                local_args = jax.tree.unflatten(structure, local_leaves)
                return function(*map(_without_device_axis, local_args))

            body_on_devices: Callable[..., Any] = jax.shard_map(
                body,
                mesh=mesh,
                in_specs=tuple(specs),
                out_specs=out_specs,
                axis_names=set(axes),
            )
            return body_on_devices

        def check(*args: Tree) -> list[Array]:
            with params_typed_as(ParamsType.SAME):
                params_and_state, _ = split_results(step(*args), args)
                require_shared_window(params_and_state, axes)
                require_shared("what step returned, ", params_and_state, axes)
            return []

        _trace(on_each_device(check, []), leaves)
        results: list[Results] = []

        def step_with_copies(*args: Tree) -> list[Array]:
            params, *state_and_batch = args
            copies = map_by_kind(params, other=lambda p: vary(p, frozenset(axes)))
            with params_typed_as(ParamsType.COPY):
                step_results = step(copies, *state_and_batch)
            results.append(results_of(step_results, args, axes))
            return results[-1].leaves

        # First for the types of what comes out alone, as jax.shard_map must be given
        # their specs.
        jax.eval_shape(
            on_each_device(lambda *args: step_with_copies(*args)[:0], []), *leaves
        )
        out = on_each_device(step_with_copies, results[0].specs)(*leaves)
        return jax.tree.unflatten(results[0].structure, out)

    return jax.jit(run)


def _trace(check: Step, leaves: list[Array]) -> None:
    """Trace `check`, which raises if JAX's types tell that parameters or a state would
    come out of the step different from device to device.
    """
    try:
        jax.eval_shape(check, *leaves)
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
        if is_known and not are_bound(axes):
            return data_parallel(init, known_mesh, axes)(params)
        return init(params)

    return start


# The arguments of a step on their way into `jax.shard_map`.


def specs_of(index: int, arg: Tree, axes: tuple[str, ...]) -> list[Spec]:
    """Return how the devices share argument number `index`, leaf by leaf."""
    split, same = _specs(axes)
    if index > 1:
        return [same if _is_flag(leaf) else split for leaf in jax.tree.leaves(arg)]
    specs = map_by_kind(
        arg, own=lambda _: split, shared=lambda _: same, other=lambda _: same
    )
    return jax.tree.leaves(specs)


def _specs(axes: tuple[str, ...]) -> tuple[Spec, Spec]:
    """Return the specs of arrays that are split along the first axis, and of equal
    ones.
    """
    spec: Any = jax.sharding.PartitionSpec
    return spec(axes if len(axes) > 1 else axes[0]), spec()


def _typed_by(leaf: Array, spec: Spec, mesh: Mesh) -> Array:
    """Return a leaf typed by its spec on a mesh of ``AxisType.Explicit``, the default
    from JAX 0.9 on: there `jax.shard_map` takes no other type.
    """
    is_explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    leaf_spec = typeof(leaf).sharding.spec
    if not is_explicit or tuple(leaf_spec)[: len(spec)] == tuple(spec):
        return leaf
    reshard: Any = jax.sharding.reshard
    return reshard(leaf, jax.sharding.NamedSharding(mesh, spec))


def _without_device_axis(arg: Tree) -> Tree:
    """Return an argument for the step of one device, with its own sums."""
    return map_by_kind(arg, own=lambda leaf: jnp.squeeze(leaf, 0))


# The results of a step on their way out of `jax.shard_map`.


class Results(NamedTuple):
    """The results of a step, ready to leave `jax.shard_map`."""

    structure: Any
    leaves: list[Array]
    specs: list[Spec]


def results_of(results: Any, args: tuple[Tree, ...], axes: tuple[str, ...]) -> Results:
    """Return what the step returned: all typed as the same on all devices but for what
    differs, which gets a leading axis.
    """
    params_and_state, rest = split_results(results, args)
    require_shared_window(params_and_state, axes)
    params_and_state = map_by_kind(
        params_and_state,
        own=_with_device_axis,
        other=lambda leaf: replicated(jnp.asarray(leaf), axes),
    )
    leaves = jax.tree.leaves(params_and_state)
    specs = specs_of(0, params_and_state, axes)
    for leaf in jax.tree.leaves(rest):
        spec = _specs(axes)[1]
        if axes_of(leaf) & frozenset(axes):
            spec = _specs(axes)[0]
            leaf = _with_device_axis(leaf)
        leaves.append(leaf)
        specs.append(spec)
    return Results(jax.tree.structure(results), leaves, specs)


def split_results(results: Any, args: tuple[Tree, ...]) -> tuple[Tree, Tree]:
    """Return the parameters and the state that a step returned, or the state that an
    init returned, and the rest.
    """
    if len(args) == 1:
        return results, ()
    return results[:2], results[2:]


def require_shared_window(tree: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless `tree` holds states of optimizers with `axes` and of no others."""
    weights = [state.weight for state in find_states(tree)]
    if not weights or any(spread_axes(axes) - axes_of(weight) for weight in weights):
        raise UsageError(
            "state: expected (params, state) with the state of an optimizer with"
            f" axis_name {axes}; got another. Write tx = gradaccum.wrap(...,"
            f" axis_name={axes!r}, mesh=mesh) and state = tx.init(params)."
        )


def _is_flag(leaf: Array) -> bool:
    is_bool = jnp.issubdtype(jnp.result_type(leaf), jnp.bool_)
    return bool(jnp.shape(leaf) == () and is_bool)


def _with_device_axis(leaf: Array) -> Array:
    return jnp.asarray(leaf)[None]
