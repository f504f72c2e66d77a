"""Checks for a softmax cross-entropy with its classes on several workers, shared by all backends."""

from __future__ import annotations

from collections.abc import Sequence

from gradaccum._validation import require_choice
from gradaccum.errors import ArgumentTypeError, ArgumentValueError, explain

LOSS_REDUCTIONS = ("mean", "sum", "none")


def require_loss_options(ignore_index: object, label_smoothing: object, reduction: object) -> None:
    """`ignore_index` is an int, `label_smoothing` a number in [0, 1], `reduction` one of "mean", "sum" and "none".

    Raises:
        ArgumentTypeError, ArgumentValueError: one of them is not.
    """
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise explain(ArgumentTypeError, "ignore_index", expected="an int", got=ignore_index, fix="Write ignore_index=-100.")
    is_number = isinstance(label_smoothing, (int, float)) and not isinstance(label_smoothing, bool)
    if not (is_number and isinstance(label_smoothing, (int, float)) and 0 <= label_smoothing <= 1):
        kind = ArgumentValueError if is_number else ArgumentTypeError
        raise explain(kind, "label_smoothing", expected="a number in [0, 1]", got=label_smoothing, fix="Write label_smoothing=0.1.")
    require_choice("reduction", reduction, LOSS_REDUCTIONS)


def require_shard_sizes(shard_sizes: object, own: int, rank: int, workers: int) -> tuple[int, ...]:
    """`shard_sizes` as a tuple with one entry for each worker, of which that of `rank` is `own`.

    Raises:
        ArgumentTypeError: it is no sequence of ints.
        ArgumentValueError: it has another length, a negative entry, or another entry for this worker.
    """
    fix = f"Pass how many classes each of the {workers} workers holds, by rank, or None."
    if not isinstance(shard_sizes, Sequence) or any(isinstance(size, bool) or not isinstance(size, int) for size in shard_sizes):
        raise explain(ArgumentTypeError, "shard_sizes", expected="a sequence of ints", got=shard_sizes, fix=fix)
    if len(shard_sizes) != workers or min(shard_sizes) < 0 or shard_sizes[rank] != own:
        expected = f"{workers} numbers of classes, of which that of rank {rank} is {own}, the last dimension of logits_shard"
        raise explain(ArgumentValueError, "shard_sizes", expected=expected, got=shard_sizes, fix=fix)
    return tuple(shard_sizes)


def require_classes(classes: int) -> int:
    """The number of all `classes`, over all workers.

    Raises:
        ArgumentValueError: it is 0.
    """
    if classes:
        return classes
    fix = "Only some of the workers may be without classes."
    raise explain(ArgumentValueError, "logits_shard", expected="one class at least on some worker", found="no class on any", fix=fix)
