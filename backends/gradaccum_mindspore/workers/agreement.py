"""Checks that run before several workers share their first window. They determine
whether this worker shares its windows, and verify that all workers have the same
options and the same parameters. The parameters must be the same, because the workers
exchange only gradients.

A parameter that the user marked as ``layerwise_parallel`` is a shard that belongs to
one worker, so its gradient sum is not sent to other workers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import count
from weakref import finalize

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import Options

PLAIN_MODES = ("stand_alone", "data_parallel")
"""The parallel modes in which MindSpore's compiler does not reduce gradients by itself.
"""


def workers_here() -> int:
    if GlobalComm.INITED:
        return int(get_group_size())
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def shares_windows(data_parallel: object) -> bool:
    """Return the option ``data_parallel`` as a bool. Raise if the option is
    incompatible with the number of workers or with MindSpore's parallel mode.
    """
    mode = ms.get_auto_parallel_context("parallel_mode")
    if data_parallel is None:
        is_unknown = mode == "data_parallel" and not GlobalComm.INITED
        if is_unknown or workers_here() > 1:
            raise UsageError(
                "data_parallel: expected True or False, because there may be several"
                f" workers; got {None!r} ({type(None).__name__}). Write"
                " gradaccum.wrap(optimizer, steps=4, data_parallel=True) if all workers"
                " share each window. Write data_parallel=False if this worker's"
                " gradients are not combined with other workers' gradients, or if you"
                " pass gradients that are already reduced."
            )
        return False
    if not data_parallel:
        return False
    if not GlobalComm.INITED:
        # Until communication is initialised, MindSpore treats this process as the only
        # worker.
        raise UsageError(
            "data_parallel: expected MindSpore's communication to be initialised in"
            " this process; got a process in which it is not initialised. Call"
            " mindspore.communication.init() first."
        )
    if mode not in PLAIN_MODES:
        raise UsageError(
            f"data_parallel: expected False in the parallel mode {mode}, because"
            " MindSpore itself reduces the gradients of each micro-batch in this mode;"
            " got True. Write data_parallel=False."
        )
    return True


def place() -> tuple[int, int]:
    """Return this worker's rank and the number of workers."""
    return int(get_rank()), int(get_group_size())


def require_same_everywhere(
    parameters: Sequence[Parameter], options: Options, name: str
) -> None:
    """Raise unless all workers that share an optimizer's windows have the same options
    and parameters. This is a collective operation, so all workers must wrap their
    optimizers in the same order.

    Raises:
        ArgumentValueError: the workers have different options or parameters. Every
            worker raises the error.
    """
    # Functions cannot be compared, because each worker has its own function object.
    steps = "a function" if callable(options.steps) else options.steps
    compared_options = f"{steps}, {options._replace(steps=None)}, {name}"
    descriptions = "".join(map(description_of, parameters))
    texts = {"options": compared_options, "parameters": descriptions}
    checksums = [zlib.crc32(text.encode()) >> 1 for text in texts.values()]
    all_checksums = ops.AllGather()(Tensor([checksums], ms.int32)).asnumpy()
    for argument, numbers in zip(texts, all_checksums.T, strict=True):
        if np.ptp(numbers) > 0:
            raise ArgumentValueError(
                f"{argument}: expected the same values on every worker; got different"
                f" checksums, in rank order: {numbers.tolist()}. Give every worker the"
                " same options and the same model: call mindspore.set_seed(1) before"
                " you build the model, or load the same checkpoint."
            )


def description_of(parameter: Parameter) -> str:
    if is_sharded(parameter):
        return f"{parameter.name!r}, {parameter.dtype}, sharded"
    wide = parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter
    checksum = zlib.crc32(wide.asnumpy().tobytes())
    shape = tuple(parameter.shape)
    return f"{parameter.name!r}, {parameter.dtype} of shape {shape}, {checksum}"


def places_of_shards(
    parameters: Sequence[Parameter], options: Options
) -> tuple[int, ...]:
    """Return the indices of the sharded parameters. Raise if there are sharded
    parameters and the `options` do not support them.
    """
    places = [place for place, each in enumerate(parameters) if is_sharded(each)]
    if places and options.reduction == "mean":
        raise ArgumentValueError(
            'reduction: expected "sum_per_item" or "sum" for parameters marked as'
            " layerwise_parallel, because the loss covers the items of all workers;"
            f" got {'mean'!r} ({str.__name__}). Make the loss a sum, and write"
            ' reduction="sum_per_item".'
        )
    if places and options.on_overflow == "drop_micro_batch":
        raise ArgumentValueError(
            "on_overflow: expected a policy other than 'drop_micro_batch' for"
            " parameters marked as layerwise_parallel, because one worker could drop"
            " its part of a micro-batch while the other workers keep their parts; got"
            " 'drop_micro_batch'. Leave on_overflow out."
        )
    return tuple(places)


MARKS = count(1)


def is_sharded(parameter: Parameter) -> bool:
    """True if the user, not `mark`, marked the Parameter as ``layerwise_parallel``."""
    is_marked_here = getattr(parameter, "shares_windows", 0)
    return bool(parameter.layerwise_parallel) and not is_marked_here


def mark(optimizer: nn.Cell, parameters: Sequence[Parameter]) -> None:
    """Mark the parameters that all workers share as ``layerwise_parallel`` for as long
    as `optimizer` is alive, because MindSpore's own reducer skips parameters with this
    mark. The attribute ``shares_windows`` of each marked parameter stores a number that
    identifies this call.
    """
    owner = next(MARKS)
    shared_parameters = [each for each in parameters if not is_sharded(each)]
    for parameter in shared_parameters:
        parameter.layerwise_parallel = True
        parameter.shares_windows = owner
    finalize(optimizer, unmark, shared_parameters, owner).atexit = False


def unmark(parameters: Sequence[Parameter], owner: int | None = None) -> None:
    """Remove the marks that `mark` has set on `parameters`. `owner` is the number of a
    call of `mark`. If `owner` is given, remove only the marks of that call, because a
    later call may have marked some of the parameters again for another optimizer.
    """
    for parameter in parameters:
        marked_by = getattr(parameter, "shares_windows", 0)
        if marked_by and owner in (None, marked_by):
            parameter.layerwise_parallel = False
            parameter.shares_windows = 0
