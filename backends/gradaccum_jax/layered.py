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
Held = tuple[tuple[Tree, ...], Any]
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
        return (
            state
            if kit.measures(self.accumulation.options)
            else state._replace(accumulator=None)
        )

    def __call__(
        self, params: Params, state: AccumulationState, *batch: Tree, **extra: Any
    ) -> tuple[Any, Params, AccumulationState]:
        params, state = require_stacked(plain(params)), plain(state)
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
        x, borders = passes.forwards()
        made = passes.head(source, x)
        return (
            (
                made.loss,
                made.aux,
            )
            if self.question.differentiation.has_aux
            else made.loss
        ), *passes.backwards(made, borders)


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
        self.call, self.state, self.extra, self.groups = call, state, extra, groups
        self.options, self.alone = (
            call.accumulation.options,
            replace(call.accumulation, axes=()),
        )
        self.keeps, pair = (
            kit.measures(self.options),
            (state.inner_state, state.masters),
        )
        # A device's own sums until a part is closed: then the same on all devices, and
        # so by their type from the start.
        self.held: Held = replicated(
            (params, state.accumulator if self.keeps else pair), call.accumulation.axes
        )
        self.tags = (
            (_numbered(params),) * 2
            if self.keeps
            else separable(self.alone.inner, params, pair, extra)
        )
        self.params, self.layers = self.held[0], len(jax.tree.leaves(params[LAYERS])[0])
        self.names, self.first = (
            call.question.axis_names,
            large.first_number(groups, call.question.axis_names),
        )

    def forwards(self) -> tuple[Rows, Rows]:
        """Return the last layer's activations, and those at the kept borders,
        stacked.
        """
        x = self._each(0, partial(self.call.prelude, *self._outer(PRELUDE)))
        most = math.isqrt(self.layers) if self.call.borders == "recompute" else 1
        every = max(n for n in range(1, most + 1) if self.layers % n == 0)
        self.segments = jnp.arange(self.layers, dtype=jnp.int32).reshape(-1, every)
        return lax.scan(
            lambda x, numbers: (
                lax.scan(partial(self._forward, self.params), x, numbers)[0],
                x,
            ),
            x,
            self.segments,
        )

    def _forward(
        self, params: tuple[Tree, ...], x: Rows, number: Scalar
    ) -> tuple[Rows, Rows]:
        x = self._each(
            number + 1,
            partial(self._layer, self._whole(_bare(params, LAYERS, number))),
            x,
        )
        return x, x

    def _each(self, number: Scalar, function: Callable[..., Tree], *rows: Rows) -> Rows:
        groups = beside(self.groups, number, *rows)
        return over(
            groups,
            lambda _, each: ((), self._own(function(*each.arguments))),
            (),
            self.first,
        )[1]

    def _layer(self, own: Tree, x: Tree, *batch: Tree) -> Tree:
        fix = (
            "Let it return what the next layer takes; a first or last layer of another"
            " kind belongs into prelude or loss_fn."
        )
        return require_like(
            "layer(...)", self.call.layer(own, x, *batch), x, "what it takes", fix
        )

    def head(self, source: Source, x: Rows) -> large.Made[AccumulationState]:
        """Return the window's numbers with the sums of the head; and of each
        micro-batch the gradient of `x`, and its weight.
        """
        by, question = self._outer(HEAD), self.call.question
        start = self.state._replace(
            accumulator=self._start(by), inner_state=(), masters=()
        )
        size, dtype = len(start.accumulator), jnp.result_type(self.state.weight)

        def add(
            held: AccumulationState,
            gradients: list[Array],
            weight: Scalar,
            loss: Scalar,
        ) -> Any:
            weight, loss = jnp.asarray(weight, dtype), jnp.asarray(loss, dtype)
            counts = jnp.where(
                kit.usable(fields_of(held), weight, True) | (weight == 0), weight, 0
            )
            held, _ = window.add(
                held,
                window.MicroBatch(gradients[:size], weight, loss),
                None,
                self.options,
            )
            return held, [*gradients[size:], counts]

        question = question._replace(
            differentiation=replace(
                question.differentiation, places=tuple(range(len(by) + 1))
            )
        )
        start, axes = group.shared_window(start, self.names), frozenset(self.names)
        gathering = large.Gathering(
            start, add, False, axes, self.state.loss_scale, rows=True
        )
        return large.run(
            question, by, source, gathering, beside(self.groups, self.layers + 1, x)
        )

    def backwards(
        self, made: large.Made[AccumulationState], borders: Rows
    ) -> tuple[Params, AccumulationState]:
        upstream, self.weights = (
            [rows[:-1] for rows in made.rows],
            [rows[-1] for rows in made.rows],
        )
        own, size = made.held, len(moving_of(self.params[HEAD])[0])
        whole = group.all_reduce(
            group.ReducedWindow([], own.weight, own.overflow, as_read(own.loss)),
            self.names,
        )
        self.numbers = own._replace(
            weight=whole.weight,
            overflow=whole.overflow,
            last_overflow=whole.overflow,
            loss=as_stored(whole.loss),
        )
        (held, _), tied = (
            self._closed(self.held, HEAD, own.accumulator[:size]),
            own.accumulator[size:],
        )

        def segment(
            carry: tuple[Held, Rows], given: tuple[Array, Rows]
        ) -> tuple[tuple[Held, Rows], None]:
            numbers, x = given
            # The layers are read where they are written later: beside an array that is
            # only read, XLA would keep a copy of all.
            further = lax.scan(partial(self._forward, carry[0][0]), x, numbers[:-1])[1]
            inside = jax.tree.map(
                lambda first, rest: jnp.concatenate([first[None], rest]), x, further
            )
            return lax.scan(self._backward, carry, (numbers, inside), reverse=True)

        (held, upstream), _ = lax.scan(
            segment, (held, upstream), (self.segments, borders), reverse=True
        )
        outer, start = (
            self._outer(PRELUDE),
            self._start(self._whole(self.params[PRELUDE])),
        )
        rows = [()] * len(self.groups), upstream
        total, _ = self._sums(
            0,
            lambda outer, _, *batch: self.call.prelude(*outer, *batch),
            outer,
            [*start, *tied],
            *rows,
        )
        if len(self.params) > TIED:
            held, _ = self._closed(held, TIED, total[len(start) :])
        (params, rest), state = self._closed(held, PRELUDE, total[: len(start)])
        if self.keeps:
            state = state._replace(
                accumulator=rest,
                inner_state=self.state.inner_state,
                masters=self.state.masters,
            )
            updates, state = self.alone.flush(state, params, **self.extra)
            params = apply_updates(params, updates, state)
        else:
            state = state._replace(
                accumulator=None, inner_state=rest[0], masters=rest[1]
            )
        return params, jax.tree.map(
            lambda new, old: vary(new, axes_of(old)), state, self.state
        )

    def _backward(
        self, carry: tuple[Held, Rows], given: tuple[Scalar, Rows]
    ) -> tuple[tuple[Held, Rows], None]:
        (held, upstream), (number, x) = carry, given
        whole = self._whole(_bare(held[0], LAYERS, number))
        total, upstream = self._sums(
            number + 1, self._layer, whole, self._start(whole), x, upstream
        )
        return (self._closed(held, LAYERS, total, number)[0], upstream), None

    def _sums(
        self,
        number: Scalar,
        function: Callable[..., Tree],
        whole: Tree,
        start: list[Array],
        *rows: Rows,
    ) -> tuple[Any, Rows]:
        """Return the sums of the gradients by `whole`, and of each micro-batch those by
        its `x`; `rows` are `x` and upstream.
        """
        moving, put = moving_of(whole)

        def body(
            total: list[Array], each: MicroBatch
        ) -> tuple[list[Array], list[Array]]:
            x, upstream, weight, *batch = each.arguments
            active, put_x = moving_of(x)

            def value(moving: list[Array], active: list[Array]) -> list[Array]:
                return moving_of(
                    self._own(function(put(moving), put_x(active), *batch))
                )[0]

            gradients, further = jax.vjp(value, moving, active)[1](upstream)
            return large.add(total, gradients, weight, self.options), further

        return over(
            beside(self.groups, number, *rows, self.weights), body, start, self.first
        )

    def _outer(self, part: int) -> tuple[Tree, ...]:
        return tuple(
            self._whole(each) for each in (self.params[part], *self.params[TIED:])
        )

    def _whole(self, part: Tree) -> Tree:
        return self._own(part if self.call.gather is None else self.call.gather(part))

    def _own(self, tree: Tree) -> Tree:
        return large.copies(jax.tree.map(jnp.asarray, tree), frozenset(self.names))

    def _start(self, tree: Tree) -> list[Array]:
        return large.start((tree,), self.options.accumulate_dtype)

    def _closed(
        self, held: Held, part: int, total: list[Array], number: Scalar = 0
    ) -> tuple[Held, AccumulationState]:
        """Update one part by its sums, or keep these; the prelude, which comes last,
        moves what belongs to no parameter.
        """
        own, rest = _cut(self.tags, held, part, number)
        moving, put = moving_of(own)
        if self.call.gather is not None:
            wide = [
                leaf.astype(added.dtype)
                for leaf, added in zip(moving, total, strict=True)
            ]
            total = jax.vjp(
                lambda moving: moving_of(self._whole(_bare(put(moving), part)))[0], wide
            )[1](total)[0]
        elif part == LAYERS:
            total = [leaf[None] for leaf in total]
        if self.keeps:
            total = gradient_sum.add(
                total,
                moving_of(gradient_sum.emptied(rest, self.state.micro_step == 0))[0],
                None,
                True,
            )
        if self.call.gather is None:
            total = group.added_up(total, self.names)
        added = put(total, jnp.zeros_like)
        if self.keeps:
            return _written(self.tags, held, (own, added), part, number), self.numbers
        alone = replace(
            self.alone, inner=part_of(self.alone.inner, self.tags, self.held, part)
        )
        state = self.numbers._replace(
            accumulator=added, inner_state=rest[0], masters=rest[1]
        )
        updates, state = alone.flush(state, own, **self.extra)
        made = apply_updates(own, updates, state), (state.inner_state, state.masters)
        return _written(self.tags, held, made, part, number), state


def _bare(params: tuple[Tree, ...], part: int, number: Scalar = 0) -> Tree:
    """Return the parameters of one part, of the layers those of one."""
    return jax.tree.map(
        lambda leaf: (
            lax.dynamic_index_in_dim(leaf, number, keepdims=False)
            if part == LAYERS
            else leaf
        ),
        params[part],
    )


def _cut(tags: Tree, tree: Tree, part: int, number: Scalar = 0) -> Any:
    """Return what one part has of `tree`, of the layers one with its leading axis, and
    None in the places of all others.
    """

    def one(tag: int, leaf: Array) -> Array:
        return (
            lax.dynamic_slice_in_dim(leaf, number, 1)
            if tag == part == LAYERS
            else leaf
            if tag in (part, SHARED)
            else None
        )

    return jax.tree.map(one, tags, tree)


def _written(tags: Tree, tree: Tree, own: Tree, part: int, number: Scalar) -> Any:
    """Return `tree` with what one part has made of its own."""

    def new(tag: int, leaf: Array, mine: Array) -> Array:
        if mine is None or (tag == SHARED and part != PRELUDE):
            return leaf
        return (
            lax.dynamic_update_slice_in_dim(leaf, mine, number, 0)
            if tag == LAYERS
            else mine
        )

    return jax.tree.map(new, tags, tree, own)


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
    like: Held,
    part: int,
    filler: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of one part: it takes and returns what `_cut` does; `filler`
    stands in all other places.
    """

    def fill(tag: int, leaf: Array, mine: Array) -> Array:
        shape = (1, *leaf.shape[1:]) if tag == LAYERS else leaf.shape
        return (
            jnp.full(shape, filler if takes_part(leaf) else 0, leaf.dtype)
            if mine is None
            else mine
        )

    def update(
        gradients: Tree, state: Tree, params: Params = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        gradients, (params, state) = jax.tree.map(
            fill, (tags[0], tags), (like[0], like), (gradients, (params, state))
        )
        return cast(
            tuple[Tree, Tree],
            _cut(tags, inner.update(gradients, state, params, **extra), part),
        )

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _numbered(params: tuple[Tree, ...]) -> tuple[Tree, ...]:
    return tuple(
        jax.tree.map(lambda _, part=part: part, tree)
        for part, tree in enumerate(params)
    )


def tags_of(
    inner: optax.GradientTransformationExtraArgs, params: tuple[Tree, ...], pair: Tree
) -> tuple[Tree, Tree]:
    """Return for each array of the parameters, and of the pair of state and masters,
    its part, or `SHARED`.
    """

    def is_left_out(leaf: object) -> bool:
        return leaf is None or isinstance(leaf, optax.MaskedNode)

    map_params: Any = partial(
        optax.tree_utils.tree_map_params,
        transform_non_params=lambda _: SHARED,
        is_leaf=is_left_out,
    )
    numbered = _numbered(params)
    return numbered, map_params(
        inner, lambda leaf, part: leaf if is_left_out(leaf) else part, pair, numbered
    )


def separable(
    inner: optax.GradientTransformationExtraArgs,
    params: tuple[Tree, ...],
    pair: Tree,
    extra: Extra,
) -> tuple[Tree, Tree]:
    """Return `tags_of`; raise unless the optimizer updates each part and each layer by
    itself, tried out on small arrays.
    """
    tags, numbers = tags_of(inner, params, pair), np.random.default_rng(0)
    stacked = {
        leaf.shape[:1]
        for tag, leaf in zip(*map(jax.tree.leaves, (tags, (params, pair))), strict=True)
        if tag == LAYERS
    }

    def drawn(part: int, leaf: Array) -> Any:
        shape = [
            3 if part == LAYERS and not axis else min(size, 2)
            for axis, size in enumerate(leaf.shape)
        ]
        # half precision would hide a trust ratio in its rounding
        dtype = wider(leaf.dtype, jnp.float32)
        return (
            (64 * numbers.normal(size=shape)).astype(dtype)
            if takes_part(leaf)
            else np.zeros(shape, leaf.dtype)
        )

    def close(a: Array, b: Array) -> Array:
        a, b = (leaf.astype(wider(leaf.dtype, jnp.float32)) for leaf in (a, b))
        return jnp.allclose(
            a, b, 0, 16 * float(jnp.finfo(a.dtype).eps) * jnp.max(jnp.abs(b), initial=0)
        )

    def tried(first: Tree, second: Tree, given: Tree) -> Array:
        told = {"value": jnp.ones(()), **known}
        _, pair = inner.update(first, inner.init(given), given, **told)
        wanted, tags = (
            inner.update(second, pair, given, **told),
            tags_of(inner, given, pair),
        )
        same: list[Array] = []
        for part, number in [
            (PRELUDE, 0),
            *((LAYERS, n) for n in range(3)),
            (HEAD, 0),
            (TIED, 0),
        ][: 2 + len(given)]:
            gradients, (own, mine) = _cut(
                (tags[0], tags), (second, (given, pair)), part, number
            )
            made = part_of(inner, tags, (given, pair), part, np.nan).update(
                gradients, mine, own, **told
            )
            same += map(
                close,
                jax.tree.leaves(made),
                jax.tree.leaves(_cut(tags, wanted, part, number)),
            )
        return jnp.all(jnp.stack(same))

    trees = [
        tuple(
            jax.tree.map(partial(drawn, part), tree) for part, tree in enumerate(params)
        )
        for _ in range(3)
    ]
    known = jax.tree.map(
        lambda leaf: (
            np.ones(np.shape(leaf), leaf.dtype) if isinstance(leaf, jax.Array) else leaf
        ),
        extra,
    )
    found = "one that looks at several, such as optax.clip_by_global_norm or lamb"
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False):
            if len(stacked) == 1 and jax.jit(tried)(*trees):
                return tags
    except (
        TypeError,
        ValueError,
    ) as error:  # a traced learning rate, an extra argument by parameter
        found = f"one that cannot be tried out on small arrays ({type(error).__name__})"
    fix = (
        'Clip by clip_norm= of gradaccum.wrap; or leave on_overflow="ignore" out: the'
        " sums are kept, and the optimizer sees all of them."
    )
    raise explain(
        UsageError,
        "tx",
        expected="an inner optimizer that updates each array and each layer by itself",
        found=found,
        fix=fix,
    )
