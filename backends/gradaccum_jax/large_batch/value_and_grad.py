"""Compute the loss and the gradient of a large batch, or the update of a wrapped
optimizer, with only as much memory as one micro-batch needs.
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

from gradaccum.kit import Scalar, denominator, make_division, make_options
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
    """Return a function that computes the loss and the gradient of a large batch, as a
    replacement for `jax.value_and_grad`. The function processes one micro-batch at a
    time, because the whole batch may need too much memory.

        step = gradaccum_jax.value_and_grad(loss_fn, steps=8)
        loss, grads = step(params, x, y)

    Micro-batches of equal size run in one `jax.lax.scan`; a smaller last micro-batch is
    compiled separately. A micro-batch contains consecutive items. If the batch is
    sharded over a mesh, a micro-batch contains consecutive items of each shard, so that
    each device computes its share. Outside `jax.jit` the returned function is compiled
    automatically. So create it only once, and pass everything that changes as an
    argument, because all other values that `loss_fn` reads are constants of the
    compiled program.

    Args:
        loss_fn: ``loss_fn(params, *micro_batch)`` returns a floating-point scalar, or
            ``(loss, aux)`` with `has_aux`.
        has_aux: as in `jax.value_and_grad`.
        steps: the largest number of micro-batches. Each micro-batch has ceil(items /
            steps) items, except that the last micro-batch may be smaller. If the batch
            is sharded and the number of its shards is known, the size is rounded up so
            that a micro-batch has the same number of items from each shard.
        micro_batch_size: the number of items in a micro-batch, rounded up in the same
            way; the last micro-batch may be smaller. "auto" or a
            `gradaccum.AutoMicroBatchSize` finds the largest size that fits in memory.
            In this case, call the returned function outside `jax.jit`.
        reduction: "mean" if `loss_fn` returns a mean, that is, a sum divided by the
            micro-batch's weight; "sum" if it returns a sum; "sum_per_item" if it
            returns a sum that is to be divided by the batch's weight.
        weight: an array with one number per item, or a function that returns the weight
            of a micro-batch, for example its number of tokens. The function gets the
            same arguments as `loss_fn`, except `params`. By default the weight is the
            number of items. The weight is not differentiated. A traced weight that is
            negative or not finite makes the loss and the gradient NaN. A micro-batch of
            weight 0 adds nothing, even if its gradient is NaN. If all weights are 0,
            the loss and the gradient are 0.
        axes: a tree prefix of the tuple of the batch's arguments. For each argument, it
            contains the batch axis, None or "key". None means that every micro-batch
            gets the whole argument. "key" means that the argument is a random key, and
            micro-batch number i gets ``jax.random.fold_in(key, i)``. The default is
            "key" for a scalar typed key, and None for a plain Python value. A uint32
            key from `jax.random.PRNGKey` needs an explicit "key". Under a `jax.jit` of
            your own, a plain value is an array and needs an explicit None.
            A list of similar arrays that is as long as the batch is rejected, because
            it looks like a list of items. To allow it, pass an axis for each element,
            such as ``[0, 0]``.
        merge_aux: with None, each leaf of aux gets a new first axis with one entry per
            micro-batch. With "concatenate", each leaf must have the same number of rows
            for each item, and the rows are returned in the order of the items. A
            function ``merge_aux(auxes, weights)`` gets a list of the micro-batches'
            auxes and a list of their weights; it returns the aux of the whole batch.
        accumulate_dtype: the dtype in which gradients are summed; by default float32
            for half precision, otherwise the gradient's own dtype. The returned
            gradient has its parameter's dtype.
        axis_name: inside `jax.shard_map`, the mesh axes along which the batch is
            sharded. The loss and the gradient are computed over the items of all
            devices and reduced once. aux contains only the device's own values.

    Returns:
        A function of ``(params, *batch)`` that returns ``(loss, gradients)``, or
        ``((loss, aux), gradients)``. The loss has shape () and the dtype that `loss_fn`
        returns. Arrays that are passed by keyword are split along axis 0, or along
        `axes` if `axes` is a single axis for all arguments. Other values, such as
        ``train=True``, are passed whole. Except for floats, they are constants of the
        compiled program.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is invalid; or, when the
            returned function is called, the batch cannot be divided as requested, the
            loss is not a scalar, or aux does not have the same number of rows for each
            item although `merge_aux` is "concatenate".
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
        jax.grad(lambda _: 0.0)(params)  # JAX itself rejects integers.
        options = self.spec.options
        names = self.spec.axis_names
        # Mark the parameters and the sums as values that may differ between devices.
        # Otherwise `jax.grad` would reduce the gradients over the devices in every
        # micro-batch.
        varying = frozenset(names) | varying_axes(params, batch)
        unit = 1.0
        if self.spec.weight is None and options.reduction == "mean":
            # The weights are divided by the usual micro-batch size, so that most
            # weights are 1 and need no multiplication.
            unit = float(batch.size)

        def add(sums: Leaves, gradients: Leaves, weight: Scalar, _: Scalar) -> Leaves:
            return add_gradients(sums, gradients, weight / unit, options)

        sums = empty_sums(params, options.accumulate_dtype)
        value, sums, weight = run(
            self.spec, vary(params, varying), batch, vary(sums, varying), add
        )
        divisor = denominator(weight / unit, options, jnp.where)
        return value, gradients_of(sums, divisor, params, names)


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
    """Return a function that computes the loss and the update of a large batch, as one
    window of the wrapped optimizer `tx`.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=None, clip_norm=1.0)
        step = gradaccum_jax.value_and_update(loss_fn, tx, steps=8)
        loss, updates, state = step(params, state, x, y)
        params = gradaccum_jax.apply_updates(params, updates, state)

    Each call closes the window and applies all options of `tx`. If the window already
    contained micro-batches, the update includes them.

    Args:
        loss_fn: as for `value_and_grad`, but without a loss scale, because the call
            itself scales the loss. Parameters that are integers, bools or random keys
            are not trained.
        tx: an optimizer from `gradaccum.wrap` with ``steps=None``. If it was wrapped
            with ``axis_name``, the loss is computed over all devices, and aux contains
            only the device's own values.
        has_aux: as in `jax.value_and_grad`.
        steps: as for `value_and_grad`.
        micro_batch_size: as for `value_and_grad`.
        weight: as for `value_and_grad`.
        axes: as for `value_and_grad`.
        merge_aux: as for `value_and_grad`.

    Returns:
        A function of ``(params, state, *batch, **extra)`` that returns
        ``(loss, updates, state)``, or ``((loss, aux), updates, state)``. The loss is
        unscaled and includes dropped micro-batches; ``gradaccum_jax.result(...).loss``
        excludes them. The updates have the dtypes of the parameters, or of the master
        weights, and are zeros if no update was applied. From `extra`, the inner
        optimizer gets the arguments that it declares. It also gets arguments of optax's
        own optimizers, such as `value_fn`, unless `loss_fn` has an argument of this
        name. It gets the window's loss as `value`, unless `extra` contains a `value`.
        All other arguments in `extra` are passed to `loss_fn`, as for `value_and_grad`.

    Raises:
        ArgumentTypeError: `tx` is not wrapped.
        ArgumentValueError: `tx` was not wrapped with ``steps=None``, or an option is
            invalid. The returned function raises this error in the cases listed for
            `value_and_grad`.
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
