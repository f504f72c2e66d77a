"""`jax.value_and_grad` of a large batch with the memory of a micro-batch, and a wrapped
optimizer's update from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from gradaccum.kit import Scalar, make_division, make_options
from gradaccum_jax.arrays import (
    Array,
    DType,
    Extra,
    Leaves,
    Params,
    Tree,
    moving_of,
    plain,
)
from gradaccum_jax.checks import require_dtype, require_params_alone
from gradaccum_jax.extra_arguments import KNOWN
from gradaccum_jax.large_batch.auto import LargeBatchFunction
from gradaccum_jax.large_batch.batch import LargeBatch, Splitting, Weight
from gradaccum_jax.large_batch.gradients import (
    LossSpec,
    add_gradients,
    denominator,
    empty_sums,
    gradients_of,
    run,
)
from gradaccum_jax.optimizer import Accumulation, require_open
from gradaccum_jax.sharding import vary, varying_axes
from gradaccum_jax.state import AccumulationState
from gradaccum_jax.workers.group import names_of, require_axes, same

MergeAux = (
    Literal["concatenate"] | Callable[[Sequence[Tree], Sequence[Array]], Tree] | None
)


def value_and_grad(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    reduction: str = "mean",
    weight: Weight = None,
    axes: Tree = 0,
    merge_aux: MergeAux = None,
    accumulate_dtype: DType = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes loss and gradient of a large batch micro-batch by
    micro-batch, in place of `jax.value_and_grad`.

        step = gradaccum_jax.value_and_grad(loss_fn, steps=8)
        loss, grads = step(params, x, y)

    Micro-batches of one size are one `jax.lax.scan`; a smaller last one is compiled
    beside it. A micro-batch has consecutive items. If the batch is sharded over a mesh,
    a micro-batch has consecutive items of each shard, so that each device computes its
    share. Outside of `jax.jit` the returned function jits itself: keep it, and pass
    what changes as an argument, because all else that `loss_fn` reads is a constant.

    Args:
        loss_fn: ``loss_fn(params, *micro_batch)`` returns a floating scalar, or
            ``(loss, aux)`` with `has_aux`.
        has_aux: as in `jax.value_and_grad`.
        steps: at most so many micro-batches, of ceil(items / steps) items; the last one
            may be smaller. For a sharded batch the size is rounded up to as many items
            of each shard, where the shards are known.
        micro_batch_size: items of a micro-batch, rounded up likewise; the last one may
            be smaller. "auto" or a `gradaccum.AutoMicroBatchSize`: the largest that
            fits; then call the function outside of `jax.jit`.
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
        merge_aux: None: each leaf of aux has a new first axis, with an entry for each
            micro-batch. "concatenate": each leaf has a row per item; the rows come back
            in the order of the items. A function: ``merge_aux(auxes, weights)`` gets a
            list with the aux of each micro-batch and their weights; its result is
            returned.
        accumulate_dtype: dtype of the sum; by default float32 for half precision, else
            the gradient's own. The gradient has its parameter's dtype.
        axis_name: inside `jax.shard_map`: the mesh axes whose devices share the batch.
            Loss and gradient are those of all devices' items, reduced once; aux is the
            device's own.

    Returns:
        A function of the same arguments that returns ``(loss, gradients)``, or
        ``((loss, aux), gradients)``. The loss has shape () and the dtype that `loss_fn`
        returns. Arrays that are passed by keyword are cut along axis 0, or along
        `axes` where that is one axis for all. Keywords such as ``train=True`` are
        constants that `loss_fn` gets with every micro-batch.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option makes no sense; or, at a call,
            the batch cannot be divided so, or the loss is no scalar.
    """
    options = make_options(
        None, reduction=reduction, accumulate_dtype=require_dtype(accumulate_dtype)
    )
    names = names_of(axis_name)
    return ValueAndGrad(
        Splitting(make_division(steps, micro_batch_size), axes, weight),
        LossSpec(loss_fn, has_aux, merge_aux, weight, options, names),
    )


@dataclass(frozen=True, eq=False)
class ValueAndGrad(LargeBatchFunction):
    """The function that `value_and_grad` returns."""

    spec: LossSpec

    def __call__(self, params: Params, *batch: Tree, **keywords: Any) -> Any:
        require_axes(self.spec.axis_names)
        same("params", params, self.spec.axis_names)
        return self.call(params, batch, keywords)

    def run(self, params: Params, batch: LargeBatch) -> Any:
        require_params_alone(params)
        jax.grad(lambda _: 0.0)(params)  # JAX itself refuses integers.
        options = self.spec.options
        names = self.spec.axis_names
        # Or `jax.grad` would reduce over the devices in every micro-batch.
        varying = frozenset(names) | varying_axes(params, batch)
        unit = 1.0
        if self.spec.weight is None and options.reduction == "mean":
            # In units of the largest micro-batch most weights are 1 and cost nothing.
            unit = float(batch.size)

        def add(sums: Leaves, gradients: Leaves, weight: Scalar, _: Scalar) -> Leaves:
            return add_gradients(sums, gradients, weight / unit, options)

        sums = empty_sums(params, options.accumulate_dtype)
        value, sums, weight = run(
            self.spec, vary(params, varying), batch, vary(sums, varying), add
        )
        divisor = denominator(weight / unit, options)
        return value, gradients_of(sums, divisor, params, names)


# A window of a wrapped optimizer in one call.


def value_and_update(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    weight: Weight = None,
    axes: Tree = 0,
    merge_aux: MergeAux = None,
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
        tx: from `gradaccum.wrap` with ``steps=None``. With ``axis_name``, the loss is
            that of all devices, and aux is the device's own.
        has_aux: as in `jax.value_and_grad`.
        steps: as for `value_and_grad`.
        micro_batch_size: likewise.
        weight: likewise.
        axes: likewise.
        merge_aux: likewise.

    Returns:
        A function of ``(params, state, *batch, **extra)`` that returns
        ``(loss, updates, state)``, or ``((loss, aux), updates, state)``. The loss is
        unscaled and includes dropped micro-batches; ``gradaccum_jax.result(...).loss``
        excludes them. The updates, in the parameters' dtypes, are zeros if none was
        made. The inner optimizer gets those of `extra` that it declares, and optax's
        own if `loss_fn` has no arguments of these names; and the window's loss as
        `value` unless `extra` has one. `loss_fn` gets the others, as for
        `value_and_grad`.

    Raises:
        ArgumentTypeError: `tx` is not wrapped.
        ArgumentValueError: `tx` closes windows by itself, or an option makes no sense;
            or at a call, as for `value_and_grad`.
    """
    accumulation = require_open(tx)
    return ValueAndUpdate(
        Splitting(make_division(steps, micro_batch_size), axes, weight),
        LossSpec(
            loss_fn,
            has_aux,
            merge_aux,
            weight,
            accumulation.options,
            accumulation.axes,
        ),
        accumulation,
    )


@dataclass(frozen=True, eq=False)
class ValueAndUpdate(LargeBatchFunction):
    """The function that `value_and_update` returns."""

    spec: LossSpec
    accumulation: Accumulation

    @cached_property
    def _optimizer_arguments(self) -> frozenset[str]:
        of_loss = signature(self.spec.loss_fn).parameters.keys()
        return self.accumulation.declared | (KNOWN - of_loss)

    def __call__(
        self, params: Params, state: AccumulationState, *batch: Tree, **extra: Any
    ) -> tuple[Any, Tree, AccumulationState]:
        keywords = {
            name: extra.pop(name)
            for name in list(extra)
            if name not in self._optimizer_arguments
        }
        state = plain(state)
        self.accumulation.check(state, plain(params), extra)
        results: tuple[Any, Tree, AccumulationState] = self.call(
            (params, state, extra), batch, keywords
        )
        return results

    def run(
        self,
        model_arguments: tuple[Params, AccumulationState, Extra],
        batch: LargeBatch,
    ) -> tuple[Any, Tree, AccumulationState]:
        params, state, extra = model_arguments
        require_params_alone(params)
        arrays = plain(params)
        _, put = moving_of(arrays)

        def add(
            state: AccumulationState, gradients: Leaves, weight: Scalar, loss: Scalar
        ) -> AccumulationState:
            dtype = jnp.result_type(state.weight)
            return self.accumulation.add(
                state,
                put(gradients, lambda _: None),
                jnp.asarray(weight, dtype),
                jnp.asarray(loss, dtype),
            )

        copies = vary(params, frozenset(self.spec.axis_names))
        value, state, _ = run(self.spec, copies, batch, state, add, state.loss_scale)
        updates, state = self.accumulation.flush(state, arrays, **extra)
        return value, updates, state
