"""Convert the checkpoints of an open window, so that a different number of workers can
resume the window.

The first new worker gets the total of the gradient sums of all old workers, and the
other new workers begin with zeros. So the all-reduced sum at the end of the window is
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from gradaccum import CheckpointError, kit
from gradaccum.kit import FIELD_DTYPES, State
from gradaccum_mindspore.extensions import LOSS
from gradaccum_mindspore.gradient_sum import Array, hidden_parameter
from gradaccum_mindspore.saving import saved_place
from gradaccum_mindspore.state import (
    GRAD_NORM,
    INVALID,
    WORKERS,
    Checkpoint,
    prefixes_in,
    suffixes,
)

Entry: TypeAlias = Parameter | Tensor


def redistributed(states: Sequence[Checkpoint], workers: int) -> list[dict[str, Entry]]:
    """Convert checkpoints of open windows, saved by a different number of workers, so
    that `workers` workers can resume the windows.

    Args:
        states: the dicts that `mindspore.load_checkpoint` returned for the workers'
            files, in rank order. Each file is a checkpoint of a wrapped optimizer with
            ``data_parallel=True``, or of a cell that contains such an optimizer. A
            single checkpoint of an optimizer without ``data_parallel=True`` is accepted
            too.
        workers: the number of workers that will load the result, >= 1.

    Returns:
        One dict for each new worker, in rank order, to be loaded with
        `load_checkpoint_into`. The first dict contains the gradient sums and the weight
        of all workers. Values that are not part of a window are copied from the first
        dict in `states`.

    Raises:
        CheckpointError: a worker's state is missing; the states are not in rank order;
            the workers did not all save their states after the same update; or a
            parameter's value differs between the states. The values of a sharded
            parameter differ, so a window with sharded parameters can be resumed only on
            the same number of workers.
        UsageError: an exception left a saved window partially written.
    """
    new_states: list[dict[str, Entry]] = [dict(states[0]) for _ in range(workers)]
    for prefix in prefixes_in(states[0]):
        require_all_workers(states, prefix)
        redistribute_window(new_states, states, prefix)
    return new_states


def require_all_workers(states: Sequence[Checkpoint], prefix: str) -> None:
    """Raise unless `states` contains the state of every worker, in rank order."""
    places = [saved_place(state, prefix) for state in states]
    if places != [(rank, len(states)) for rank in range(len(states))]:
        raise CheckpointError(
            "states: expected one state per worker, in rank order; got states whose"
            f" (rank, number of workers) are {places}. Pass the states that the workers"
            " saved, in rank order."
        )


def redistribute_window(
    new_states: Sequence[dict[str, Entry]],
    saved_states: Sequence[Checkpoint],
    prefix: str,
) -> None:
    """Write the open window of one wrapped optimizer into the checkpoint of each new
    worker.
    """
    first = saved_states[0]
    fields = [fields_of(state, prefix) for state in saved_states]
    if any(state.micro_step == INVALID for state in fields):
        raise kit.half_made_error()
    fullest = max(fields, key=lambda state: state.micro_step)
    terms = saved_states[fields.index(fullest)][f"{prefix}.terms"].asnumpy()
    event = first[f"{prefix}.last_event"].asnumpy().copy()
    if fullest.micro_step > 0:
        event[:GRAD_NORM] = 0
    loss_name = f"{prefix}.{LOSS}"
    losses = sum_of(saved_states, loss_name)
    last_loss = first[loss_name].asnumpy()[2]
    sum_suffix, _ = suffixes(prefix)
    for name in first:
        if name + sum_suffix in first:
            require_one_value(saved_states, name)
    sums = {
        name: sum_of(saved_states, name) for name in first if name.endswith(sum_suffix)
    }
    for rank, state in enumerate(kit.redistributed(fields, len(new_states))):
        values: dict[str, object] = {
            f"{prefix}.{field}": value for field, value in state._asdict().items()
        }
        values[f"{prefix}.terms"] = terms
        values[f"{prefix}.last_event"] = event
        values[loss_name] = [0.0, 0.0, last_loss]
        if rank == 0:
            values[loss_name] = [*losses[:2], last_loss]
        for name, total in sums.items():
            values[name] = total if rank == 0 else np.zeros_like(total)
        entries = {name: Tensor(values[name], first[name].dtype) for name in values}
        entries[f"{prefix}.{WORKERS}"] = Tensor([rank, len(new_states)], ms.int32)
        for name, entry in entries.items():
            new_states[rank][name] = hidden_parameter(entry, name)


def require_one_value(states: Sequence[Checkpoint], name: str) -> None:
    arrays = [state[name].astype(ms.float64).asnumpy() for state in states]
    if not all(np.array_equal(arrays[0], each, equal_nan=True) for each in arrays):
        raise CheckpointError(
            f"{name}: expected the same value in the files of all workers; got"
            " different values. If the parameter is sharded, resume on the same number"
            " of workers, and have each worker load its own file. Otherwise, make sure"
            " that all workers save after the same update."
        )


def fields_of(state: Checkpoint, prefix: str) -> State:
    return State(
        *(state[f"{prefix}.{field}"].asnumpy().item() for field in FIELD_DTYPES)
    )


def sum_of(states: Sequence[Checkpoint], name: str) -> Array:
    """Return the sum over `states` of the entry called `name`. The sum is computed in
    float64, like the window's weight. One number in the entry `LOSS` is the total
    weight of the micro-batches that have a loss. If this total differed from the
    window's weight, the window's loss would be NaN (see `WindowLoss`).
    """
    total: Array = np.sum(
        [state[name].astype(ms.float64).asnumpy() for state in states], axis=0
    )
    return total
