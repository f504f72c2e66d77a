"""Checks of the arguments of a call that several workers make together; in compiled code they run while it compiles.

They look at types, shapes and dtypes, and raise on the worker whose arguments are wrong; the others wait for it until the engine's timeout.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain

REDUCTIONS = ("mean", "sum", "none")
FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
INTEGERS = (ms.int64, ms.int32, ms.int16, ms.int8, ms.uint8)


def require_kinds(shape: tuple[int, ...], dtype: Any, labels_shape: tuple[int, ...], labels_dtype: Any) -> None:
    """Refuse anything but floating logits ``(*batch, own classes)`` and integer labels ``(*batch)``.

    Raises:
        ArgumentTypeError: one is of another kind of dtype.
        ArgumentValueError: their shapes do not belong together.
    """
    if dtype not in FLOATS:
        fix = "Pass what the last layer gives, before any softmax."
        raise explain(ArgumentTypeError, "logits_shard", expected="a floating dtype", found=f"{dtype}", fix=fix)
    if labels_dtype not in INTEGERS:
        fix = "Pass the number of each item's class. Probabilities of all classes are not supported."
        raise explain(ArgumentTypeError, "labels", expected="an integer dtype", found=f"{labels_dtype}", fix=fix)
    if len(shape) == 0 or tuple(labels_shape) != tuple(shape[:-1]):
        expected = "shape (*batch) for logits of shape (*batch, own classes)"
        found = f"shape {tuple(labels_shape)} for logits of shape {tuple(shape)}"
        fix = "Put the classes last: logits_shard.movedim(1, -1). Every worker passes the labels of all items."
        raise explain(ArgumentValueError, "labels", expected=expected, found=found, fix=fix)


def require_options(ignore_index: Any, label_smoothing: Any, reduction: Any) -> None:
    """Refuse an `ignore_index` that is no int, smoothing outside of [0, 1], and another reduction.

    Raises:
        ArgumentTypeError, ArgumentValueError: as named.
    """
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise explain(ArgumentTypeError, "ignore_index", expected="an int", got=ignore_index, fix="Write ignore_index=-100.")
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, (int, float)):
        fix = "Write label_smoothing=0.1."
        raise explain(ArgumentTypeError, "label_smoothing", expected="a number in [0, 1]", got=label_smoothing, fix=fix)
    if not 0 <= label_smoothing <= 1:
        fix = "Write label_smoothing=0.1."
        raise explain(ArgumentValueError, "label_smoothing", expected="a number in [0, 1]", got=label_smoothing, fix=fix)
    if reduction not in REDUCTIONS:
        kind = ArgumentValueError if isinstance(reduction, str) else ArgumentTypeError
        expected = "one of " + ", ".join(map(repr, REDUCTIONS))
        raise explain(kind, "reduction", expected=expected, got=reduction, fix="Write reduction='mean'.")


def require_group(group: Any) -> tuple[int, int]:
    """The rank of this process in `group`, and the number of processes in it: 0 and 1 without a group and without communication.

    Raises:
        ArgumentTypeError: `group` is no name.
        UsageError: communication is not initialised, or there is no such group.
    """
    if group is not None and not isinstance(group, str):
        fix = "Pass the name that mindspore.communication.create_group was given."
        raise explain(ArgumentTypeError, "group", expected="the name of a communication group, or None", got=group, fix=fix)
    if not GlobalComm.INITED:
        if group is None and int(os.environ.get("MS_WORKER_NUM", "1")) == 1:
            return 0, 1
        fix = "Call mindspore.communication.init() first."
        raise explain(UsageError, "group", expected="communication that is initialised", found="none in this process", fix=fix)
    try:
        name = group or GlobalComm.WORLD_COMM_GROUP
        return int(get_rank(name)), int(get_group_size(name))
    except (RuntimeError, ValueError) as error:
        fix = "Create it on its workers first: mindspore.communication.create_group(group, ranks)."
        raise explain(UsageError, "group", expected="a communication group of this worker", got=group, fix=fix) from error


def require_sizes(shard_sizes: Any, own: int, rank: int, workers: int) -> tuple[int, ...]:
    """`shard_sizes` as a tuple with one entry for each worker, of which this worker's is `own`.

    Raises:
        ArgumentTypeError: it is no sequence of ints.
        ArgumentValueError: it has another length, a negative entry, or another entry for this worker.
    """
    fix = f"Pass how many classes each of the {workers} workers holds, by rank, or None where all hold equally many."
    if not isinstance(shard_sizes, Sequence) or any(isinstance(size, bool) or not isinstance(size, int) for size in shard_sizes):
        raise explain(ArgumentTypeError, "shard_sizes", expected="a sequence of ints", got=shard_sizes, fix=fix)
    if len(shard_sizes) != workers or min(shard_sizes) < 0 or shard_sizes[rank] != own:
        expected = f"{workers} numbers of classes, of which that of rank {rank} is {own}, the last dimension of logits_shard"
        raise explain(ArgumentValueError, "shard_sizes", expected=expected, got=shard_sizes, fix=fix)
    return tuple(shard_sizes)


def require_classes(classes: int) -> int:
    """The number of all `classes`, on all workers together.

    Raises:
        ArgumentValueError: there is none.
    """
    if classes:
        return classes
    fix = "Only some of the workers may be without classes."
    raise explain(ArgumentValueError, "logits_shard", expected="one class at least on some worker", found="no class on any", fix=fix)


@constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
def placement(
    group: Any, shard_sizes: Any, options: tuple[Any, Any, Any], logits: tuple[Any, Any], labels: tuple[Any, Any]
) -> tuple[int, tuple[int, ...], Tensor, Tensor]:
    """What a call starts from, once all its arguments are found right.

    Returns:
        The number of this worker's first class; the number of classes of each worker; and, shape ``()``, the label's share of the
        target and that of every class: Tensors, because MindSpore rounds a Python number to float32 beside float64.
    """
    require_options(*options)
    require_kinds(*logits, *labels)
    rank, workers = require_group(group)
    own = int(logits[0][-1])
    sizes = (own,) * workers if shard_sizes is None else require_sizes(shard_sizes, own, rank, workers)
    smoothing = options[1]
    wide = ms.float64 if logits[1] == ms.float64 else ms.float32
    uniform = smoothing / require_classes(sum(sizes))
    return sum(sizes[:rank]), sizes, Tensor(1 - smoothing, wide), Tensor(uniform, wide)
