"""The layered window of a model of stacked layers: all micro-batches pass one layer
before the next, and backwards likewise.

A layer's sum is reduced when the last micro-batch has passed the layer; where nothing
needs the whole gradient, the layer is updated there and its gradient freed. Sharded
parameters are gathered once per layer and pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gradaccum import UsageError, kit
from gradaccum.kit import Scalar, explain
from gradaccum_jax import gradient_sum, window
from gradaccum_jax.arrays import (
    Array,
    Extra,
    Params,
    Tree,
    moving_of,
    plain,
    takes_part,
    wider,
)
from gradaccum_jax.checks import (
    require_function,
    require_like,
    require_stacked,
    require_whole_micro_batches,
)
from gradaccum_jax.extra_arguments import require_declared
from gradaccum_jax.large_batch import batch as batches
from gradaccum_jax.large_batch import gradients as large
from gradaccum_jax.large_batch.auto import Call
from gradaccum_jax.large_batch.batch import Group, MicroBatch, Source, beside, over
from gradaccum_jax.master_weights import apply_updates
from gradaccum_jax.optimizer import Accumulation, require_open
from gradaccum_jax.sharding import axes_of, replicated, vary
from gradaccum_jax.state import AccumulationState, as_read, as_stored, fields_of
from gradaccum_jax.workers import group

PRELUDE, LAYERS, HEAD, TIED = range(4)
"""The places in the parameters."""
SHARED = -1
"""The tag of a leaf of the inner optimizer's state that belongs to no parameter, such
as a count.
"""
BORDERS = ("keep", "recompute")
Rows = list[Any]
"""For each group of micro-batches a tree of arrays that are stacked over them."""
Parts = tuple[tuple[Tree, ...], Any]
"""The parameters, and the sums where they are kept, otherwise the inner optimizer's
state and the masters.
"""


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
    """Return a function that makes a large batch's window layer by layer, for a model
    of equal layers with stacked parameters.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=None, on_overflow="ignore")
        step = layered_value_and_update(embed, block, loss_fn, tx, steps=8)
        state = step.init(params)  # params = (embedding, blocks, head)
        step = jax.jit(step, donate_argnums=(0, 1))
        loss, params, state = step(params, state, x, y)

    Sums and update are those of `value_and_update`, to the last bit where the compiler
    adds in the same order. The activations between the layers live for the whole batch,
    and each layer runs a second time in the backward pass. In exchange one layer's
    gradient is alive at a time, if `tx` has ``on_overflow="ignore"`` and neither
    `clip_norm` nor `skip_norm`. The inner optimizer must then update each array and
    each layer by itself: adamw, sgd and lion do; lamb, adafactor and
    `optax.clip_by_global_norm` do not, and are refused. Under other options the sums of
    all layers are kept until the end; each layer is still gathered and reduced once.

    Args:
        prelude: ``prelude(params[0], *micro_batch)`` returns the first layer's
            activations, any tree of arrays. Integers in it, such as a mask, have no
            gradient.
        layer: ``layer(params of one layer, activations, *micro_batch)`` returns
            activations of the same shapes and dtypes.
        loss_fn: ``loss_fn(params[2], activations, *micro_batch)`` returns a floating
            scalar, or ``(loss, aux)`` with `has_aux`.
        tx: from `gradaccum.wrap` with ``steps=None``; without
            ``on_overflow="drop_micro_batch"``.
        has_aux: as for `value_and_grad`.
        steps: likewise.
        micro_batch_size: likewise.
        weight: likewise.
        axes: likewise. A random key k of a micro-batch is ``jax.random.fold_in(k, 0)``
            in the prelude, ``fold_in(k, l + 1)`` in layer number l and
            ``fold_in(k, layers + 1)`` in `loss_fn`.
        aux: likewise.
        borders: the activations between the layers: "keep" them, or "recompute" all but
            every n-th layer's, n the largest divisor of the number of layers up to its
            square root.
        gather: for sharded parameters: a linear function of the parameters of the
            prelude, of one layer, and of the head, that returns the whole ones, such as
            `jax.lax.all_gather` of each array. Its transpose reduces the sum.
        axis_name: beside `gather` in a `jax.shard_map`: the mesh axes whose devices
            share the batch. Without it those of `tx`.

    Returns:
        A function of ``(params, state, *batch, **extra)`` that returns
        ``(loss, params, state)``, or ``((loss, aux), params, state)``: the updated
        parameters. `params` is ``(prelude, layers, head)``, where each array of
        `layers` has a leading axis of the layers; or ``(prelude, layers, head, tied)``:
        then `prelude` and `loss_fn` get `tied` as their second argument, and its update
        waits for both. Its ``init(params)`` is ``tx.init(params)``, without sums where
        none are kept.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ArgumentValueError: `tx` closes windows by itself, or an option makes no sense;
            or at a call, as for `value_and_grad`.
        UsageError: `tx` or its inner optimizer cannot work layer by layer.
    """
    for name, function in {
        "prelude": prelude,
        "layer": layer,
        "loss_fn": loss_fn,
        "gather": gather or plain,
    }.items():
        require_function(name, function, f"Write {name}=lambda params, ...: ....")
    accumulation = require_open(tx)
    require_whole_micro_batches(accumulation.options)
    kit.require_choice("borders", borders, BORDERS)
    of_batch = (lambda x, *batch: weight(*batch)) if callable(weight) else weight
    differentiation = large.Differentiation(
        loss_fn, (0,), has_aux, allow_int=True, single=True
    )
    shared = group.require_names(axis_name) or accumulation.axes
    question = large.Question(
        differentiation,
        of_batch,
        large.as_declared(aux, has_aux=has_aux),
        accumulation.options,
        shared,
        1,
    )
    splitting = batches.make_splitting(
        steps, micro_batch_size, None, axes, weight, None
    )
    return LayeredValueAndUpdate(
        prelude, layer, question, splitting, accumulation, borders, gather
    )


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
        accumulation = replace(self.accumulation, leaves_out_unread=False)
        state = accumulation.init(require_stacked(plain(params)))
        if kit.measures(self.accumulation.options):
            return state
        return state._replace(accumulator=None)

    def __call__(
        self, params: Params, state: AccumulationState, *batch: Tree, **extra: Any
    ) -> tuple[Any, Params, AccumulationState]:
        params = require_stacked(plain(params))
        state = plain(state)
        require_declared(extra, self.accumulation.declared)
        self.accumulation.check(state, params, extra)
        return cast(
            tuple[Any, Params, AccumulationState],
            self._of_batch((params, state, extra), batch),
        )

    def _run(
        self, given: tuple[Params, AccumulationState, Extra], source: Source
    ) -> tuple[Any, Params, AccumulationState]:
        params, state, extra = given
        fix = (
            "Write state = step.init(params); between two windows"
            " state._replace(accumulator=None) leaves the sums out."
        )
        require_like(
            "state",
            state,
            jax.eval_shape(self.init, params),
            "what step.init(params) has",
            fix,
        )
        passes = Passes(self, params, state, extra, batches.groups_in(source))
        activations, borders = passes.forwards()
        made = passes.head(source, activations)
        params, state = passes.backwards(made, borders)
        has_aux = self.question.differentiation.has_aux
        return (made.loss, made.aux) if has_aux else made.loss, params, state


class Passes:
    """The passes of one call, while it is traced."""

    def __init__(
        self,
        call: LayeredValueAndUpdate,
        params: tuple[Tree, ...],
        state: AccumulationState,
        extra: Extra,
        groups: list[Group],
    ):
        self.call = call
        self.state = state
        self.extra = extra
        self.groups = groups
        self.options = call.accumulation.options
        self.axis_names = call.question.axis_names
        self.first_number = large.first_number(groups, self.axis_names)
        self.accumulation = replace(call.accumulation, axes=())
        """Each part has the same sums on all devices before it is updated."""
        self.keeps_sums = kit.measures(self.options)
        inner_state = (state.inner_state, state.masters)
        rest = state.accumulator if self.keeps_sums else inner_state
        # A device's own sums until a part is closed: then the same on all devices, and
        # so by their type from the start.
        self.parts: Parts = replicated((params, rest), call.accumulation.axes)
        self.params = self.parts[0]
        self.layer_count = len(jax.tree.leaves(params[LAYERS])[0])
        if self.keeps_sums:
            self.tags: Tree = (_numbered(params), _numbered(params))
        else:
            self.tags = separable(self.accumulation.inner, params, inner_state, extra)

    def forwards(self) -> tuple[Rows, Rows]:
        """Return the last layer's activations, and those at the kept borders,
        stacked.
        """
        prelude = partial(self.call.prelude, *self._gathered_with_tied(PRELUDE))
        activations = self._each_micro_batch(0, prelude)
        longest = math.isqrt(self.layer_count) if self.call.borders != "keep" else 1
        length = max(
            number for number in range(1, longest + 1) if self.layer_count % number == 0
        )
        numbers = jnp.arange(self.layer_count, dtype=jnp.int32)
        self.segments = numbers.reshape(-1, length)

        def segment(activations: Rows, numbers: Array) -> tuple[Rows, Rows]:
            forward = partial(self._forward, self.params)
            return lax.scan(forward, activations, numbers)[0], activations

        return lax.scan(segment, activations, self.segments)

    def _forward(
        self, params: tuple[Tree, ...], activations: Rows, number: Scalar
    ) -> tuple[Rows, Rows]:
        layer = partial(self._layer, self._gathered(_one_layer(params[LAYERS], number)))
        activations = self._each_micro_batch(number + 1, layer, activations)
        return activations, activations

    def _each_micro_batch(
        self, number: Scalar, function: Callable[..., Tree], *rows: Rows
    ) -> Rows:
        def body(_: Tree, micro_batch: MicroBatch) -> tuple[Tree, Tree]:
            return (), self._copies(function(*micro_batch.arguments))

        groups = beside(self.groups, number, *rows)
        return over(groups, body, (), self.first_number)[1]

    def _layer(self, params: Tree, x: Tree, *batch: Tree) -> Tree:
        fix = (
            "Let it return what the next layer takes; a first or last layer of another"
            " kind belongs into prelude or loss_fn."
        )
        made = self.call.layer(params, x, *batch)
        return require_like("layer(...)", made, x, "what it takes", fix)

    def head(self, source: Source, activations: Rows) -> large.Made[AccumulationState]:
        """Return the window's numbers with the sums of the head; and of each
        micro-batch the gradient of its activations, and its weight.
        """
        params = self._gathered_with_tied(HEAD)
        start = self.state._replace(
            accumulator=self._empty_sums(params), inner_state=(), masters=()
        )
        size = len(start.accumulator)
        dtype = jnp.result_type(self.state.weight)

        def add(
            state: AccumulationState,
            gradients: list[Array],
            weight: Scalar,
            loss: Scalar,
        ) -> Any:
            weight = jnp.asarray(weight, dtype)
            micro_batch = window.MicroBatch(
                gradients[:size], weight, jnp.asarray(loss, dtype)
            )
            adds = kit.usable(fields_of(state), weight, True) | (weight == 0)
            counted_weight = jnp.where(adds, weight, 0)
            state, _ = window.add(state, micro_batch, None, self.options)
            return state, [*gradients[size:], counted_weight]

        question = self.call.question
        places = tuple(range(len(params) + 1))
        question = question._replace(
            differentiation=replace(question.differentiation, places=places)
        )
        gathering = large.Gathering(
            group.shared_window(start, self.axis_names),
            add,
            False,
            frozenset(self.axis_names),
            self.state.loss_scale,
            rows=True,
        )
        beside_activations = beside(self.groups, self.layer_count + 1, activations)
        return large.run(question, params, source, gathering, beside_activations)

    def backwards(
        self, made: large.Made[AccumulationState], borders: Rows
    ) -> tuple[Params, AccumulationState]:
        upstream = [rows[:-1] for rows in made.rows]
        self.weights = [rows[-1] for rows in made.rows]
        state = made.held
        size = len(moving_of(self.params[HEAD])[0])
        head_sums = state.accumulator[:size]
        tied_sums = state.accumulator[size:]
        reduced = group.all_reduce(
            group.ReducedWindow([], state.weight, state.overflow, as_read(state.loss)),
            self.axis_names,
        )
        self.reduced_state = state._replace(
            weight=reduced.weight,
            overflow=reduced.overflow,
            last_overflow=reduced.overflow,
            loss=as_stored(reduced.loss),
        )
        parts, _ = self._close(self.parts, HEAD, head_sums)

        def segment(
            carry: tuple[Parts, Rows], segment: tuple[Array, Rows]
        ) -> tuple[tuple[Parts, Rows], None]:
            numbers, border = segment
            # The layers are read where they are written later: beside an array that is
            # only read, XLA would keep a copy of all.
            forward = partial(self._forward, carry[0][0])
            further = lax.scan(forward, border, numbers[:-1])[1]
            activations = jax.tree.map(
                lambda first, rest: jnp.concatenate([first[None], rest]),
                border,
                further,
            )
            return lax.scan(self._backward, carry, (numbers, activations), reverse=True)

        (parts, upstream), _ = lax.scan(
            segment, (parts, upstream), (self.segments, borders), reverse=True
        )
        start = self._empty_sums(self._gathered(self.params[PRELUDE]))
        sums, _ = self._differentiate(
            0,
            lambda params, _, *batch: self.call.prelude(*params, *batch),
            self._gathered_with_tied(PRELUDE),
            [*start, *tied_sums],
            [()] * len(self.groups),
            upstream,
        )
        if len(self.params) > TIED:
            parts, _ = self._close(parts, TIED, sums[len(start) :])
        (params, rest), state = self._close(parts, PRELUDE, sums[: len(start)])
        if self.keeps_sums:
            state = state._replace(
                accumulator=rest,
                inner_state=self.state.inner_state,
                masters=self.state.masters,
            )
            updates, state = self.accumulation.flush(state, params, **self.extra)
            params = apply_updates(params, updates, state)
        else:
            inner_state, masters = rest
            state = state._replace(
                accumulator=None, inner_state=inner_state, masters=masters
            )
        state = jax.tree.map(
            lambda new, old: vary(new, axes_of(old)), state, self.state
        )
        return params, state

    def _backward(
        self, carry: tuple[Parts, Rows], layer: tuple[Scalar, Rows]
    ) -> tuple[tuple[Parts, Rows], None]:
        parts, upstream = carry
        number, activations = layer
        params = self._gathered(_one_layer(parts[0][LAYERS], number))
        start = self._empty_sums(params)
        sums, upstream = self._differentiate(
            number + 1, self._layer, params, start, activations, upstream
        )
        parts, _ = self._close(parts, LAYERS, sums, number)
        return (parts, upstream), None

    def _differentiate(
        self,
        number: Scalar,
        function: Callable[..., Tree],
        params: Tree,
        start: list[Array],
        activations: Rows,
        upstream: Rows,
    ) -> tuple[Any, Rows]:
        """Return the sums of the gradients by `params`, and of each micro-batch the
        gradient by its activations.
        """
        moving, put = moving_of(params)

        def body(
            sums: list[Array], micro_batch: MicroBatch
        ) -> tuple[list[Array], list[Array]]:
            x, upstream, weight, *batch = micro_batch.arguments
            active, put_x = moving_of(x)

            def outputs(moving: list[Array], active: list[Array]) -> list[Array]:
                made = function(put(moving), put_x(active), *batch)
                return moving_of(self._copies(made))[0]

            _, pull_back = jax.vjp(outputs, moving, active)
            gradients, further = pull_back(upstream)
            return large.add(sums, gradients, weight, self.options), further

        groups = beside(self.groups, number, activations, upstream, self.weights)
        return over(groups, body, start, self.first_number)

    def _gathered_with_tied(self, part: int) -> tuple[Tree, ...]:
        parts = (self.params[part], *self.params[TIED:])
        return tuple(map(self._gathered, parts))

    def _gathered(self, part: Tree) -> Tree:
        return self._copies(
            part if self.call.gather is None else self.call.gather(part)
        )

    def _copies(self, tree: Tree) -> Tree:
        return large.copies(jax.tree.map(jnp.asarray, tree), frozenset(self.axis_names))

    def _empty_sums(self, tree: Tree) -> list[Array]:
        return large.start((tree,), self.options.accumulate_dtype)

    def _close(
        self, parts: Parts, part: int, sums: list[Array], number: Scalar = 0
    ) -> tuple[Parts, AccumulationState]:
        """Update one part by its sums, or keep these; the prelude, which comes last,
        moves what belongs to no parameter.
        """
        params, rest = _cut(self.tags, parts, part, number)
        moving, put = moving_of(params)
        if self.call.gather is not None:
            sums = self._scattered(moving, put, part, sums)
        elif part == LAYERS:
            sums = [leaf[None] for leaf in sums]
        if self.keeps_sums:
            totals = gradient_sum.emptied(rest, self.state.micro_step == 0)
            sums = gradient_sum.add(sums, moving_of(totals)[0], None, True)
        if self.call.gather is None:
            sums = group.added_up(sums, self.axis_names)
        accumulator = put(sums, jnp.zeros_like)
        if self.keeps_sums:
            made: Parts = (params, accumulator)
            state = self.reduced_state
        else:
            inner = part_of(self.accumulation.inner, self.tags, self.parts, part)
            accumulation = replace(self.accumulation, inner=inner)
            inner_state, masters = rest
            state = self.reduced_state._replace(
                accumulator=accumulator, inner_state=inner_state, masters=masters
            )
            updates, state = accumulation.flush(state, params, **self.extra)
            params = apply_updates(params, updates, state)
            made = (params, (state.inner_state, state.masters))
        return _written(self.tags, parts, made, part, number), state

    def _scattered(
        self,
        moving: list[Array],
        put: Callable[..., Tree],
        part: int,
        sums: list[Array],
    ) -> list[Array]:
        """Return the sums of a device's own shards, by the transpose of `gather`."""

        def gathered(moving: list[Array]) -> list[Array]:
            params = put(moving)[part]
            if part == LAYERS:
                params = _one_layer(params, 0)
            return moving_of(self._gathered(params))[0]

        wide = [
            leaf.astype(total.dtype) for leaf, total in zip(moving, sums, strict=True)
        ]
        scattered: list[Array] = jax.vjp(gathered, wide)[1](sums)[0]
        return scattered


def _one_layer(layers: Tree, number: Scalar) -> Tree:
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), layers
    )


def _cut(tags: Tree, tree: Tree, part: int, number: Scalar = 0) -> Any:
    """Return what one part has of `tree`, of the layers one with its leading axis, and
    None in the places of all others.
    """

    def cut_leaf(tag: int, leaf: Array) -> Array:
        if tag == part == LAYERS:
            return lax.dynamic_slice_in_dim(leaf, number, 1)
        return leaf if tag in (part, SHARED) else None

    return jax.tree.map(cut_leaf, tags, tree)


def _written(tags: Tree, tree: Tree, made: Tree, part: int, number: Scalar) -> Any:
    """Return `tree` with what one part has made."""

    def written_leaf(tag: int, leaf: Array, new: Array) -> Array:
        if new is None or (tag == SHARED and part != PRELUDE):
            return leaf
        if tag == LAYERS:
            return lax.dynamic_update_slice_in_dim(leaf, new, number, 0)
        return new

    return jax.tree.map(written_leaf, tags, tree, made)


# The inner optimizer, part by part.
#
# optax keeps one state for the whole tree: arrays that belong to a parameter, and
# shared ones such as a count. One part is updated by a call for the whole tree in which
# all other parts are zeros that nothing reads. A part of the layers is one layer with
# its leading axis, so that a rule by the number of axes, such as a mask for weight
# decay, decides as for all of them.
#
# No type says that an optimizer updates each array, and each layer of an array, by
# itself. So it is tried out on small arrays: the update of one part must be the same
# where all other parts are NaN.


def part_of(
    inner: optax.GradientTransformationExtraArgs,
    tags: Tree,
    like: Parts,
    part: int,
    filler: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of one part: it takes and returns what `_cut` does; `filler`
    stands in all other places.
    """

    def fill_leaf(tag: int, leaf: Array, given: Array) -> Array:
        if given is not None:
            return given
        shape = (1, *leaf.shape[1:]) if tag == LAYERS else leaf.shape
        return jnp.full(shape, filler if takes_part(leaf) else 0, leaf.dtype)

    def update(
        gradients: Tree, state: Tree, params: Params = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        gradients = jax.tree.map(fill_leaf, tags[0], like[0], gradients)
        params, state = jax.tree.map(fill_leaf, tags, like, (params, state))
        updates, state = inner.update(gradients, state, params, **extra)
        return _cut(tags[0], updates, part), _cut(tags[1], state, part)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _numbered(params: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Return for each array of the parameters its part."""
    return tuple(
        jax.tree.map(lambda _, part=part: part, tree)
        for part, tree in enumerate(params)
    )


def tags_of(
    inner: optax.GradientTransformationExtraArgs, params: tuple[Tree, ...], state: Tree
) -> tuple[Tree, Tree]:
    """Return for each array of the parameters, and of the pair of state and masters,
    its part, or `SHARED`.
    """

    def is_left_out(leaf: object) -> bool:
        return leaf is None or isinstance(leaf, optax.MaskedNode)

    def tag_of(leaf: Array, part: int) -> Any:
        return leaf if is_left_out(leaf) else part

    parts = _numbered(params)
    map_params: Any = optax.tree_utils.tree_map_params
    state_tags = map_params(
        inner,
        tag_of,
        state,
        parts,
        transform_non_params=lambda _: SHARED,
        is_leaf=is_left_out,
    )
    return parts, state_tags


def separable(
    inner: optax.GradientTransformationExtraArgs,
    params: tuple[Tree, ...],
    state: Tree,
    extra: Extra,
) -> tuple[Tree, Tree]:
    """Return `tags_of`; raise unless the optimizer updates each part and each layer by
    itself, tried out on small arrays.
    """
    tags = tags_of(inner, params, state)
    tagged_leaves = zip(
        jax.tree.leaves(tags), jax.tree.leaves((params, state)), strict=True
    )
    first_axes = {leaf.shape[:1] for tag, leaf in tagged_leaves if tag == LAYERS}
    trials = _trials(params)
    known_extra = jax.tree.map(
        lambda leaf: (
            np.ones(np.shape(leaf), leaf.dtype) if isinstance(leaf, jax.Array) else leaf
        ),
        extra,
    )
    try_out = jax.jit(partial(_parts_are_separate, inner, known_extra))
    found = "one that looks at several, such as optax.clip_by_global_norm or lamb"
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False):
            if len(first_axes) == 1 and try_out(*trials):
                return tags
    except (TypeError, ValueError) as error:
        # Such as a traced learning rate, or an extra argument by parameter.
        found = f"one that cannot be tried out on small arrays ({type(error).__name__})"
    raise explain(
        UsageError,
        "tx",
        expected="an inner optimizer that updates each array and each layer by itself",
        found=found,
        fix='Clip by clip_norm= of gradaccum.wrap; or leave on_overflow="ignore" out:'
        " the sums are kept, and the optimizer sees all of them.",
    )


def _trials(params: tuple[Tree, ...]) -> list[tuple[Tree, ...]]:
    """Return three trees of small arrays, of three layers."""
    numbers = np.random.default_rng(0)

    def drawn(part: int, leaf: Array) -> Any:
        shape = [min(size, 2) for size in leaf.shape]
        if part == LAYERS:
            shape[0] = 3
        if not takes_part(leaf):
            return np.zeros(shape, leaf.dtype)
        # Half precision would hide a trust ratio in its rounding.
        return (64 * numbers.normal(size=shape)).astype(wider(leaf.dtype, jnp.float32))

    return [
        tuple(
            jax.tree.map(partial(drawn, part), tree) for part, tree in enumerate(params)
        )
        for _ in range(3)
    ]


def _parts_are_separate(
    inner: optax.GradientTransformationExtraArgs,
    extra: Extra,
    first_gradients: Tree,
    gradients: Tree,
    params: tuple[Tree, ...],
) -> Array:
    """True if a second update of each part, where all others are NaN, is that of all
    together.
    """
    extra = {"value": jnp.ones(()), **extra}
    _, state = inner.update(first_gradients, inner.init(params), params, **extra)
    expected = inner.update(gradients, state, params, **extra)
    tags = tags_of(inner, params, state)
    places = [(PRELUDE, 0), *((LAYERS, number) for number in range(3)), (HEAD, 0)]
    if len(params) > TIED:
        places.append((TIED, 0))
    flags: list[Array] = []
    for part, number in places:
        own_gradients = _cut(tags[0], gradients, part, number)
        own_params, own_state = _cut(tags, (params, state), part, number)
        alone = part_of(inner, tags, (params, state), part, np.nan)
        made = alone.update(own_gradients, own_state, own_params, **extra)
        wanted = _cut(tags, expected, part, number)
        flags += map(_close, jax.tree.leaves(made), jax.tree.leaves(wanted))
    return jnp.all(jnp.stack(flags))


def _close(a: Array, b: Array) -> Array:
    a = a.astype(wider(a.dtype, jnp.float32))
    b = b.astype(wider(b.dtype, jnp.float32))
    tolerance = 16 * float(jnp.finfo(a.dtype).eps) * jnp.max(jnp.abs(b), initial=0)
    return jnp.allclose(a, b, 0, tolerance)
