"""Compute the loss and the gradient of a large batch for a loss that compares items
across the whole batch, such as a contrastive loss.

Each micro-batch runs twice. The first pass computes its outputs. After the loss of all
outputs has been differentiated, the second pass propagates the gradients of the outputs
to the parameters (Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", 2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum.kit import make_division
from gradaccum_jax import gradient_sum
from gradaccum_jax.arrays import DType, Leaves, Params, Tree, moving_of
from gradaccum_jax.checks import require_dtype, require_params_alone
from gradaccum_jax.large_batch.auto import LargeBatchFunction
from gradaccum_jax.large_batch.batch import (
    LargeBatch,
    MicroBatch,
    Splitting,
    Stacks,
    call_with,
    concatenate_items,
    for_each_micro_batch,
)
from gradaccum_jax.large_batch.gradients import (
    empty_sums,
    gradients_of,
    sum_over_devices,
    value_and_gradients,
)
from gradaccum_jax.sharding import vary, varying_axes
from gradaccum_jax.workers.group import names_of, require_axes, same


def coupled_value_and_grad(
    outputs_fn: Callable[..., Tree],
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    axes: Tree = 0,
    accumulate_dtype: DType = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the loss and the gradient of a large batch, for a
    loss that compares the batch's items with each other.

        step = gradaccum_jax.coupled_value_and_grad(embed, info_nce, steps=8)
        loss, grads = step(params, images, texts)

    Compared with `value_and_grad`, this function needs an additional forward pass, and
    memory for the outputs of all items.

    Args:
        outputs_fn: ``outputs_fn(params, *micro_batch)`` returns a tree of arrays with
            the same number of rows for each item along the leading axis. It is called
            twice for each micro-batch, so random numbers must come from a key in the
            batch.
        loss_fn: ``loss_fn(params, outputs)`` returns a floating-point scalar, or
            ``(loss, aux)`` with `has_aux`. The outputs contain the rows of the whole
            batch in the order of the items. `loss_fn` is called once. If you use a loss
            scale, multiply the loss by the scale in `loss_fn`. Integer outputs get no
            gradient.
        has_aux: as in `jax.value_and_grad`.
        steps: as for `value_and_grad`.
        micro_batch_size: as for `value_and_grad`.
        axes: as for `value_and_grad`.
        accumulate_dtype: as for `value_and_grad`.
        axis_name: inside `jax.shard_map`, the mesh axes along which the batch is
            sharded. The outputs of all devices are gathered in the order of the
            devices, and the gradients are reduced once.

    Returns:
        A function of ``(params, *batch)`` that returns ``(loss, gradients)``, or
        ``((loss, aux), gradients)``. Keyword arguments are passed to `outputs_fn`, as
        for `value_and_grad`.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is invalid; or, when the
            returned function is called, the batch cannot be divided as requested, an
            output does not have the same number of rows for each item, or `loss_fn`
            does not return a scalar.
    """
    return CoupledValueAndGrad(
        Splitting(make_division(steps, micro_batch_size), axes, None),
        outputs_fn,
        loss_fn,
        has_aux,
        require_dtype(accumulate_dtype),
        names_of(axis_name),
    )


@dataclass(frozen=True, eq=False)
class CoupledValueAndGrad(LargeBatchFunction):
    """The function that `coupled_value_and_grad` returns."""

    outputs_fn: Callable[..., Tree]
    loss_fn: Callable[..., Any]
    has_aux: bool
    accumulate_dtype: DType
    axis_names: tuple[str, ...]

    def __call__(self, params: Params, *batch: Tree, **keywords: Any) -> Any:
        require_axes(self.axis_names)
        same("params", params, self.axis_names)
        return self.call(params, batch, keywords)

    def run(self, params: Params, batch: LargeBatch) -> Any:
        require_params_alone(params)
        jax.grad(lambda _: 0.0)(params)  # JAX itself rejects integers.
        # Mark the parameters and the sums as values that may differ between devices.
        # Otherwise `jax.grad` would reduce the gradients over the devices in every
        # micro-batch.
        varying = frozenset(self.axis_names) | varying_axes(params, batch)
        local_params = vary(params, varying)
        moving, put = moving_of(local_params)

        # The first pass computes the outputs of each micro-batch.
        def forward(
            carry: tuple[()], micro_batch: MicroBatch, _: Any
        ) -> tuple[tuple[()], Tree]:
            return carry, self.outputs(local_params, micro_batch)

        _, output_stacks = for_each_micro_batch(
            batch, forward, (), axis_names=self.axis_names
        )

        # The loss of all outputs is computed and differentiated in one step.
        def loss_of_all(params_and_outputs: tuple[Params, Stacks]) -> Any:
            params, output_stacks = params_and_outputs
            outputs = concatenate_items(batch, output_stacks, "outputs_fn")
            return self.loss_on_first_device(params, outputs)

        loss, aux, gradients = value_and_gradients(
            loss_of_all, (local_params, output_stacks), self.has_aux
        )
        loss, aux = jax.tree.map(
            lambda leaf: sum_over_devices(leaf, self.axis_names), (loss, aux)
        )
        put_outputs = moving_of(output_stacks)[1]
        output_gradients = put_outputs(gradients[len(moving) :], lambda _: None)

        # The second pass propagates the gradients of the outputs to the parameters.
        def backward(
            sums: Leaves, micro_batch: MicroBatch, output_gradients: Tree
        ) -> tuple[Leaves, tuple[()]]:
            def outputs(moving: Leaves) -> Leaves:
                return moving_of(self.outputs(put(moving), micro_batch))[0]

            _, pull_back = jax.vjp(outputs, moving)
            (gradients,) = pull_back(jax.tree.leaves(output_gradients))
            return gradient_sum.add(sums, gradients, None, True), ()

        sums = vary(empty_sums(params, self.accumulate_dtype), varying)
        sums = gradient_sum.add(sums, gradients[: len(moving)], None, True)
        sums, _ = for_each_micro_batch(
            batch, backward, sums, output_gradients, axis_names=self.axis_names
        )
        one = jnp.ones((), jnp.float32)
        gradient = gradients_of(sums, one, params, self.axis_names)
        return ((loss, aux), gradient) if self.has_aux else (loss, gradient)

    def outputs(self, params: Params, micro_batch: MicroBatch) -> Tree:
        outputs = call_with(self.outputs_fn, params, micro_batch)
        return jax.tree.map(jnp.asarray, outputs)

    def loss_on_first_device(self, params: Params, outputs: Tree) -> Any:
        """Gather the outputs of all devices. Return their loss on the first device and
        0 on every other device, so that the sum over the devices contains the loss and
        its gradient only once.
        """
        names = self.axis_names
        if not names:
            return self.loss_fn(params, outputs)
        outputs = jax.tree.map(
            lambda leaf: lax.all_gather(leaf, names, tiled=True),  # type: ignore[no-untyped-call]
            outputs,
        )
        is_first = lax.axis_index(names) == 0
        return jax.tree.map(
            lambda leaf: jnp.where(is_first, leaf, jnp.zeros_like(leaf)),
            self.loss_fn(params, outputs),
        )
