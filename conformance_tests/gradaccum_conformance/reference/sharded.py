"""The reference's cross-entropy of logits that are sharded by class: every worker
gathers all of them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from gradaccum import ArgumentValueError
from gradaccum.kit import explain
from gradaccum_conformance import oracle
from gradaccum_conformance.harness import ShardedLossCall
from gradaccum_conformance.reference.workers import Workers
from gradaccum_conformance.specs import Array


def sharded_cross_entropy(
    workers: Workers, call: ShardedLossCall
) -> tuple[Array, Array]:
    """The loss, and its gradient by this worker's logits, in their dtype; bfloat16 as
    float32.
    """
    gathered = workers.gather((call.logits, call.labels))
    options = dict(call.options)
    reduction, ignored = (
        options.pop("reduction", "mean"),
        options.get("ignore_index", -100),
    )
    kept = call.labels != ignored
    _require_labels(call, [labels for _, labels in gathered], kept)
    logits = np.concatenate([own for own, _ in gathered], axis=-1)
    losses, gradients = oracle.item_losses(logits, call.labels, **options)
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / kept.sum()}[
            reduction
        ]
    first = sum(call.sizes[: workers.rank])
    share = call.upstream / max(kept.sum(), 1) if reduction == "mean" else call.upstream
    gradient = (gradients * np.broadcast_to(share, kept.shape)[..., None])[
        ..., first : first + call.sizes[workers.rank]
    ]
    if call.dtype == "bfloat16":
        gradient = gradient.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.asarray(
        loss, np.float64 if call.dtype == "float64" else np.float32
    ), gradient.astype(_DTYPES.get(call.dtype, np.float32))


_DTYPES = {"float64": np.float64, "float16": np.float16}


def _require_labels(call: ShardedLossCall, everyones: list[Array], kept: Array) -> None:
    classes = sum(call.sizes)
    if call.labels.dtype.kind != "i" or call.labels.shape != call.logits.shape[:-1]:
        found, fix = (
            f"{call.labels.dtype} of shape {call.labels.shape}",
            "Pass the number of each item's class.",
        )
        raise explain(
            ArgumentValueError,
            "labels",
            expected="an int for each item",
            found=found,
            fix=fix,
        )
    if any(
        labels.shape != kept.shape or (labels != everyones[0]).any()
        for labels in everyones
    ):
        fix = "Gather the items of all workers first."
        raise explain(
            ArgumentValueError,
            "labels",
            expected="the same labels on every worker",
            found="labels that differ",
            fix=fix,
        )
    if ((everyones[0] < 0) | (everyones[0] >= classes))[kept].any():
        fix = "Number the classes over all workers."
        raise explain(
            ArgumentValueError,
            "labels",
            expected=f"classes in [0, {classes})",
            found="another label",
            fix=fix,
        )
