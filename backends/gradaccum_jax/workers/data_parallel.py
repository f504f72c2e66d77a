"""Run a training step on several devices. Each device gets its part of the batch, and
all devices share the window.

The user's step gets per-device copies of the parameters, because `jax.grad` then
returns each device's own gradient without a reduction. Outside `jax.shard_map`, the
gradient sums of the devices have a leading axis with one entry per device.

The parameters that the step returns must be the same on all devices, and so must the
state, except for each device's own part of the open window. JAX's type of a value shows
whether the value may differ between devices. However, every value that is computed from
per-device copies has the type of a value that may differ. So the step is first traced
with parameters whose types say that they are the same on all devices. In this trace,
the types show which of the returned values depend on a device's own batch.
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
    """Return a function that splits the batch over the devices of a mesh axis and runs
    `step` on each device. The devices share one window, and their gradient sums are
    reduced once, at the end of the window.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=4, axis_name="data", mesh=mesh)
        state = tx.init(params)
        train = gradaccum_jax.data_parallel(step, mesh, "data")
        train = jax.jit(train, donate_argnums=(0, 1))
        params, state, losses = train(params, state, x, y)

    In the step, differentiate the device's own loss, not the average over the devices.
    ``weight=`` may differ between devices; pass 0 on a device without items. Pass
    random keys in the batch, one key for each device.

    Args:
        step: ``step(params, state, *batch)`` returns ``(params, state, *rest)``. Two
            other forms are accepted: ``step(params)``, which returns a state, like
            ``tx.init``; and ``step(params, state)``, without a batch, for a step that
            flushes or discards a window. `state` is the state of an optimizer wrapped
            with this `axis_name`, or a tree that contains such a state.
        mesh: a mesh that contains `axis_name`. Along its other axes, the compiler
            partitions the step as under `jax.jit`.
        axis_name: the mesh axis, or a tuple of several axes.

    Returns:
        A jitted function that accepts the same arguments as `step`. It can also be
        called under `jax.jit`. Every array of the batch is split along its first axis,
        whose length must be a multiple of the number of devices. A single bool, such as
        `last`, is passed to all devices. The gradient sums, the loss, the weight and
        the overflow flag of the open window are returned with a leading axis that has
        one entry per device. Each array in ``rest`` that differs between devices gets
        this axis too. For example, a loss has shape (devices,), or () if the step
        averages it with `jax.lax.pmean`.

    Raises:
        UsageError: `step` does not return the state of an optimizer with this
            `axis_name`; or the parameters, the state or values that the optimizer reads
            depend on a device's own batch, for example because the step has not
            averaged running statistics over the devices.
    """
    axes = names_of(axis_name)

    def run(*args: Tree) -> Any:
        for state in find_states(args):
            if not jnp.ndim(state.weight):
                raise not_shared_error("a state", axes)
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
                require_shared("results of step", params_and_state, axes)
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

        # This trace only determines the types of the results. The `PartitionSpec` of
        # each result, which `jax.shard_map` needs in advance, is derived from its type.
        jax.eval_shape(
            on_each_device(lambda *args: step_with_copies(*args)[:0], []), *leaves
        )
        out = on_each_device(step_with_copies, results[0].specs)(*leaves)
        return jax.tree.unflatten(results[0].structure, out)

    return jax.jit(run)


def _trace(check: Step, leaves: list[Array]) -> None:
    """Trace `check`, and ignore all errors except a `GradAccumError`. For example,
    `check` raises a `GradAccumError` if JAX's types show that the step's new parameters
    may differ between devices.
    """
    try:
        jax.eval_shape(check, *leaves)
    except GradAccumError:
        raise
    except Exception:
        # Some steps can be traced only with per-device copies of the parameters, for
        # example if a `jax.custom_vjp` returns the device's own gradient, or if a
        # parameter is the initial carry of a scan. An error in the step itself is
        # raised again when the step is traced with copies.
        pass


def start_on(init: Step, mesh: Mesh | None, axes: tuple[str, ...]) -> Step:
    """Return a version of `init` that can be called both inside and outside
    `jax.shard_map`.

    Inside a `jax.shard_map` over `axes`, the returned function only calls `init`.
    Outside, it runs `init` on each device of `mesh` with `data_parallel`. If `mesh` is
    None, the mesh of the surrounding context is used. If this mesh does not have all of
    `axes`, `init` is called directly and raises an error.
    """

    def start(params: Tree) -> Tree:
        known_mesh = mesh or jax.sharding.get_abstract_mesh()
        is_known = set(axes) <= set(known_mesh.axis_names)
        if is_known and not are_bound(axes):
            return data_parallel(init, known_mesh, axes)(params)
        return init(params)

    return start


def specs_of(index: int, arg: Tree, axes: tuple[str, ...]) -> list[Spec]:
    """Return the `PartitionSpec` of each leaf of `arg`, the step's argument at position
    `index`.
    """
    split, same = _specs(axes)
    if index > 1:
        return [same if _is_flag(leaf) else split for leaf in jax.tree.leaves(arg)]
    specs = map_by_kind(
        arg, own=lambda _: split, shared=lambda _: same, other=lambda _: same
    )
    return jax.tree.leaves(specs)


def _specs(axes: tuple[str, ...]) -> tuple[Spec, Spec]:
    """Return two `PartitionSpec` objects: one for an array that is split along its
    first axis over `axes`, and one for an array that is the same on all devices.
    """
    spec: Any = jax.sharding.PartitionSpec
    return spec(axes if len(axes) > 1 else axes[0]), spec()


def _typed_by(leaf: Array, spec: Spec, mesh: Mesh) -> Array:
    """If `mesh` has axes of ``AxisType.Explicit``, the default from JAX 0.9 on, reshard
    `leaf` so that its type contains the sharding `spec`. On such a mesh,
    `jax.shard_map` accepts no other type.
    """
    is_explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    leaf_spec = typeof(leaf).sharding.spec
    if not is_explicit or tuple(leaf_spec)[: len(spec)] == tuple(spec):
        return leaf
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.sharding.reshard(leaf, sharding)  # type: ignore[no-untyped-call]


def _without_device_axis(arg: Tree) -> Tree:
    """Remove the leading device axis from the fields of the state that differ between
    devices. On each device, the step expects these fields without this axis.
    """
    return map_by_kind(arg, own=lambda leaf: jnp.squeeze(leaf, 0))


class Results(NamedTuple):
    """The results of a step as `jax.shard_map` needs them: the structure, the leaves,
    and the `PartitionSpec` of each leaf.
    """

    structure: Any
    leaves: list[Array]
    specs: list[Spec]


def results_of(results: Any, args: tuple[Tree, ...], axes: tuple[str, ...]) -> Results:
    """Prepare the results of a step for `jax.shard_map`. Results that are the same on
    all devices are marked as replicated. Results that differ between devices get a
    leading device axis.
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
    split, same = _specs(axes)
    for leaf in jax.tree.leaves(rest):
        spec = same
        if axes_of(leaf) & frozenset(axes):
            spec = split
            leaf = _with_device_axis(leaf)
        leaves.append(leaf)
        specs.append(spec)
    return Results(jax.tree.structure(results), leaves, specs)


def split_results(results: Any, args: tuple[Tree, ...]) -> tuple[Tree, Tree]:
    """Split the results of a step into ``(params, state)`` and the rest. `args` are the
    arguments of the step.

    If there is only one argument, the step is a function such as ``tx.init``, which
    returns only a state. In this case, return this state and an empty rest.
    """
    if len(args) == 1 or not isinstance(results, tuple | list):
        return results, ()
    return results[:2], results[2:]


def require_shared_window(tree: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless `tree` contains the state of at least one wrapped optimizer, and
    every such optimizer was wrapped with ``axis_name=axes``.
    """
    weights = [state.weight for state in find_states(tree)]
    if not weights or any(spread_axes(axes) - axes_of(weight) for weight in weights):
        raise not_shared_error("step to return (params, state), with the state", axes)


def not_shared_error(expected: str, axes: tuple[str, ...]) -> UsageError:
    return UsageError(
        f"state: expected {expected} of an optimizer wrapped with axis_name"
        f" {axes}; got no such state. Write tx ="
        f" gradaccum.wrap(..., axis_name={axes!r}, mesh=mesh) and state ="
        " tx.init(params)."
    )


def _is_flag(leaf: Array) -> bool:
    return jnp.shape(leaf) == () and jnp.result_type(leaf) == jnp.bool_


def _with_device_axis(leaf: Array) -> Array:
    return jnp.asarray(leaf)[None]
