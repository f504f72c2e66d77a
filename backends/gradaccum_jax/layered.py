"""The layered window of a model of stacked layers: all micro-batches pass one layer before the next, and backwards likewise.

A layer's sum is reduced when the last micro-batch has passed the layer; where nothing needs the whole gradient, the layer is updated there
and its gradient freed. Sharded parameters are gathered once per layer and pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError, kit
from gradaccum.kit import Scalar, explain
from gradaccum_jax import sums
from gradaccum_jax.arrays import Array, Extra, Params, Tree, is_key, moving_of, plain, takes_part, wider
from gradaccum_jax.checks import require_arrays
from gradaccum_jax.large_batch import batch as batches
from gradaccum_jax.large_batch import gradients as large
from gradaccum_jax.large_batch.auto import Call
from gradaccum_jax.large_batch.batch import Body, Group, MicroBatch, Source, over
from gradaccum_jax.optimizer import Accumulation, require_open
from gradaccum_jax.parameters import apply_updates
from gradaccum_jax.sharding import axes_of, replicated, vary
from gradaccum_jax.window import window
from gradaccum_jax.window.state import AccumulationState, as_read, as_stored, fields_of
from gradaccum_jax.workers import group

PRELUDE, LAYERS, HEAD, TIED = range(4)
"""The places in the parameters."""
SHARED = -1
"""The tag of a leaf of the inner optimizer's state that belongs to no parameter, such as a count."""
BORDERS = ("keep", "recompute")
Rows = list[Any]
"""For each group of micro-batches a list of leaves that are stacked over them."""


def layered_value_and_update(
    prelude: Callable[..., Tree],
    layer: Callable[..., Tree],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    weight: batches.Weight = None,
    axes: Tree = 0,
    aux: Tree = None,
    borders: str = "keep",
    gather: Callable[[Tree], Tree] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> LayeredValueAndUpdate:
    """Return a function that makes a large batch's window layer by layer, for a model of equal layers with stacked parameters.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=None, on_overflow="ignore")
        step = gradaccum_jax.layered_value_and_update(embed, block, loss_fn, tx, steps=8)
        state = step.init(params)  # params = (embedding, blocks, head)
        loss, params, state = jax.jit(step, donate_argnums=(0, 1))(params, state, x, y)

    Sums and update are those of `value_and_update`, to the last bit where the compiler adds in the same order. The activations between the
    layers live for the whole batch, and each layer runs a second time in the backward pass. In exchange one layer's gradient is alive at a
    time, if `tx` has ``on_overflow="ignore"`` and neither `clip_norm` nor `skip_norm`. The inner optimizer must then update each array and
    each layer by itself: adamw, sgd and lion do; lamb, adafactor and `optax.clip_by_global_norm` do not, and are refused. Under other
    options the sums of all layers are kept until the end; each layer is still gathered and reduced once.

    Args:
        prelude: ``prelude(params[0], *micro_batch)`` returns the first layer's activations, any tree of arrays. Integers in it, such as a
            mask, have no gradient.
        layer: ``layer(params of one layer, activations, *micro_batch)`` returns activations of the same shapes and dtypes.
        loss_fn: ``loss_fn(params[2], activations, *micro_batch)`` returns a floating scalar, or ``(loss, aux)`` with `has_aux`.
        tx: from `gradaccum.wrap` with ``steps=None``; without ``on_overflow="drop_micro_batch"`` and ``noise_scale``.
        has_aux: as for `value_and_grad`.
        steps: likewise.
        micro_batch_size: likewise.
        weight: likewise.
        axes: likewise. A random key k of a micro-batch is ``jax.random.fold_in(k, 0)`` in the prelude, ``fold_in(k, l + 1)`` in layer
            number l and ``fold_in(k, layers + 1)`` in `loss_fn`.
        aux: likewise.
        borders: the activations between the layers: "keep" them, or "recompute" all but every n-th layer's, n the largest divisor of the
            number of layers up to its square root.
        gather: for sharded parameters: a linear function of the parameters of the prelude, of one layer, and of the head, that returns the
            whole ones, such as `jax.lax.all_gather` of each array. Its transpose reduces the sum.
        axis_name: beside `gather` in a `jax.shard_map`: the mesh axes whose devices share the batch. Without it those of `tx`.

    Returns:
        A function of ``(params, state, *batch, **extra)`` that returns ``(loss, params, state)``, or ``((loss, aux), params, state)``: the
        updated parameters. `params` is ``(prelude, layers, head)``, where each array of `layers` has a leading axis of the layers; or
        ``(prelude, layers, head, tied)``: then `prelude` and `loss_fn` get `tied` as their second argument, and its update waits for both.
        Its ``init(params)`` is ``tx.init(params)``, without sums where none are kept.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ArgumentValueError: `tx` closes windows by itself, or an option makes no sense; or at a call, as for `value_and_grad`.
        UsageError: `tx` or its inner optimizer cannot work layer by layer.
    """
    for name, function in (("prelude", prelude), ("layer", layer), ("loss_fn", loss_fn), ("gather", gather)):
        if not callable(function) and (name != "gather" or function is not None):
            raise explain(ArgumentTypeError, name, expected="a function", got=function, fix=f"Write {name}=lambda params, ...: ....")
    accumulation = require_open(tx)
    options = accumulation.options
    if options.on_overflow == "drop_micro_batch" or options.noise_decay is not None:
        option = "on_overflow" if options.noise_decay is None else "noise_scale"
        fix = f"Leave {option} out, or call gradaccum_jax.value_and_update."
        raise explain(UsageError, "tx", expected="one that looks at no single micro-batch", found=f"one with {option}=", fix=fix)
    if borders not in BORDERS:
        fix = 'Write borders="recompute"; JAX moves activations to the host by a policy of jax.checkpoint, for value_and_update.'
        raise explain(ArgumentValueError, "borders", expected=f"one of {BORDERS}", got=borders, fix=fix)
    of_batch = (lambda x, *batch: weight(*batch)) if callable(weight) else weight
    differentiation = large.Differentiation(loss_fn, (0,), has_aux, allow_int=True, single=True)
    shared = group.require_names(axis_name) or accumulation.axes
    question = large.Question(differentiation, of_batch, large.as_declared(aux, has_aux=has_aux), options, shared, 1)
    splitting = batches.make_splitting(steps, micro_batch_size, None, axes, weight, None)
    return LayeredValueAndUpdate(prelude, layer, question, splitting, accumulation, borders, gather)


@dataclass(frozen=True, eq=False)
class LayeredValueAndUpdate(Call):
    """The function that `layered_value_and_update` returns."""

    prelude: Callable[..., Tree]
    layer: Callable[..., Tree]
    question: large.Question
    splitting: batches.Splitting
    accumulation: Accumulation
    borders: str
    gather: Callable[[Tree], Tree] | None

    def init(self, params: Params) -> AccumulationState:
        """Return the state before the first window."""
        state = self.accumulation.init(require_parts(plain(params)))
        return state if kit.measures(self.accumulation.options) else state._replace(accumulator=None)

    def __call__(self, params: Params, state: AccumulationState, *batch: Tree, **extra: Any) -> tuple[Any, Params, AccumulationState]:
        params, state = require_parts(plain(params)), plain(state)
        self.accumulation.check(state, params, extra)
        keeps = kit.measures(self.accumulation.options)
        require_shapes(state.accumulator, params if keeps else None, "one with sums" if keeps else "one without sums")
        return cast(tuple[Any, Params, AccumulationState], self._of_batch((params, state, extra), batch))

    def _run(self, given: tuple[Params, AccumulationState, Extra], source: Source) -> tuple[Any, Params, AccumulationState]:
        params, state, extra = given
        passes = Passes(self, replicated(params, self.accumulation.axes), state, extra, batches.groups_in(source))
        x, borders = passes.forwards()
        made = passes.head(source, x)
        return (made.loss, made.aux) if self.question.differentiation.has_aux else made.loss, *passes.backwards(made, borders)


class Held(NamedTuple):
    """The carry of the loop over the layers."""

    params: tuple[Tree, ...]
    inner: list[Array]
    """The leaves of the inner optimizer's state, then of the masters."""
    accumulator: Tree


class Passes:
    """The passes of one call, while it is traced."""

    def __init__(self, call: LayeredValueAndUpdate, params: tuple[Tree, ...], state: AccumulationState, extra: Extra, groups: list[Group]):
        self.call, self.params, self.state, self.extra, self.groups = call, params, state, extra, groups
        self.options, self.axes = call.accumulation.options, call.question.axis_names
        self.structure: Any = None
        """The tree of the activations."""
        self.first, self.layers = large.first_number(groups, self.axes), len(jax.tree.leaves(params[LAYERS])[0])
        self.alone = replace(call.accumulation, axes=())
        """The optimizer of one device, which gets sums that are reduced."""
        # A device's own sums until a part is closed: then the same on all devices, and so by their type from the start.
        accumulator = replicated(state.accumulator, call.accumulation.axes)
        self.held = Held(params, jax.tree.leaves((state.inner_state, state.masters)), accumulator)
        self.parts = None
        if state.accumulator is None:
            require_separable(self.alone.inner, params, extra)
            pair = state.inner_state, state.masters
            require_shapes(pair, jax.eval_shape(self.alone.inner.init, params), "the inner optimizer's")
            self.parts = make_parts(self.alone.inner, params, pair)

    def forwards(self) -> tuple[Rows, Rows]:
        """Return the last layer's activations, and those at the kept borders, stacked."""
        outer = self._outer(PRELUDE)

        def enter(_: tuple[()], each: MicroBatch) -> tuple[tuple[()], list[Array]]:
            made, self.structure = jax.tree.flatten(self.call.prelude(*outer, *each.arguments[1:]))
            return (), [vary(jnp.asarray(leaf), frozenset(self.axes)) for leaf in made]

        most = math.isqrt(self.layers) if self.call.borders == "recompute" else 1
        every = max(n for n in range(1, most + 1) if self.layers % n == 0)
        self.segments = jnp.arange(self.layers, dtype=jnp.int32).reshape(-1, every)
        x = over(self._groups(0), enter, (), self.first)[1]
        return lax.scan(lambda x, numbers: (lax.scan(partial(self._forward, self.params), x, numbers)[0], x), x, self.segments)

    def _forward(self, params: tuple[Tree, ...], x: Rows, number: Scalar) -> tuple[Rows, Rows]:
        whole = self._whole(_one(params[LAYERS], number))

        def body(_: tuple[()], each: MicroBatch) -> tuple[tuple[()], list[Array]]:
            (x,), *batch = each.arguments
            return (), self._layer(whole, x, *batch)

        x = over(self._groups(number + 1, x), body, (), self.first)[1]
        return x, x

    def _layer(self, own: Tree, x: list[Array], *batch: Tree) -> list[Array]:
        made = self.call.layer(own, taken := jax.tree.unflatten(self.structure, x), *batch)
        wanted, found = (jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree) for tree in (taken, made))
        if jax.tree.flatten(wanted) != jax.tree.flatten(found):
            fix = "Let it return what the next layer takes; a first or last layer of another kind belongs into prelude or loss_fn."
            raise explain(ArgumentValueError, "layer", expected=f"one that returns what it takes, {wanted}", found=f"{found}", fix=fix)
        return [vary(jnp.asarray(leaf), frozenset(self.axes)) for leaf in jax.tree.leaves(made)]

    def head(self, source: Source, x: Rows) -> large.Made[Any]:
        """Return the window's numbers and the sums of the head; and of each micro-batch the gradient of `x`, and its weight."""
        by = self._outer(HEAD)
        size, question = len(moving_of(by)[0]), self.call.question
        loss_fn, places = question.differentiation.loss_fn, tuple(range(len(by) + 1))

        def of_leaves(*arguments: Tree) -> Any:
            (x,) = arguments[len(by)]
            return loss_fn(*arguments[: len(by)], jax.tree.unflatten(self.structure, x), *arguments[len(by) + 1 :])

        def add(held: Any, gradients: list[Array], weight: Scalar, loss: Scalar) -> Any:
            numbers, total = held
            weight, loss = (jnp.asarray(number, jnp.result_type(numbers.weight)) for number in (weight, loss))
            usable = kit.usable(fields_of(numbers), weight, jnp.asarray(True))
            total = self._add(total, gradients[:size], weight, usable)
            numbers, _ = window.add(numbers, window.MicroBatch([], weight, loss), None, self.options)
            return (numbers, total), [*gradients[size:], weight, usable]

        question = question._replace(differentiation=replace(question.differentiation, loss_fn=of_leaves, places=places))
        bare = self.state._replace(accumulator=(), inner_state=(), masters=())
        numbers = group.by_kind(bare, own=lambda leaf: vary(leaf, frozenset(self.axes)), shared=lambda leaf: leaf)
        start = numbers, self._begin(self.held, [HEAD, *range(TIED, len(self.params))])
        gathering = large.Gathering(start, add, False, frozenset(self.axes), self.state.loss_scale, rows=True)
        return large.run(question, by, source, gathering, self._groups(self.layers + 1, x))

    def backwards(self, made: large.Made[Any], borders: Rows) -> tuple[Params, AccumulationState]:
        upstream, self.weights = [rows[:-2] for rows in made.rows], [rows[-2:] for rows in made.rows]
        self.numbers, total = self._numbers(made.held[0]), made.held[1]
        size = len(moving_of(self.params[HEAD])[0])
        held, _ = self._closed(self.held, HEAD, self._sum(total[:size], self.params[HEAD]))

        def segment(carry: tuple[Held, Rows], given: tuple[Array, Rows]) -> tuple[tuple[Held, Rows], None]:
            numbers, x = given
            # The layers are read where they are written later: beside an array that is only read, XLA would keep a copy of all.
            further = lax.scan(partial(self._forward, carry[0].params), x, numbers[:-1])[1]
            inside = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), x, further)
            return lax.scan(self._backward, carry, (numbers, inside), reverse=True)

        (held, upstream), _ = lax.scan(segment, (held, upstream), (self.segments, borders), reverse=True)
        moving, put = moving_of(self._outer(PRELUDE))

        def enter(moving: list[Array], _: list[Array], *batch: Tree) -> list[Array]:
            return jax.tree.leaves(self.call.prelude(*put(moving), *batch))

        begin, body = [*self._begin(held, [PRELUDE]), *total[size:]], self._differentiating(enter, moving)
        total, _ = over(self._groups(0, [[] for _ in self.groups], upstream, self.weights), body, begin, self.first)
        ends = [PRELUDE, *range(TIED, len(self.params))]
        total = self._sum(total, *[self.params[part] for part in ends])
        for part in ends:
            size = len(moving_of(self.params[part])[0])
            held, after = self._closed(held, part, total[:size], last=part == ends[-1])
            total = total[size:]
        inner, masters = jax.tree.unflatten(jax.tree.structure((self.state.inner_state, self.state.masters)), held.inner)
        after, params = after._replace(accumulator=held.accumulator, inner_state=inner, masters=masters), held.params
        if self.parts is None:
            updates, after = self.alone.flush(after, params, **self.extra)
            params = apply_updates(params, updates, after)
        return params, jax.tree.map(lambda new, old: vary(new, axes_of(old)), after, self.state)

    def _backward(self, carry: tuple[Held, Rows], given: tuple[Scalar, Rows]) -> tuple[tuple[Held, Rows], None]:
        (held, upstream), (number, x) = carry, given
        own = _one(held.params[LAYERS], number)
        moving, put = moving_of(self._whole(own))
        body = self._differentiating(lambda moving, *given: self._layer(put(moving), *given), moving)
        groups, begin = self._groups(number + 1, x, upstream, self.weights), self._begin(held, [LAYERS], number)
        total, upstream = over(groups, body, begin, self.first)
        return (self._closed(held, LAYERS, self._sum(total, own), number)[0], upstream), None

    def _differentiating(self, function: Callable[..., list[Array]], moving: list[Array]) -> Body[list[Array]]:
        """Return the body of a backward pass through `function` of (its moving parameters, activations, *micro-batch)."""

        def body(total: list[Array], each: MicroBatch) -> tuple[list[Array], list[Array]]:
            (x, upstream, (weight, usable)), *batch = each.arguments
            active, put = moving_of(x)

            def value(moving: list[Array], active: list[Array]) -> list[Array]:
                return moving_of(function(moving, put(active), *batch))[0]

            gradients, further = jax.vjp(value, moving, active)[1](upstream)
            return self._add(total, gradients, weight, usable), further

        return body

    def _groups(self, number: Scalar, *rows: Rows) -> list[Group]:
        """Return the micro-batches, each with its own of `rows` as the first argument; a random key is folded by `number` too."""

        def beside(take: Callable[[Tree, Scalar], MicroBatch], place: Tree, index: Scalar) -> MicroBatch:
            each = take(place[0], (index, number))
            return each._replace(arguments=(place[1:], *each.arguments))

        held = zip(self.groups, *rows, strict=True)
        return [Group(each.numbers, (each.places, *own), partial(beside, each.take)) for each, *own in held]

    def _outer(self, part: int) -> tuple[Tree, ...]:
        return tuple(self._whole(each) for each in (self.params[part], *self.params[TIED:]))

    def _whole(self, part: Tree) -> Tree:
        return large.copies(part if self.call.gather is None else self.call.gather(part), frozenset(self.axes))

    def _begin(self, held: Held, parts: list[int], number: Scalar = None) -> list[Array]:
        """Return the sums of these parts before the first micro-batch: what an open window holds, or zeros."""
        if held.accumulator is None or self.call.gather is not None:
            return large.start(tuple(self._whole(_one(self.params[part], number)) for part in parts), self.options.accumulate_dtype)
        own = large.copies([_one(held.accumulator[part], number) for part in parts], frozenset(self.axes))
        return cast(list[Array], sums.emptied(moving_of(own)[0], fields_of(self.state)[0] == 0))

    def _add(self, total: list[Array], gradients: list[Array], weight: Scalar, usable: Scalar) -> list[Array]:
        factor = kit.contribution(weight, self.options) if self.options.reduction == "mean" else None
        return cast(list[Array], sums.add(total, gradients, factor, usable, usable | (weight == 0)))

    def _sum(self, total: list[Array], *parts: Tree) -> list[Array]:
        """Return the sums of these parts over the devices, by one reduction or the transpose of `gather`."""
        if self.call.gather is None:
            return group.added_up(total, self.axes) if self.axes else total
        moving, put = moving_of(parts)
        wide = [leaf.astype(added.dtype) for leaf, added in zip(moving, total, strict=True)]
        transposed = jax.vjp(lambda moving: moving_of([self._whole(part) for part in put(moving)])[0], wide)[1]
        return cast(list[Array], transposed(total)[0])

    def _numbers(self, own: AccumulationState) -> AccumulationState:
        if not self.axes:
            return own
        made = group.all_reduce(group.Window([], own.weight, own.overflow, as_read(own.loss), ()), self.axes)
        return own._replace(weight=made.weight, overflow=made.overflow, loss=as_stored(made.loss), last_overflow=jnp.asarray(False))

    def _closed(
        self, held: Held, part: int, total: list[Array], number: Scalar = None, *, last: bool = False
    ) -> tuple[Held, AccumulationState]:
        """Update one part by its sums, or keep these; the last part moves what belongs to no parameter."""
        params = _cut(held.params[part], number)
        total = total if number is None else [leaf[None] for leaf in total]
        added = moving_of(params)[1](total, jnp.zeros_like)
        if self.parts is None:
            if self.call.gather is not None:
                kept = sums.emptied(_cut(held.accumulator[part], number), fields_of(self.state)[0] == 0)
                added = jax.tree.map(sums.plus, kept, added)
            return held._replace(accumulator=_put(held.accumulator, part, number, added)), self.numbers
        inner, masters = self.parts.own(held.inner, part, number, self.state.masters)
        state = self.numbers._replace(accumulator=added, inner_state=inner, masters=masters)
        updates, after = replace(self.alone, inner=self.parts.of(part)).flush(state, params, **self.extra)
        moved = _put(held.params, part, number, apply_updates(params, updates, after))
        made = jax.tree.leaves((after.inner_state, after.masters))
        return Held(moved, self.parts.written(held.inner, made, part, number, last=last), held.accumulator), after


def require_parts(params: Params) -> tuple[Tree, ...]:
    """Raise unless `params` are three or four trees of numbers, the second with one leading axis in all of its arrays."""
    expected, fix = "a tuple (prelude, layers, head) or (prelude, layers, head, tied)", "Write {} for a part without parameters."
    if not isinstance(params, tuple) or len(params) not in (3, 4):
        raise explain(ArgumentTypeError, "params", expected=expected, found=f"a {type(params).__name__}", fix=fix)
    require_arrays(params, "params")
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params[LAYERS])}
    if len(counts) != 1 or not all(counts) or (0,) in counts:
        stacked = "Stack the layers: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)."
        raise explain(ArgumentValueError, "params[1]", expected="arrays with one leading axis", found=f"{sorted(counts)}", fix=stacked)
    if any(map(is_key, jax.tree.leaves(params))):
        raise explain(ArgumentValueError, "params", expected="arrays of numbers", found="a random key", fix="Pass keys in the batch.")
    return cast(tuple[Tree, ...], jax.tree.map(jnp.asarray, params))


def require_shapes(held: Tree, like: Tree, name: str) -> None:
    """Raise unless a part of the state has the shapes that belong to these parameters."""
    wanted, found = ((jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (like, held))
    if wanted != found:
        fix = "Write state = step.init(params); between two windows state._replace(accumulator=None) leaves the sums out."
        raise explain(ArgumentTypeError, "state", expected=f"{name}, of these parameters", found="another", fix=fix)


def _cut(tree: Tree, number: Scalar) -> Tree:
    """Return one layer's arrays with their leading axis; `tree` itself without a number."""
    return tree if number is None else jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, number, 1), tree)


def _one(tree: Tree, number: Scalar) -> Tree:
    return tree if number is None else jax.tree.map(lambda leaf: leaf[0], _cut(tree, number))


def _put(parts: Any, part: int, number: Scalar, new: Tree) -> Any:
    return (*parts[:part], _written(parts[part], new, number), *parts[part + 1 :])


def _written(tree: Tree, new: Tree, number: Scalar) -> Tree:
    return new if number is None else jax.tree.map(lambda leaf, own: lax.dynamic_update_slice_in_dim(leaf, own, number, 0), tree, new)


# The inner optimizer, part by part.
#
# optax keeps one state for the whole tree: arrays that belong to a parameter, and shared ones such as a count. One part is updated by a
# call for the whole tree in which all other parts are zeros that nothing reads. A part of the layers is one layer with its leading axis, so
# that a rule by the number of axes, such as a mask for weight decay, decides as for all of them.
#
# No type says that an optimizer updates each array, and each layer of an array, by itself. So it is tried out on small arrays: the update
# of one part must be the same where all other parts are NaN.


class Parts(NamedTuple):
    """An inner optimizer, and which leaves of its state belong to which part."""

    inner: optax.GradientTransformationExtraArgs
    params: tuple[Tree, ...]
    leaves: list[Array]
    """The leaves of its state, then of the masters."""
    structure: Any
    tags: list[int]
    """For each of `leaves` its part, or `SHARED`."""
    size: int
    """How many of `leaves` are its state's."""

    def of(self, part: int, filler: float = 0.0) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer of one part, whose state is what `own` returns; `filler` stands in all others."""

        def filled(leaf: Array, of: int) -> Array:
            shape = (1, *leaf.shape[1:]) if of == LAYERS else leaf.shape
            return jnp.full(shape, filler if takes_part(leaf) else 0, leaf.dtype)

        def whole(tree: Tree) -> tuple[Tree, ...]:
            return tuple(tree if i == part else jax.tree.map(partial(filled, of=i), like) for i, like in enumerate(self.params))

        def update(gradients: Tree, state: Any, params: Params = None, **extra: Any) -> tuple[Tree, Any]:
            given, own = iter(jax.tree.leaves(state)), jax.tree.structure(state)
            held = zip(self.tags, self.leaves, strict=True)
            pair = jax.tree.unflatten(self.structure, [next(given) if tag in (part, SHARED) else filled(leaf, tag) for tag, leaf in held])
            updates, after = self.inner.update(whole(gradients), pair, whole(params), **extra)
            made = zip(self.tags, jax.tree.leaves(after), strict=True)
            return updates[part], jax.tree.unflatten(own, [leaf for tag, leaf in made if tag in (part, SHARED)])

        return optax.GradientTransformationExtraArgs(self.inner.init, update)

    def own(self, leaves: list[Array], part: int, number: Scalar, masters: Tree) -> tuple[list[Array], Tree]:
        held = [leaf if tag == SHARED else _cut(leaf, number) for tag, leaf in zip(self.tags, leaves, strict=True) if tag in (part, SHARED)]
        size = sum(tag in (part, SHARED) for tag in self.tags[: self.size])
        return held[:size], None if masters is None else jax.tree.unflatten(jax.tree.structure(masters[part]), held[size:])

    def written(self, leaves: list[Array], made: list[Array], part: int, number: Scalar, *, last: bool) -> list[Array]:
        given, found = iter(made), []
        for tag, leaf in zip(self.tags, leaves, strict=True):
            own = next(given) if tag in (part, SHARED) else leaf
            found.append(_written(leaf, own, number) if tag == part else own if last else leaf)
        return found


def make_parts(inner: optax.GradientTransformationExtraArgs, params: tuple[Tree, ...], pair: Tree) -> Parts:
    """Return the parts of an optimizer whose state and masters are `pair`."""

    def is_left_out(leaf: object) -> bool:
        return leaf is None or isinstance(leaf, optax.MaskedNode)

    numbered = tuple(jax.tree.map(lambda _, part=part: part, tree) for part, tree in enumerate(params))
    map_params: Any = optax.tree_utils.tree_map_params
    options: Any = {"transform_non_params": lambda _: SHARED, "is_leaf": is_left_out}
    tags = jax.tree.leaves(map_params(inner, lambda leaf, part: leaf if is_left_out(leaf) else part, pair, numbered, **options))
    (leaves, structure), layers = jax.tree.flatten(pair), jax.tree.leaves(params[LAYERS])[0].shape[:1]
    if any(tag == LAYERS and jnp.shape(leaf)[:1] != layers for tag, leaf in zip(tags, leaves, strict=True)):
        raise _inseparable_error("one whose state has no leading axis of the layers")
    return Parts(inner, params, leaves, structure, tags, len(jax.tree.leaves(pair[0])))


def require_separable(inner: optax.GradientTransformationExtraArgs, params: tuple[Tree, ...], extra: Extra) -> None:
    """Raise unless the optimizer updates each part and each layer by itself, tried out on small arrays."""
    numbers = np.random.default_rng(0)

    def drawn(leaf: Array, part: int) -> Any:
        shape = tuple(2 if part == LAYERS and not axis else min(size, 2) for axis, size in enumerate(leaf.shape))
        values = numbers.uniform(0.5, 1.0, shape) * numbers.choice([-64, 64], shape)
        # Half precision would hide a trust ratio in its rounding.
        return values.astype(wider(leaf.dtype, jnp.float32)) if takes_part(leaf) else np.zeros(shape, leaf.dtype)

    def close(a: Array, b: Array) -> Array:
        most = 16 * float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.inexact) else 0
        return jnp.all(jnp.abs(a - b) <= most * jnp.max(jnp.abs(b), initial=0)) if most else jnp.all(a == b)

    def tried(first: Tree, second: Tree, given: Tree) -> Array:
        told = {"value": jnp.ones(()), **known}
        _, pair = inner.update(first, inner.init(given), given, **told)
        updates, after = inner.update(second, pair, given, **told)
        parts, same = make_parts(inner, given, pair), [jnp.asarray(True)]
        for part, number in ((PRELUDE, None), (LAYERS, 0), (LAYERS, 1), *((part, None) for part in range(HEAD, len(given)))):
            own, wanted = (parts.own(jax.tree.leaves(tree), part, number, tree[1]) for tree in (pair, after))
            made = parts.of(part, np.nan).update(_cut(second[part], number), own, _cut(given[part], number), **told)
            same += map(close, jax.tree.leaves(made), jax.tree.leaves((_cut(updates[part], number), wanted)))
        return jnp.all(jnp.stack(same))

    trees = [tuple(jax.tree.map(partial(drawn, part=part), tree) for part, tree in enumerate(params)) for _ in range(3)]
    known = jax.tree.map(lambda leaf: np.ones(np.shape(leaf), leaf.dtype) if isinstance(leaf, jax.Array) else leaf, extra)
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False):
            same = bool(jax.jit(tried)(*trees))
    except (TypeError, ValueError) as error:  # a traced learning rate, an extra argument by parameter
        raise _inseparable_error(f"one that cannot be tried out on small arrays ({type(error).__name__})") from error
    if not same:
        raise _inseparable_error("one that looks at several, such as optax.clip_by_global_norm or lamb")


def _inseparable_error(found: str) -> UsageError:
    fix = 'Clip by clip_norm= of gradaccum.wrap; or leave on_overflow="ignore" out: the sums are kept, and the optimizer sees all of them.'
    return explain(UsageError, "tx", expected="an inner optimizer that updates each array and each layer by itself", found=found, fix=fix)
