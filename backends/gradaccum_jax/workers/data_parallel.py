"""A step of one device, run on several: each gets its part of the batch, and all share the window.

The step is the user's ordinary one. Three things around it make it right on several devices: parameters enter as copies, so that `jax.grad`
gives each device its own gradient and no reduction; the devices' own sums enter and leave by a leading axis; and the state that the step
returns is checked: all but these sums must be the same on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.state import find_states
from gradaccum_jax.types import Array, Tree
from gradaccum_jax.varying import shard_map
from gradaccum_jax.workers.checks import require_names
from gradaccum_jax.workers.crossing import Made, Spec, entered, leaving, placed, spec_of
from gradaccum_jax.workers.kinds import copies_of_params
from gradaccum_jax.workers.layout import require_layout
from gradaccum_jax.workers.origins import require_replicated

Step = Callable[..., Any]


def data_parallel(step: Step, mesh: jax.sharding.Mesh, axis_name: str | tuple[str, ...]) -> Step:
    """`step` on all devices of a mesh axis, with the batch split over them: one window over all, reduced once at its end.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=4, axis_name="data")
        state = gradaccum_jax.data_parallel(tx.init, mesh, "data")(params)
        train = jax.jit(gradaccum_jax.data_parallel(step, mesh, "data"), donate_argnums=(0, 1))
        params, state, losses = train(params, state, x, y)

    In the step, parameters and batch are those of one device, and gradients too. Differentiate the device's own loss: the gradient of one
    that is averaged over the devices is divided by their number already, and the window does it again. ``weight=`` may differ between
    devices, and is 0 on a device without items. Random keys go into the batch, one for each device.

    Args:
        step: ``step(params, state, *batch)`` returns ``(params, state, *rest)``; ``step(params)`` returns a state, as ``tx.init`` does.
            Flush and discard run as ``step(params, state)``. `state` is that of an optimizer wrapped with this ``axis_name``, or a tree
            with it. The parameters that come back are the given ones with the updates of `tx` applied.
        mesh: a mesh with that axis. Along its other axes the compiler partitions the step, as under `jax.jit`.
        axis_name: the axis, or several in a tuple.

    Returns:
        A jitted function of the same arguments, for use under `jax.jit` too. Every array of the batch is split along its first axis, whose
        length is a multiple of the number of devices. Parameters and the inner optimizer's state are replicated. The sums, the weight and
        the overflow flag of the open window are each device's own: outside of the step they have a leading axis, one entry for each
        device, and so has each array of ``rest`` that differs between devices. A loss has shape (devices,), or () if the step averages it
        by `jax.lax.pmean`.

    Raises:
        ArgumentTypeError, ArgumentValueError: `step` is no function, `mesh` no mesh or without the axis, or the batch cannot be split.
        UsageError: the state is not shared by these devices; or parameters or state come out made of a device's own batch, such as running
            averages that the step has not reduced; or the optimizer is given, or closes over, something that is made of it.
    """
    axes = require_names(axis_name)
    if not callable(step):
        fix = "Pass a function of (params, state, *batch), or tx.init."
        raise explain(ArgumentTypeError, "step", expected="a function", got=step, fix=fix)
    devices = _require_devices(mesh, axes, axis_name)

    def run(*args: Tree) -> Any:
        _require_arguments(args, devices)
        leaves, structure = jax.tree.flatten(args)
        specs = [spec for index, arg in enumerate(args) for spec in spec_of(index, arg, axes)]
        leaves = placed(leaves, mesh, specs, axes)
        made: list[Made] = []

        def body(*local: Array) -> list[Array]:
            with copies_of_params():
                given = entered(jax.tree.unflatten(structure, local), axes)
                made.append(leaving(step(*given), given, axes))
            return made[-1].leaves

        def lifted(function: Step, out_specs: list[Spec]) -> Step:
            lift: Step = shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, axis_names=set(axes))
            return lift

        # First for the types of what comes out alone, as jax.shard_map wants to be told them.
        jax.eval_shape(lifted(lambda *local: body(*local)[:0], []), *leaves)
        program = jax.make_jaxpr(lifted(body, made[0].specs))(*leaves)
        out = core.jaxpr_as_fun(program)(*leaves)
        found = jax.tree.unflatten(made[0].structure, out)
        require_replicated(program, found, specs, made[-1].specs, axes)
        return found

    return jax.jit(run)


def _require_devices(mesh: Any, axes: tuple[str, ...], axis_name: object) -> int:
    """The number of devices along the axes of the mesh."""
    fix = "Write mesh = jax.make_mesh((4,), ('data',)) and axis_name='data'."
    if not isinstance(mesh, jax.sharding.Mesh):
        raise explain(ArgumentTypeError, "mesh", expected="a jax.sharding.Mesh", got=mesh, fix=fix)
    if not axes or not set(axes) <= set(mesh.axis_names):
        kind = ArgumentValueError if axes else ArgumentTypeError
        raise explain(kind, "axis_name", expected=f"axes of the mesh, which are {mesh.axis_names}", got=axis_name, fix=fix)
    return math.prod(mesh.shape[axis] for axis in axes)


def _require_arguments(args: tuple[Tree, ...], devices: int) -> None:
    if not args or (len(args) > 1 and not find_states(args[1])):
        expected, found = "the arguments (params, state, *batch)", "no state of a wrapped optimizer in the second place"
        fix = "Write state = gradaccum_jax.data_parallel(tx.init, mesh, axis_name)(params)."
        raise explain(UsageError, "state", expected=expected, found=found, fix=fix)
    for tree in args[:2]:
        require_layout(tree, devices)
    for path, leaf in jax.tree_util.tree_flatten_with_path(args[2:])[0]:
        shape = jnp.shape(leaf)
        if not shape or shape[0] % devices:
            name, expected = f"batch{jax.tree_util.keystr(path)}", f"an array whose first axis {devices} devices divide"
            fix = "Pad the last items and give the padding no weight. What all devices share, the step can close over."
            raise explain(ArgumentValueError, name, expected=expected, found=f"one of shape {shape}", fix=fix)
