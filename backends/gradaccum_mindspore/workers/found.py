"""Decides whether a window is that of several workers, and that they can share it: as many as `mindspore.communication` has.

Whoever starts several workers has to say what a window is. Without ``data_parallel=`` each would update its own copy of the model, and
nothing would say so. Workers that share windows must start with equal options and equal parameters: they exchange no more than gradients.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence

import mindspore as ms
from mindspore import Parameter
from mindspore.communication import GlobalComm, get_group_size, get_rank

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Options, explain
from gradaccum_mindspore.workers.exchange import NoAnswerError, gather_texts

INIT = "Call mindspore.communication.init() first, in a program that msrun started."
OWN_MODES = ("stand_alone", "data_parallel")
"""The parallel modes in which MindSpore's compiler does not reduce gradients by itself."""


def shares_windows(data_parallel: object) -> bool:
    """The option ``data_parallel``, checked: whether the windows are those of all workers.

    Raises:
        ArgumentTypeError: it is neither a bool nor None.
        UsageError: it is None where there are several workers; or True where there are none, or where MindSpore shards by itself.
    """
    mode = ms.get_auto_parallel_context("parallel_mode")
    if data_parallel is None:
        if mode == "data_parallel" or _workers_here() > 1:
            expected = "True or False where there are several workers"
            fix = (
                "Write gradaccum.wrap(optimizer, steps=4, data_parallel=True) for windows over all workers; False if this worker's "
                "gradients need no other's, or are reduced before they come in."
            )
            raise explain(UsageError, "data_parallel", expected=expected, got=None, fix=fix)
        return False
    if not isinstance(data_parallel, bool):
        raise explain(
            ArgumentTypeError, "data_parallel", expected="True, False or None", got=data_parallel, fix="Write data_parallel=True."
        )
    if data_parallel and not GlobalComm.INITED:
        raise explain(UsageError, "data_parallel", expected="communication that is initialised", found="none in this process", fix=INIT)
    if data_parallel and mode not in OWN_MODES:
        expected, fix = f"False in the parallel mode {mode}", "MindSpore reduces the gradients in every micro-batch there: leave it False."
        raise explain(UsageError, "data_parallel", expected=expected, got=True, fix=fix)
    return data_parallel


def place() -> tuple[int, int]:
    """The rank of this worker, and the number of all."""
    return int(get_rank()), int(get_group_size())


def share(parameters: Sequence[Parameter], options: Options, name: str) -> None:
    """Let this worker share the windows of an optimizer of `parameters`. Collective: all workers call it, in the same order.

    `mindspore.nn.TrainOneStepCell` gets a reducer in MindSpore's data parallel mode, which would reduce every micro-batch. It leaves
    Parameters alone that are marked as ``layerwise_parallel``, and so they are.

    Raises:
        ArgumentValueError: on every worker: a worker's differ.
    """
    # Two workers' functions and scalers are different objects.
    steps = "a function" if callable(options.steps) else options.steps
    mine = dict(options._asdict(), steps=steps, scaler=type(options.scaler).__name__, accumulate_dtype=str(options.accumulate_dtype))
    text = json.dumps([str(dict(mine, name=name)), *map(_spec, parameters), *map(_values, parameters)])
    try:
        texts = gather_texts(text)
    except NoAnswerError as error:
        expected, found = "every worker to wrap its optimizer too", "an exchange that failed or timed out"
        fix = "Wrap on every worker, in the same order."
        raise explain(UsageError, "gradaccum.wrap", expected=expected, found=found, fix=fix) from error
    everyone = [json.loads(text) for text in texts]
    _require_equal([each[:1] for each in everyone], "options", "Give every worker the same options.")
    fix = "Build the same model with the same optimizer on every worker."
    _require_equal([each[1 : len(each) // 2 + 1] for each in everyone], "parameters", fix)
    fix = "Call mindspore.set_seed(1) before the model is built, or load one checkpoint on every worker."
    _require_equal([each[len(each) // 2 + 1 :] for each in everyone], "parameters", fix)
    for parameter in parameters:
        parameter.layerwise_parallel = True
        parameter.shares_windows = True


def part(parameters: Sequence[Parameter]) -> None:
    """Undo `share` for parameters that go on in windows of this worker's own: MindSpore's reducer may reduce them again."""
    for parameter in parameters:
        if getattr(parameter, "shares_windows", False):
            parameter.layerwise_parallel = parameter.shares_windows = False


def _require_equal(everyone: Sequence[Sequence[str]], argument: str, fix: str) -> None:
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            first = next((pair for pair in zip(everyone[0], other, strict=False) if pair[0] != pair[1]), (len(everyone[0]), len(other)))
            expected, found = f"the same on every worker: {first[0]}", f"{first[1]} on rank {rank}"
            raise explain(ArgumentValueError, argument, expected=expected, found=found, fix=fix)


def _spec(parameter: Parameter) -> str:
    return f"{parameter.name!r}, {parameter.dtype} of shape {tuple(parameter.shape)}"


def _values(parameter: Parameter) -> str:
    wide = parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter
    return f"{parameter.name!r} with the checksum {zlib.crc32(wide.asnumpy().tobytes()):08x}"


def _workers_here() -> int:
    return int(get_group_size()) if GlobalComm.INITED else int(os.environ.get("MS_WORKER_NUM", "1"))
