"""The inner optimizer's call at the end of a window: made once or not at all, with no second buffer of the parameters' size.

The accumulator doubles as the buffer of the updates. Where the inner optimizer runs, its updates take the accumulator's place. Where it
does not, the accumulator passes through. A select then tells them apart. The parameters are closed over, not carried. So XLA works in
place, and a micro-batch in mid-window costs the addition and the select. Nothing clears the updates from the accumulator: the next window's
first micro-batch writes over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Options, Scalar, explain
from gradaccum_jax.arrays import Array, Axes, Extra, Handed, InnerState, Params, Tree, Updates, cast_like, is_none, takes_part, wider
from gradaccum_jax.control_flow import named_axes, once, traced_once
from gradaccum_jax.sharding import every, replicated
from gradaccum_jax.sums import divide, emptied, fills, pick, to
from gradaccum_jax.workers.group import same

Call = Callable[[Tree, InnerState], tuple[Any, Any]]


class Traced(NamedTuple):
    """What JAX knows of the inner optimizer's call while it traces, before the call is made."""

    updates: Updates
    """The tree of the updates' shapes and dtypes."""
    axes: Axes
    """The named axes that the optimizer reduces over."""
    call: Call
    """The optimizer as `Update.run` calls it, ``call(gradients, state)``: for arguments of the same types it is not traced again."""


class Update(NamedTuple):
    """A call of the inner optimizer that the end of a window may make."""

    optimizer: Callable[..., tuple[Any, Any]]
    """``optimizer(gradients, state, params, **extra)``: the inner transformation's ``update``."""
    dtypes: Handed
    params: Params
    extra: Extra
    axes: tuple[str, ...] = ()
    """The mesh axes whose devices share the window: at its end the sums are the same along these."""
    shard_axes: tuple[str, ...] | None = None
    """The mesh axes along which parameters are sharded; None: nobody said."""
    part: bool = False
    """The extra arguments may be those of one micro-batch out of several."""

    def told(self, loss: Scalar) -> Update:
        """The same call, with the window's loss as the ``value`` that optax's optimizers read."""
        return self._replace(extra={**self.extra, "value": loss})

    def traced(self, accumulator: Tree, held: InnerState, divisor: Scalar) -> Traced:
        """Trace the call; nothing of it enters the program. One that takes no ``value``, such as SAM, is called without."""
        try:
            return self._traced(accumulator, held, divisor)
        except TypeError as error:
            if "value" not in self.extra or "unexpected keyword argument 'value'" not in str(error):
                raise
        rest = {name: given for name, given in self.extra.items() if name != "value"}
        return self._replace(extra=rest)._traced(accumulator, held, divisor)

    def _traced(self, accumulator: Tree, held: InnerState, divisor: Scalar) -> Traced:
        rest, watched = part_of_window(self.extra) if self.part else (self.extra, {})
        call = traced_once(self._call, (accumulator, held))

        def made(watched: Extra, accumulator: Tree, held: InnerState) -> tuple[Updates, InnerState]:
            leaves, structure = jax.tree.flatten(self._gradients(accumulator, divisor))
            gradients = [to(leaf, dtype) for leaf, dtype in zip(leaves, self.dtypes.like, strict=True)]
            given = jax.tree.unflatten(structure, gradients)
            return call(given, held) if rest is self.extra else self.optimizer(given, held, self.params, **rest, **watched)

        program, (updates, after) = jax.make_jaxpr(made, return_shape=True)(watched, accumulator, held)
        require_unread(program, watched)
        require_same_structure(after, held)
        return Traced(_still(updates, accumulator), named_axes(program), call)

    def run(self, accumulator: Tree, held: InnerState, divisor: Scalar, traced: Traced, apply: Scalar) -> tuple[Updates, Tree, InnerState]:
        """Run the inner optimizer where `apply` holds.

        Returns:
            The updates (zeros unless `apply`), the accumulator (the updates if `apply`) and the inner optimizer's state.
        """
        buffer = jax.tree.map(_wide_enough, accumulator, traced.updates)

        def call(operand: tuple[Tree, InnerState]) -> tuple[Updates, InnerState]:
            gradients = self._gradients(cast_like(operand[0], accumulator), divisor)
            made, after = traced.call(gradients, operand[1])
            return cast_like(_still(made, accumulator), buffer), cast_like(after, held)

        buffer, after = once(apply, call, (buffer, held))
        return self._updates_where(apply, buffer, traced.updates), cast_like(buffer, accumulator), after

    def keep(self, accumulator: Tree, updates: Updates, never: Scalar) -> tuple[Updates, Tree]:
        """The updates, all zeros, and the accumulator of a micro-batch that can end no window.

        Constant zeros would cost a copy of the parameters and a pass over it: nothing tells XLA that the gradient, which reads the old
        parameters, comes first. After a loop over all sums, even one that never runs, the gradient has come, and the select is free.
        """
        accumulator = once(never, lambda held: emptied(held, never), accumulator)
        return self._updates_where(never, accumulator, updates), accumulator

    def _call(self, gradients: Tree, held: InnerState) -> tuple[Any, Any]:
        made = self.optimizer(gradients, held, self.params, **self.extra)
        if not self.axes:
            return made
        return same("what the inner optimizer made", made, self.axes, "Let the optimizer close over nothing that is a device's own.")

    def _gradients(self, accumulator: Tree, divisor: Scalar) -> Tree:
        return replicated(divide(accumulator, divisor, self.dtypes.given), self.axes)

    def _updates_where(self, apply: Scalar, buffer: Tree, updates: Updates) -> Updates:
        """The updates that `buffer` holds where `apply` holds, in the dtypes of `updates`; else zeros."""
        nothing = fills(_nothing)
        made = jax.tree.map(lambda leaf, update: to(pick(apply, leaf, nothing(leaf)), update.dtype), buffer, updates)
        return replicated(made, self.axes)


def _wide_enough(held: Array, update: Array) -> Array:
    return to(held, wider(held.dtype, update.dtype))


def _still(updates: Updates, accumulator: Tree) -> Updates:
    """`updates` with the sum, an exact 0 in the parameter's dtype, for each parameter that takes no part."""
    return jax.tree.map(lambda held, update: update if takes_part(held) else held, accumulator, updates)


def _nothing(leaf: Array) -> complex:
    """-0.0, the one zero that leaves every parameter bit for bit as it is: -0.0 + 0.0 is 0.0, but x + -0.0 is x."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return complex(-0.0, -0.0)
    return -0.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0


# An inner optimizer that reduces over devices runs on all of them or on none.
#
# Each device decides by its own gradient. If one device skips the optimizer because its part of the gradient is not finite, the other
# devices wait for it in the reduction for ever. So the devices of such an optimizer agree, once per window: all run it, or none.
#
# They cannot agree on everything. Each device measures and weighs its own gradient; only the optimizer knows the reduced one. So the
# options that need the reduced gradient are refused.


def require_equal_parts(options: Options, axes: Axes, weight: Scalar) -> None:
    """Refuse options that would differ from device to device where the inner optimizer reduces over `axes`."""
    dropping = options.on_overflow == "drop_micro_batch" or None
    norms = {"clip_norm": options.clip_norm, "skip_norm": options.skip_norm, "noise_scale": options.noise_decay}
    asked = {**norms, "on_overflow": dropping, "weight": weight}
    for name in (name for name, value in asked.items() if axes and value is not None):
        fix = "Reduce the gradients before tx.update, as in jax.lax.pmean(grads, axis), and leave the reduction out of the optimizer."
        expected = f"nothing, as the optimizer reduces over {sorted(axes)} and this would be each device's own"
        raise explain(UsageError, name, expected=expected, found="an option or argument that is set", fix=fix)


def require_no_reduction(axes: Axes, reduced: tuple[str, ...]) -> None:
    if twice := sorted(axes & frozenset(reduced)):
        fix = "Leave the reduction out of the optimizer: with axis_name its gradient is that of all devices."
        raise explain(UsageError, "optimizer", expected="one that does not reduce", found=f"one that reduces over {twice}", fix=fix)


def agree(apply: Scalar, overflow: Scalar, at_end: Scalar, axes: Axes) -> tuple[Scalar, Scalar]:
    """`apply` where it holds on all devices along `axes`, `overflow` where it holds on any: bool scalars."""
    if not axes:
        return apply, overflow

    def ask(own: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        return jnp.where(own[0], every(own[0], axes), False), jnp.where(own[1], True, ~every(~own[1], axes))

    return once(at_end, ask, (apply, overflow))


# Inner optimizers and their extra arguments that would make a window wrong. Each is refused by name, with its right place.
#
# optax documents extra arguments that describe the batch of the gradient: `grad` and `value_fn` for line searches, `grad_fn` for SAM,
# `obj_fn` for Sophia. The inner optimizer runs at the window's end, and a streaming loop then has those of the last micro-batch only.
# Training would go on with a function that does not belong to the gradient. So an optimizer that reads one of them is refused; the caller
# closes the window and gives those of the whole window. An optimizer that ignores them gets them as ever.
#
# `value` is another matter: losses add up, and the inner optimizer gets the window's (see `statistics`).


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
    """Refuse an optimizer whose traced `program` reads one of the `watched` arguments, which are the program's first inputs."""
    names = [name for name in sorted(watched) for _ in jax.tree.leaves(watched[name])]  # JAX flattens a dict by its sorted keys
    jaxpr = program.jaxpr
    read = {id(variable) for variables in (jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns)) for variable in variables}
    for name, variable in zip(names, jaxpr.invars, strict=False):
        if id(variable) in read:
            _refuse_part(name)


def require_same_structure(after: InnerState, before: InnerState) -> None:
    """Refuse an optimizer whose state has another structure after its update, as that of `optax.monitor`."""
    structure: Any = jax.tree.structure(after, is_leaf=is_none)  # a None stands for what `before` has there
    try:
        structure.flatten_up_to(before)
    except ValueError as error:
        old, new = jax.tree.structure(before), str(jax.tree.structure(after))
        fix = "Its init must make what its update returns. If it only measures, as optax.monitor, call it outside of the wrapper."
        raise explain(UsageError, "optimizer", expected=f"one whose state keeps its structure, {old}", found=new, fix=fix) from error


def require_placeable(params: Params, inner_state: InnerState) -> None:
    """Refuse an optimizer of parameter pairs, and one that takes each item's gradient."""
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
