"""The agreement of workers that share windows, before the first one: who shares, and
that all wrap the same optimizer over the same parameters, because they exchange
gradients alone.

A parameter that the user marked as ``layerwise_parallel`` is each worker's own shard:
its sum is not sent.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from itertools import count, zip_longest
from weakref import finalize

import mindspore as ms
from mindspore import Parameter, nn
from mindspore.communication import GlobalComm, get_group_size, get_rank

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import Options, explain
from gradaccum_mindspore.workers.collectives import gather_texts

PLAIN_MODES = ("stand_alone", "data_parallel")
"""The parallel modes in which MindSpore's compiler does not reduce gradients by itself.
"""


def workers_here() -> int:
    if GlobalComm.INITED:
        return int(get_group_size())
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def shares_windows(data_parallel: object) -> bool:
    """Return the option ``data_parallel``, checked."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    if data_parallel is None:
        is_unknown = mode == "data_parallel" and not GlobalComm.INITED
        if is_unknown or workers_here() > 1:
            raise explain(
                UsageError,
                "data_parallel",
                expected="True or False where there are several workers",
                got=None,
                fix="Write gradaccum.wrap(optimizer, steps=4, data_parallel=True) for"
                " windows over all workers; False if this worker's gradients need no"
                " other's, or are reduced before they come in.",
            )
        return False
    if not data_parallel:
        return False
    if not GlobalComm.INITED:
        # MindSpore would take this process for the only one.
        raise explain(
            UsageError,
            "data_parallel",
            expected="communication that is initialised",
            found="none in this process",
            fix="Call mindspore.communication.init() first.",
        )
    if mode not in PLAIN_MODES:
        raise explain(
            UsageError,
            "data_parallel",
            expected=f"False in the mode {mode}, which reduces each micro-batch itself",
            got=True,
            fix="Write data_parallel=False.",
        )
    return True


def place() -> tuple[int, int]:
    """Return this worker's rank and the number of workers."""
    return int(get_rank()), int(get_group_size())


# Equal options and parameters.


def require_same_everywhere(
    parameters: Sequence[Parameter], options: Options, name: str
) -> None:
    """Raise unless the workers that share an optimizer's windows wrap the same.
    Collective, in one order.

    Raises:
        ArgumentValueError: on every worker: a worker's differ.
    """
    # Two workers' functions are different objects.
    compared_options = dict(
        options._asdict(),
        steps="a function" if callable(options.steps) else options.steps,
        accumulate_dtype=str(options.accumulate_dtype),
        name=name,
    )
    lines = [str(compared_options), *map(description_of, parameters)]
    texts = gather_texts(json.dumps(lines))
    lines_of_workers = [json.loads(text) for text in texts]
    for rank, lines in enumerate(lines_of_workers):
        pairs = zip_longest(lines_of_workers[0], lines, fillvalue="none")
        for place, (first_line, line) in enumerate(pairs):
            if line != first_line:
                raise explain(
                    ArgumentValueError,
                    "parameters" if place else "options",
                    expected=f"the same on every worker: {first_line}",
                    found=f"{line} on rank {rank}",
                    fix="Give every worker the same options and the same model: call"
                    " mindspore.set_seed(1) before it is built, or load one checkpoint.",
                )


def description_of(parameter: Parameter) -> str:
    if is_sharded(parameter):
        return f"{parameter.name!r}, {parameter.dtype}, sharded"
    wide = parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter
    checksum = zlib.crc32(wide.asnumpy().tobytes())
    shape = tuple(parameter.shape)
    return f"{parameter.name!r}, {parameter.dtype} of shape {shape}, {checksum:08x}"


def places_of_shards(
    parameters: Sequence[Parameter], options: Options
) -> tuple[int, ...]:
    """Return the positions of the sharded parameters."""
    places = [place for place, each in enumerate(parameters) if is_sharded(each)]
    if places:
        require_shardable(options)
    return tuple(places)


def require_shardable(options: Options) -> None:
    """Raise unless windows can have sharded parameters, whose loss is one of the items
    of all workers.
    """
    is_mean = options.reduction == "mean"
    if not is_mean and options.on_overflow != "drop_micro_batch":
        return
    argument = "reduction" if is_mean else "on_overflow"
    raise explain(
        ArgumentValueError,
        argument,
        expected='reduction="sum_per_item" or "sum" beside parameters marked as'
        " layerwise_parallel, and no micro-batch that one worker drops",
        found=repr(getattr(options, argument)),
        fix='Sum the loss, write reduction="sum_per_item", and leave on_overflow out.',
    )


# MindSpore's own reducer leaves alone what is marked as ``layerwise_parallel``: so are
# the shared parameters, for as long as their wrapped optimizer lives.


MARKS = count(1)


def is_sharded(parameter: Parameter) -> bool:
    """True if the user marked the Parameter as ``layerwise_parallel``."""
    is_marked_here = getattr(parameter, "shares_windows", 0)
    return bool(parameter.layerwise_parallel) and not is_marked_here


def mark(optimizer: nn.Cell, parameters: Sequence[Parameter]) -> None:
    """Mark the shared parameters for as long as `optimizer` lives."""
    owner = next(MARKS)
    shared_parameters = [each for each in parameters if not is_sharded(each)]
    for parameter in shared_parameters:
        parameter.layerwise_parallel = True
        parameter.shares_windows = owner
    finalize(optimizer, unmark, shared_parameters, owner).atexit = False


def unmark(parameters: Sequence[Parameter], owner: int | None = None) -> None:
    """Undo `mark`, or the mark of `owner` alone."""
    for parameter in parameters:
        marked_by = getattr(parameter, "shares_windows", 0)
        if marked_by and owner in (None, marked_by):
            parameter.layerwise_parallel = False
            parameter.shares_windows = 0
