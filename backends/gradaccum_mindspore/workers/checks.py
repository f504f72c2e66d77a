"""Checks of the arguments of a call that several workers make together; in compiled code they run while it compiles.

They look at types, shapes and dtypes, and raise on the worker whose arguments are wrong; the others wait for it until the engine's timeout.
"""

from __future__ import annotations

import os
from typing import Any

import mindspore as ms
from mindspore import Tensor
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain, require_classes, require_loss_options, require_shard_sizes

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


@constexpr  # type: ignore[untyped-decorator]
def refuse_compiled_flush() -> None:
    """Raise `UsageError`: compiled code cannot wait until all workers flush."""
    expected = "a call from Python where workers share their windows, as it ends windows until all workers have called it"
    raise explain(
        UsageError, "flush()", expected=expected, found="one in compiled code", fix="Call optimizer.flush() after the compiled step."
    )


@constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
def placement(
    group: Any, shard_sizes: Any, options: tuple[Any, Any, Any], logits: tuple[Any, Any], labels: tuple[Any, Any]
) -> tuple[int, tuple[int, ...], Tensor, Tensor]:
    """The numbers that a call starts from, once all its arguments are right.

    Returns:
        The number of this worker's first class; the number of classes of each worker; and, shape ``()``, the label's share of the
        target and that of every class: Tensors, because MindSpore rounds a Python number to float32 beside float64.
    """
    require_loss_options(*options)
    require_kinds(*logits, *labels)
    rank, workers = require_group(group)
    own = int(logits[0][-1])
    sizes = (own,) * workers if shard_sizes is None else require_shard_sizes(shard_sizes, own, rank, workers)
    smoothing = options[1]
    wide = ms.float64 if logits[1] == ms.float64 else ms.float32
    uniform = smoothing / require_classes(sum(sizes))
    return sum(sizes[:rank]), sizes, Tensor(1 - smoothing, wide), Tensor(uniform, wide)
