"""`gradaccum_jax.verify`: a check whether accumulation is right for a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import VerificationReport
from gradaccum.kit import (
    as_loss,
    examine,
    require_bool,
    require_item_weights,
    require_weight,
)
from gradaccum_jax.arrays import Array, Params, Tree
from gradaccum_jax.verification.batch import Batch, make_batch, make_parameters
from gradaccum_jax.verification.subject import JaxSubject, Weight


def verify(
    params: Params,
    loss_fn: Callable[..., Any],
    batch: Tree,
    steps: int | None = None,
    *,
    reduction: str = "mean",
    weight: object = None,
    axes: Tree = 0,
    has_aux: bool = False,
) -> VerificationReport:
    """Check whether gradient accumulation is right for a loss, and if not, why.

    JAX traces `loss_fn` once per size of a micro-batch; nothing is changed. Not for use
    under `jax.jit`: it looks at values.

    Args:
        params: the tree that the loss is differentiated by.
        loss_fn: ``loss_fn(params, *batch)`` returns a floating scalar. A criterion of
            outputs is refused: parameters cannot be called.
        batch: a tuple of the loss's other arguments, trees of arrays with the items
            along axis 0: a few real items, at least `steps`. One tree alone is the only
            argument, or a dictionary of arguments by name. Random keys belong in it
            too: each item gets the numbers of the large batch.
        steps: micro-batches that the batch is divided into, at least 2; by default 4,
            or as many as there are items.
        reduction: how accumulation will add up: "mean", "sum" or "sum_per_item".
        weight: as accumulation will have it: a callable ``weight(*micro_batch)``, or an
            array with one number per item.
        axes: a prefix of the tree of `batch`: the axis of items, None for what is
            passed whole, ``"key"`` for a random key.
        has_aux: `loss_fn` returns ``(loss, aux)``, as for `jax.grad`.

    Raises:
        ArgumentTypeError: `params` has no floating array, or another argument has the
            wrong type.
        ArgumentValueError: the loss is no scalar, leaves have unequal numbers of items,
            or an argument has a value that makes no sense.
    """
    loss, arguments = as_loss(
        loss_fn, params, batch if isinstance(batch, tuple) else (batch,), None
    )
    require_bool("has_aux", has_aux)
    parameters = make_parameters(params)
    checked = make_batch(arguments, axes)
    # Gradients that are not finite are told in the report.
    with np.errstate(all="ignore"):
        return examine(
            JaxSubject(
                loss, parameters, checked, _make_weight(weight, checked), has_aux
            ),
            steps,
            reduction,
        )


def verifies(model: object) -> bool:
    leaves = jax.tree.leaves(model)
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)


def _make_weight(weight: Any, batch: Batch) -> Weight | None:
    if weight is None:
        return None
    if callable(weight):
        return lambda part: _number(weight(*batch.whole(batch.part(part, None))))
    each = require_item_weights(weight, batch.items)
    return lambda part: math.fsum(each[item] for item in part)


def _number(weight: Array) -> float:
    return require_weight(weight if jnp.ndim(weight) else np.asarray(weight).item())
