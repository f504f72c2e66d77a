"""`jax.value_and_grad` of a large batch with the memory of a micro-batch, and a wrapped
optimizer's update from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Scalar, explain, make_options
from gradaccum_jax.arrays import Array, DType, Extra, Params, Tree, moving_of, plain
from gradaccum_jax.checks import require_dtype
from gradaccum_jax.extra_arguments import KNOWN, require_declared
from gradaccum_jax.large_batch import gradients
from gradaccum_jax.large_batch.auto import Call
from gradaccum_jax.large_batch.batch import Source, Splitting, Weight, make_splitting
from gradaccum_jax.large_batch.gradients import (
    Differentiation,
    Gathering,
    Question,
    as_declared,
    axes_in,
    copies,
    run,
)
from gradaccum_jax.optimizer import Accumulation, require_open
from gradaccum_jax.state import AccumulationState
from gradaccum_jax.workers.group import require_axes, require_names, require_same_params


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    micro_batch_weight: float | None = None,
    reduction: str = "mean",
    weight: Weight = None,
    axes: Tree = 0,
    split: Callable[..., Iterable[Any]] | None = None,
    aux: Tree = None,
    accumulate_dtype: DType = None,
    allow_int: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes loss and gradient of a large batch micro-batch by
    micro-batch, in place of `jax.value_and_grad`.

        step = gradaccum_jax.value_and_grad(loss_fn, steps=8)
        loss, grads = step(params, x, y)

    Micro-batches of one size are one `jax.lax.scan`; a smaller last one is compiled
    beside it. A micro-batch has consecutive items; of a batch that is sharded over a
    mesh it has consecutive items of each shard, so that each device computes its share.
    Outside of `jax.jit` the returned function jits itself: keep it, and pass
    what changes as an argument, because all else that `loss_fn` reads is a constant.

    Args:
        loss_fn: ``loss_fn(params, *micro_batch)`` returns a floating scalar, or
            ``(loss, aux)`` with `has_aux`.
        argnums: the argument to differentiate by, or a tuple of several; the others are
            the batch.
        has_aux: as in `jax.value_and_grad`; then `aux` says how it merges.
        steps: at most so many micro-batches, of ceil(items / steps) items; the last one
            may be smaller. Of a sharded batch the sizes are rounded up to as many items
            of each shard, where the shards are known.
        micro_batch_size: items of a micro-batch, rounded up likewise; the last one may
            be smaller. "auto" or a `gradaccum.AutoMicroBatchSize`: the largest that
            fits.
        micro_batch_weight: consecutive items are packed up to this weight; a function
            `weight` is called on each item. Each new pattern of cuts is compiled.
        reduction: "mean": `loss_fn` takes a mean over weights; "sum": a sum;
            "sum_per_item": a sum, to be divided by the batch's weight.
        weight: the weight of a micro-batch: a function of its arguments, such as its
            number of tokens, or an array of one number per item; by default its number
            of items. A constant to JAX. A traced weight that is negative or not finite
            makes loss and gradient NaN. Weight 0 adds nothing, even of a NaN; weights
            that are all 0 give loss 0 and gradient 0.
        axes: a prefix of the tuple of the batch's arguments: an axis of items, None for
            what is passed whole, or "key" for a random key, of which micro-batch number
            i gets ``jax.random.fold_in(key, i)``. A scalar typed key is "key" by
            default, and plain Python values None; under a `jax.jit` of your own they
            are arrays and need the None. A list of arrays of one kind that may be as
            long as the batch needs ``[0, 0]``, an axis for each element.
        split: a function in place of cuts: ``split(*batch)``, or with `steps`
            ``split(*batch, steps=steps)``, returns the micro-batches, each a tuple of
            arguments or the only one. `axes` then says where their items and keys are.
        aux: a prefix of the aux, how each leaf merges: "sum", "mean" or "weighted_mean"
            (by the weights, as the loss), "max", "min" or "concatenate" (in the order
            of the items).
        accumulate_dtype: dtype of the sum; by default float32 for half precision, else
            the gradient's own. The gradient has its parameter's dtype.
        allow_int: as in `jax.value_and_grad`.
        axis_name: inside `jax.shard_map`: the mesh axes whose devices share the batch.
            Loss, gradient and aux are those of all devices' items, reduced once;
            concatenated rows are the device's own.

    Returns:
        A function of the same arguments that returns ``(loss, gradients)``, or
        ``((loss, aux), gradients)``. The loss has shape () and the dtype that `loss_fn`
        returns. Keywords such as ``train=True`` are constants that `loss_fn` is given
        with every micro-batch.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option makes no sense; or, at a call,
            the batch cannot be divided so, or `loss_fn` returns something else than was
            declared.
    """
    differentiation = Differentiation(
        loss_fn, as_places(argnums), has_aux, allow_int, isinstance(argnums, int)
    )
    splitting = make_splitting(
        steps, micro_batch_size, micro_batch_weight, axes, weight, split
    )
    options = make_options(
        None, reduction=reduction, accumulate_dtype=require_dtype(accumulate_dtype)
    )
    return ValueAndGrad(
        Question(
            differentiation,
            weight,
            as_declared(aux, has_aux=has_aux),
            options,
            require_names(axis_name),
        ),
        splitting,
    )


@dataclass(frozen=True, eq=False)
class ValueAndGrad(Call):
    """The function that `value_and_grad` returns."""

    question: Question
    splitting: Splitting

    def __call__(self, *arguments: Tree, **keywords: Any) -> Any:
        if keywords:
            return self._bound(keywords, self._with_keywords)(*arguments)
        by, batch = self.question.differentiation.parted(arguments)
        require_axes(self.question.axis_names)
        require_same_params(by, self.question.axis_names)
        return self._of_batch(by, batch)

    def _with_keywords(self, keywords: dict[str, Any]) -> ValueAndGrad:
        return replace(self, question=self.question.with_keywords(keywords))

    def _run(self, by: tuple[Tree, ...], source: Source) -> Any:
        options = self.question.options
        names = self.question.axis_names
        differentiation = self.question.differentiation

        def add(held: Any, given: Any, weight: Any, loss: Any) -> Any:
            return gradients.add(held, given, weight, options)

        axes = axes_in(by, source, names)
        start = copies(gradients.start(by, options.accumulate_dtype), axes)
        gathering = Gathering(start, add, relative=not names, axes=axes)
        made = run(self.question, by, source, gathering)
        found = gradients.finish(made.held, made.weight, by, options, names)
        return (made.loss, made.aux) if differentiation.has_aux else made.loss, found[
            0
        ] if differentiation.single else found


def as_places(argnums: Any) -> tuple[int, ...]:
    if isinstance(argnums, int):
        places = (argnums,)
    elif isinstance(argnums, tuple | list):
        places = tuple(argnums)
    else:
        places = None
    fix = "Write argnums=0, or argnums=(0, 1)."
    if places is None or not all(
        isinstance(place, int) and not isinstance(place, bool) for place in places
    ):
        raise explain(
            ArgumentTypeError,
            "argnums",
            expected="an int or a tuple of ints",
            got=argnums,
            fix=fix,
        )
    if not places or len(set(places)) < len(places) or min(places) < 0:
        raise explain(
            ArgumentValueError,
            "argnums",
            expected="different places, counted from 0",
            got=argnums,
            fix=fix,
        )
    return places


# A whole window of a wrapped optimizer in one call: the large batch is divided, and its
# update is made or skipped.


def value_and_update(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    micro_batch_weight: float | None = None,
    weight: Weight = None,
    axes: Tree = 0,
    split: Callable[..., Iterable[Any]] | None = None,
    aux: Tree = None,
) -> Callable[..., Any]:
    """Return a function that computes a large batch's loss and its window's update.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=None, clip_norm=1.0)
        step = gradaccum_jax.value_and_update(loss_fn, tx, steps=8)
        loss, updates, state = step(params, state, x, y)
        params = gradaccum_jax.apply_updates(params, updates, state)

    The call closes the window, with all options of `tx`. The update includes what an
    open window held before.

    Args:
        loss_fn: as for `value_and_grad`; the call scales the loss by itself. Parameters
            of integers, bools or random keys take no part.
        tx: from `gradaccum.wrap` with ``steps=None``. With ``axis_name``, loss and
            merged aux are those of all devices.
        has_aux: as in `jax.value_and_grad`.
        steps: as for `value_and_grad`.
        micro_batch_size: likewise.
        micro_batch_weight: likewise.
        weight: likewise.
        axes: likewise.
        split: likewise.
        aux: likewise.

    Returns:
        A function of ``(params, state, *batch, **extra)`` that returns
        ``(loss, updates, state)``, or ``((loss, aux), updates, state)``. The loss is
        unscaled and includes dropped micro-batches; ``gradaccum_jax.result(...).loss``
        excludes them. The updates, in the parameters' dtypes, are zeros if none was
        made. `loss_fn` gets what of `extra` it takes by keyword, as for
        `value_and_grad`; the inner optimizer gets the rest, and the window's loss as
        `value` unless `extra` has one.

    Raises:
        ArgumentTypeError: `tx` is not wrapped.
        ArgumentValueError: `tx` closes windows by itself, or an option makes no sense;
            or at a call, as for `value_and_grad`.
    """
    accumulation = require_open(tx)
    differentiation = Differentiation(
        loss_fn, (0,), has_aux, allow_int=True, single=True
    )
    splitting = make_splitting(
        steps, micro_batch_size, micro_batch_weight, axes, weight, split
    )
    declared = as_declared(aux, has_aux=has_aux)
    question = Question(
        differentiation, weight, declared, accumulation.options, accumulation.axes
    )
    return ValueAndUpdate(question, splitting, accumulation)


@dataclass(frozen=True, eq=False)
class ValueAndUpdate(Call):
    """The function that `value_and_update` returns."""

    question: Question
    splitting: Splitting
    accumulation: Accumulation

    def __call__(
        self, params: Params, state: AccumulationState, *batch: Tree, **extra: Any
    ) -> tuple[Any, Tree, AccumulationState]:
        differentiation = self.question.differentiation
        declared = self.accumulation.declared
        keywords = differentiation.keywords_in(
            extra, 1 + len(batch), declared.names | KNOWN
        )
        if keywords:
            call: ValueAndUpdate = self._bound(keywords, self._with_keywords)
            rest = {name: extra[name] for name in extra if name not in keywords}
            return call(params, state, *batch, **rest)
        require_declared(extra, declared)
        differentiation.check((params,))
        state = plain(state)
        self.accumulation.check(state, plain(params), extra)
        made: tuple[Any, Tree, AccumulationState] = self._of_batch(
            (params, state, extra), batch
        )
        return made

    def _with_keywords(self, keywords: dict[str, Any]) -> ValueAndUpdate:
        return replace(self, question=self.question.with_keywords(keywords))

    def _run(
        self, given: tuple[Params, AccumulationState, Extra], source: Source
    ) -> tuple[Any, Tree, AccumulationState]:
        params, state, extra = given
        arrays = plain(params)

        def add(
            held: AccumulationState,
            gradients: list[Array],
            weight: Scalar,
            loss: Scalar,
        ) -> AccumulationState:
            known, told = (
                jnp.asarray(number, jnp.result_type(held.weight))
                for number in (weight, loss)
            )
            return self.accumulation.add(
                held, put(gradients, lambda _: None), known, told
            )

        axes = frozenset(self.question.axis_names)
        put = moving_of(arrays)[1]
        made = run(
            self.question,
            (params,),
            source,
            Gathering(state, add, relative=False, axes=axes, scale=state.loss_scale),
        )
        updates, state = self.accumulation.flush(made.held, arrays, **extra)
        return (
            (made.loss, made.aux)
            if self.question.differentiation.has_aux
            else made.loss,
            updates,
            state,
        )
