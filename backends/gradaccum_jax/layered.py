"""Train a model of stacked layers layer by layer: in both the forward and the backward
pass, all micro-batches pass through a layer before the next layer runs.

The gradient sum of a layer is complete after the last micro-batch's backward pass
through this layer. The layer is then updated, and its gradient is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.interpreters import partial_eval

from gradaccum import UsageError, kit
from gradaccum.kit import Scalar, make_division
from gradaccum_jax.arrays import (
    Array,
    InnerState,
    Leaves,
    Params,
    Tree,
    moving_of,
    plain,
)
from gradaccum_jax.large_batch.auto import LargeBatchFunction
from gradaccum_jax.large_batch.batch import (
    LargeBatch,
    MicroBatch,
    Splitting,
    Stacks,
    Weight,
    for_each_micro_batch,
    weight_of,
)
from gradaccum_jax.large_batch.gradients import (
    LossSpec,
    add_gradients,
    empty_sums,
    summarize,
    value_and_gradients,
)
from gradaccum_jax.large_batch.value_and_grad import MergeAux
from gradaccum_jax.master_weights import apply_updates
from gradaccum_jax.optimizer import Accumulation, require_open
from gradaccum_jax.sharding import vary
from gradaccum_jax.state import AccumulationState
from gradaccum_jax.workers import group


def layered_value_and_update(
    prelude: Callable[..., Tree],
    layer: Callable[..., Tree],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    weight: Weight = None,
    axes: Tree = 0,
    merge_aux: MergeAux = None,
) -> LayeredValueAndUpdate:
    """Return a function that computes the loss and the update of a large batch layer by
    layer, for a model of identical layers whose parameters are stacked.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=None, on_overflow="ignore")
        step = layered_value_and_update(embed, block, loss_fn, tx, steps=8)
        state = step.init(params)  # params = (outer, blocks)
        step = jax.jit(step, donate_argnums=(0, 1))
        loss, params, state = step(params, state, x, y)

    Only one layer's gradient is in memory at a time. The price is that the activations
    between the layers are kept for the whole batch, and that each layer runs a second
    time in the backward pass. The inner optimizer is called separately for the outer
    parameters and for each layer, with a separate state for each of them. It gets the
    parameters of a layer without their leading axis. An optimizer whose updates combine
    several layers, such as `optax.clip_by_global_norm`, is rejected. An optimizer that
    draws random numbers is rejected too, because it would draw the same numbers for
    each layer.

    Args:
        prelude: ``prelude(outer, *micro_batch)`` returns the inputs of the first layer
            as a tree of arrays. Integer arrays in the tree, such as a mask, have no
            gradient.
        layer: ``layer(params of one layer, activations, *micro_batch)`` returns
            activations of the same shapes and dtypes.
        loss_fn: ``loss_fn(outer, activations, *micro_batch)`` returns a floating-point
            scalar, or ``(loss, aux)`` if `has_aux` is true.
        tx: an optimizer from `gradaccum.wrap` with ``steps=None`` and
            ``on_overflow="ignore"``, but without `clip_norm` and `skip_norm`.
        has_aux: as for `value_and_grad`.
        steps: as for `value_and_grad`.
        micro_batch_size: as for `value_and_grad`.
        weight: as for `value_and_grad`.
        axes: as for `value_and_grad`. From a micro-batch's random key k, the prelude
            gets ``jax.random.fold_in(k, 0)``, layer number l gets
            ``fold_in(k, l + 1)``, and `loss_fn` gets ``fold_in(k, layers + 1)``.
        merge_aux: as for `value_and_grad`.

    Returns:
        A function of ``(params, state, *batch)`` that returns
        ``(loss, params, state)``, or ``((loss, aux), params, state)``, with the updated
        parameters. `params` is ``(outer, layers)``, where each array in `layers` has a
        leading axis with one entry per layer. The function's method ``init(params)``
        returns the initial state.

    Raises:
        ArgumentTypeError: `tx` is not wrapped.
        ArgumentValueError: `tx` was not wrapped with ``steps=None``, or an option is
            invalid. The returned function raises this error in the cases listed for
            `value_and_grad`.
        UsageError: `tx` or its inner optimizer cannot update the layers separately.
    """
    accumulation = require_open(tx)
    if kit.measures(accumulation.options):
        raise inseparable_error("options that need the gradients of all layers")
    spec = LossSpec(
        loss_fn, has_aux, merge_aux, weight, accumulation.options, accumulation.axes
    )
    return LayeredValueAndUpdate(
        Splitting(make_division(steps, micro_batch_size), axes, weight),
        prelude,
        layer,
        spec,
        accumulation,
    )


class Part(NamedTuple):
    """Either the outer parameters or the parameters of one layer, together with the
    inner optimizer's state for these parameters.
    """

    params: Tree
    inner_state: InnerState
    masters: Tree


@dataclass(frozen=True, eq=False)
class LayeredValueAndUpdate(LargeBatchFunction):
    """The function that `layered_value_and_update` returns."""

    prelude: Callable[..., Tree]
    layer: Callable[..., Tree]
    spec: LossSpec
    accumulation: Accumulation

    def init(self, params: Params) -> AccumulationState:
        """Return the state before the first window. `params` is the pair
        ``(outer, layers)``.
        """
        outer, layers = plain(params)
        outer_state = self.accumulation.init(outer)
        layer_states = jax.vmap(self.accumulation.init)(layers)
        return outer_state._replace(
            accumulator=None,
            inner_state=(outer_state.inner_state, layer_states.inner_state),
            masters=(outer_state.masters, layer_states.masters),
        )

    def __call__(
        self, params: Params, state: AccumulationState, *batch: Tree
    ) -> tuple[Any, Params, AccumulationState]:
        results: tuple[Any, Params, AccumulationState] = self.call(
            (plain(params), plain(state)), batch, {}
        )
        return results

    def run(
        self, model_arguments: tuple[Params, AccumulationState], batch: LargeBatch
    ) -> tuple[Any, Params, AccumulationState]:
        params, state = model_arguments
        outer, layers = params
        require_separable(self.accumulation.inner, outer, layers)
        outer_part, layer_parts = map(Part, params, state.inner_state, state.masters)
        passes = LayeredPasses(self, batch, state, outer)
        activations, borders, numbers = passes.forward(layers)
        window, outer_sums, upstream, weights, value = passes.head(activations, numbers)

        def backward(
            carry: tuple[Part, Stacks], number_and_border: tuple[Scalar, Stacks]
        ) -> tuple[tuple[Part, Stacks], None]:
            layer_parts, upstream = carry
            number, border = number_and_border
            # The layers' parameters are read from the scan's carry and written back to
            # the carry. If they were read from a separate array, XLA would keep a copy
            # of all layers.
            layer_part = entry_at(layer_parts, number)
            sums, upstream = passes.pull_back(
                self.layer,
                layer_part.params,
                passes.empty_sums(layer_part.params),
                border,
                upstream,
                weights,
                number + 1,
            )
            layer_part, _ = passes.close(window, layer_part, sums)
            return (with_entry(layer_parts, layer_part, number), upstream), None

        (layer_parts, upstream), _ = lax.scan(
            backward, (layer_parts, upstream), (numbers, borders), reverse=True
        )
        outer_sums, _ = passes.pull_back(
            self.first_layer,
            outer,
            outer_sums,
            [()] * len(upstream),
            upstream,
            weights,
            0,
        )
        outer_part, window = passes.close(window, outer_part, outer_sums)
        params, inner_state, masters = zip(outer_part, layer_parts, strict=True)
        state = window._replace(
            accumulator=None, inner_state=inner_state, masters=masters
        )
        return value, params, state

    def first_layer(self, outer: Tree, _: Tree, *batch: Tree) -> Tree:
        """Return the inputs of the first layer, which `prelude` computes from a
        micro-batch. The second argument is ignored. It exists so that this method can
        be called like `layer`, whose second argument is the output of the previous
        layer.
        """
        return self.prelude(outer, *batch)


@dataclass(frozen=True)
class LayeredPasses:
    """The forward and backward passes over the micro-batches of one call. The object
    exists only while JAX traces the call.
    """

    function: LayeredValueAndUpdate
    batch: LargeBatch
    state: AccumulationState
    outer: Tree

    def copy(self, tree: Tree) -> Any:
        """Turn arrays that are the same on all devices into per-device copies, so that
        their gradients are not reduced over the devices.
        """
        return vary(tree, frozenset(self.function.spec.axis_names))

    def for_each(
        self,
        body: Callable[..., Any],
        carry: Any,
        inputs: Stacks | None,
        key_number: Scalar,
    ) -> Any:
        return for_each_micro_batch(
            self.batch,
            body,
            carry,
            inputs,
            axis_names=self.function.spec.axis_names,
            key_number=key_number,
        )

    def outputs(
        self,
        function: Callable[..., Tree],
        params: Tree,
        inputs: Stacks | None,
        key_number: Scalar,
    ) -> Stacks:
        params = self.copy(params)

        def body(
            carry: tuple[()], micro_batch: MicroBatch, x: Tree
        ) -> tuple[tuple[()], Tree]:
            return carry, self.copy(function(params, x, *micro_batch.arguments))

        _, stacks = self.for_each(body, (), inputs, key_number)
        return cast(Stacks, stacks)

    def empty_sums(self, params: Tree) -> Leaves:
        dtype = self.function.spec.options.accumulate_dtype
        return cast(Leaves, self.copy(empty_sums(params, dtype)))

    def forward(self, layers: Tree) -> tuple[Stacks, Stacks, Array]:
        """Run the forward pass. Return the last layer's activations, the inputs of each
        layer, and the indices of the layers.
        """

        def forward(
            activations: Stacks, number_and_params: tuple[Scalar, Tree]
        ) -> tuple[Stacks, Stacks]:
            number, params = number_and_params
            layer = self.function.layer
            return self.outputs(layer, params, activations, number + 1), activations

        activations = self.outputs(self.function.first_layer, self.outer, None, 0)
        numbers = jnp.arange(len(jax.tree.leaves(layers)[0]), dtype=jnp.int32)
        activations, borders = lax.scan(forward, activations, (numbers, layers))
        return activations, borders, numbers

    def head(self, activations: Stacks, numbers: Array) -> Any:
        """Run the forward and backward pass of the loss function on the last layer's
        activations. Return five values:

        - the window's state, without `accumulator`, `inner_state` and `masters`,
        - the sums of the loss function's gradients with respect to the outer
          parameters,
        - the gradients with respect to the last layer's activations,
        - the weights of the micro-batches, where 0 replaces an invalid weight,
        - the loss of the batch, or the pair (loss, aux).
        """
        spec = self.function.spec
        dtype = jnp.result_type(self.state.weight)
        outer = self.copy(self.outer)
        outer_count = len(moving_of(outer)[0])

        def head(
            carry: tuple[AccumulationState, Leaves], micro_batch: MicroBatch, x: Tree
        ) -> tuple[Any, Tree]:
            window, sums = carry
            loss, aux, gradients = value_and_gradients(
                lambda by: spec.loss_fn(*by, *micro_batch.arguments),
                (outer, x),
                spec.has_aux,
                self.state.loss_scale,
            )
            weight = weight_of(micro_batch, spec.weight, dtype)
            weight = jnp.asarray(weight, dtype)
            window = self.function.accumulation.add(
                window, (), weight, loss.astype(dtype)
            )
            # If a weight is invalid, the window ends without an update, because
            # `accumulation.add` has set the overflow flag.
            weight = jnp.where(weight > 0, weight, 0)
            sums = add_gradients(sums, gradients[:outer_count], weight, spec.options)
            return (window, sums), (loss, weight, aux, gradients[outer_count:])

        window = self.state._replace(accumulator=(), inner_state=(), masters=())
        window = group.shared_window(window, spec.axis_names)
        (window, sums), stacks = self.for_each(
            head, (window, self.empty_sums(outer)), activations, len(numbers) + 1
        )
        weights = [stack[1] for stack in stacks]
        upstream = [stack[3] for stack in stacks]
        value, _ = summarize(spec, self.batch, stacks)
        return window, sums, upstream, weights, value

    def pull_back(
        self,
        function: Callable[..., Tree],
        params: Tree,
        sums: Leaves,
        inputs: Stacks,
        upstream: Stacks,
        weights: Stacks,
        key_number: Scalar,
    ) -> tuple[Leaves, Stacks]:
        """Run the backward pass of `function` on all micro-batches. Add the gradients
        with respect to `params` to `sums`. Return the new sums, and the gradients with
        respect to the inputs.
        """
        moving, put = moving_of(self.copy(params))
        options = self.function.spec.options

        def body(
            sums: Leaves, micro_batch: MicroBatch, rows: tuple[Tree, Leaves, Scalar]
        ) -> tuple[Leaves, Leaves]:
            x, upstream, weight = rows
            moving_x, put_x = moving_of(x)

            def outputs(moving: Leaves, moving_x: Leaves) -> Leaves:
                outputs = function(put(moving), put_x(moving_x), *micro_batch.arguments)
                return moving_of(self.copy(outputs))[0]

            _, pull_back = jax.vjp(outputs, moving, moving_x)
            gradients, input_gradients = pull_back(upstream)
            sums = add_gradients(sums, gradients, weight, options)
            return sums, input_gradients

        rows = list(zip(inputs, upstream, weights, strict=True))
        sums, input_gradients = self.for_each(body, sums, rows, key_number)
        return sums, input_gradients

    def close(
        self, window: AccumulationState, part: Part, sums: Leaves
    ) -> tuple[Part, AccumulationState]:
        """Update the parameters in `part` with the sums of their gradients. Return the
        updated `part`, and the window's state after the update.
        """
        put = moving_of(part.params)[1]
        state = window._replace(
            accumulator=put(sums, jnp.zeros_like),
            inner_state=part.inner_state,
            masters=part.masters,
        )
        updates, state = self.function.accumulation.flush(state, part.params)
        params = apply_updates(part.params, updates, state)
        return Part(params, state.inner_state, state.masters), state


def entry_at(tree: Tree, number: Scalar) -> Any:
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), tree
    )


def with_entry(tree: Tree, entry: Tree, number: Scalar) -> Any:
    return jax.tree.map(
        lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, number, 0),
        tree,
        entry,
    )


def require_separable(
    inner: optax.GradientTransformationExtraArgs, outer: Tree, layers: Tree
) -> None:
    """Raise unless the inner optimizer can update each layer separately. It cannot do
    so if it draws random numbers, or if its update of one layer depends on another
    layer. The outer parameters (all parameters outside the layers) count as one more
    layer here.

    The inner optimizer is not run, but two successive updates are traced. The second
    update is needed because a layer may affect another layer through the optimizer's
    state.
    """

    def second_updates(params: Tree, first: Tree, second: Tree) -> Tree:
        state = inner.init(params)
        _, state = inner.update(first, state, params, value=jnp.ones(()))
        return inner.update(second, state, params, value=jnp.ones(()))[0]

    parts = jax.eval_shape(lambda: (outer, entry_at(layers, 0), entry_at(layers, 0)))
    program = jax.make_jaxpr(second_updates)(parts, parts, parts).jaxpr
    if "random_bits[" in str(program):
        raise inseparable_error(
            "an inner optimizer that draws random numbers, which would be the same for"
            " each layer"
        )
    places = [place for place, part in enumerate(parts) for _ in jax.tree.leaves(part)]
    for place in range(len(parts)):
        is_of_part = [leaf_place == place for leaf_place in places]
        is_read = partial_eval.dce_jaxpr(program, is_of_part)[1]
        arguments_read = zip(3 * places, is_read, strict=True)
        if any(read and of_place != place for of_place, read in arguments_read):
            raise inseparable_error(
                "an inner optimizer that reads several layers at once, such as"
                " optax.clip_by_global_norm"
            )


def inseparable_error(found: str) -> UsageError:
    return UsageError(
        "tx: expected an optimizer that can update each layer independently; got"
        f' {found}. Write gradaccum.wrap(..., steps=None, on_overflow="ignore") with'
        " no option that clips or skips based on the norm, or call"
        " gradaccum_jax.value_and_update."
    )
