"""`gradaccum_jax.verify`: check that gradient accumulation gives correct results for a
given loss.
"""

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
    "the loss is divided by {steps}, although gradaccum already divides the gradient of"
    " a window of {steps} micro-batches. Most likely `loss / {steps}` is left over from"
    " the old loop. Each update is {steps} times too small: delete the division."
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
    """Check whether gradient accumulation gives correct results for a loss, and find
    the reason if it does not.

    JAX compiles `loss_fn` once for each micro-batch size. Do not call this function
    under `jax.jit`, because it reads values.

    If the loss draws random numbers, split one key into a key per item, and pass these
    keys in the batch. Then each item gets the same random numbers in every micro-batch,
    so its loss can be compared. With one key per micro-batch, an item gets different
    numbers in another micro-batch, and the report says that such a loss cannot be
    compared. Verify such a loss without dropout (``deterministic=True`` in flax).

    Args:
        params: the tree with respect to which the loss is differentiated.
        loss_fn: ``loss_fn(params, *batch)`` returns a floating scalar.
        batch: a tuple or list of the loss's other arguments, which are trees of arrays
            with the items along axis 0. Pass a few real items, at least `steps`. A
            dictionary is passed as one argument, or as keyword arguments if `loss_fn`
            accepts its keys.
        steps: the number of micro-batches that the batch is divided into, at least 2;
            by default 4, or the number of items if there are fewer.
        reduction: the reduction that you will accumulate with: "mean", "sum" or
            "sum_per_item".
        weight: the weight that you will accumulate with: a callable
            ``weight(*micro_batch)``, or an array with one number per item.
        axes: a tree prefix of `batch`. It contains the batch axis of an array; or None,
            if each micro-batch gets the whole array; or ``"key"`` for a micro-batch's
            random key.
        has_aux: True if `loss_fn` returns ``(loss, aux)``, as for `jax.grad`.

    Raises:
        ArgumentValueError: the arrays have different numbers of items, or `steps` or
            `weight` does not fit the batch.
    """
    loss, arguments = as_loss(loss_fn, batch)
    item_batch = Batch(arguments, axes, is_array, take)
    subject = JaxSubject(
        params, loss, item_batch, item_batch.weight_of(weight), has_aux
    )
    # NumPy's warnings are suppressed, because the report says which gradients are not
    # finite.
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
