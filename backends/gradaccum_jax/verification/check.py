"""`gradaccum_jax.verify`: a check whether accumulation is right for a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import VerificationReport
from gradaccum.kit import Batch, as_loss, examine
from gradaccum_jax.verification.subject import JaxSubject

DIVIDED_LOSS = (
    "the loss is divided by {steps}, and a window of {steps} micro-batches is divided by"
    " itself. Most likely `loss / {steps}` is left of the old loop, and each update is"
    " {steps} times too small: delete the division."
)


def verify(
    params: Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    steps: int | None = None,
    *,
    reduction: str = "mean",
    weight: Any = None,
    axes: Any = 0,
    has_aux: bool = False,
) -> VerificationReport:
    """Check whether gradient accumulation is right for a loss, and if not, why.

    JAX compiles `loss_fn` once per size of a micro-batch. Not for use under `jax.jit`,
    because it looks at values.

    An item with a key of its own meets the same random numbers in each micro-batch, so
    that its loss can be compared: split one key into a key per item, and bring them in
    the batch. From one key for a micro-batch an item gets other numbers in another
    micro-batch; the report says that such a loss cannot be compared. Verify it without
    dropout (``deterministic=True`` in flax).

    Args:
        params: the tree that the loss is differentiated by.
        loss_fn: ``loss_fn(params, *batch)`` returns a floating scalar.
        batch: a tuple or list of the loss's other arguments, nests of arrays with the
            items along axis 0: a few real items, at least `steps`. A dictionary is one
            argument, or arguments by name.
        steps: micro-batches that the batch is divided into, at least 2; by default 4,
            or as many as there are items.
        reduction: how accumulation will add up: "mean", "sum" or "sum_per_item".
        weight: as accumulation will have it: a callable ``weight(*micro_batch)``, or an
            array with one number per item.
        axes: a prefix of the nest of `batch`: the axis of items, None for what each
            micro-batch gets in full, or ``"key"`` for its random key.
        has_aux: `loss_fn` returns ``(loss, aux)``, as for `jax.grad`.

    Raises:
        ArgumentValueError: arrays have unequal numbers of items, or `steps` or `weight`
            does not suit the batch.
    """
    loss, arguments = as_loss(loss_fn, batch)
    item_batch = Batch(arguments, axes, is_array, take)
    subject = JaxSubject(
        params, loss, item_batch, item_batch.weight_of(weight), has_aux
    )
    # The report says which gradients are not finite.
    with np.errstate(all="ignore"):
        report = examine(subject, steps, reduction)
    if reduction == "sum" or not subject.is_divided_by(steps):
        return report
    return replace(report, notes=(*report.notes, DIVIDED_LOSS.format(steps=steps)))


def verifies(model: object) -> bool:
    return any(map(is_array, jax.tree.leaves(model)))


def is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def take(array: Any, axis: int | None, items: Sequence[int]) -> Any:
    if axis is None:
        return array
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = np.asarray(array)  # NumPy takes rows without compiling.
    places = (slice(None),) * (axis % array.ndim)
    return array[(*places, np.asarray(items))]
