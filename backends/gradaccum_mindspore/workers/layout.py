"""The checkpoints of an open window for another number of workers than saved them.

The first of the new workers gets the sum of all, and the others begin with nothing: the
end of the window adds up the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from gradaccum import CheckpointError, kit
from gradaccum.kit import FIELD_DTYPES, State, explain
from gradaccum_mindspore.extensions import LOSS
from gradaccum_mindspore.gradient_sum import (
    ARRAYS,
    Array,
    hidden_parameter,
    working_dtype,
)
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
    """Return what `workers` workers load to resume the open windows of others, whose
    number may differ.

    Args:
        states: the dict that `mindspore.load_checkpoint` returned of each worker's
            file, by rank: of a wrapped optimizer with ``data_parallel=True`` or of a
            cell that holds it; one such dict, of an optimizer without it, is right too.
        workers: the number of workers that load, >= 1.

    Returns:
        A dict for each of them, by rank, for `load_checkpoint_into`. The first holds
        the sum and the weight of all. What is no part of a window comes from the first
        of `states`.

    Raises:
        CheckpointError: one of them is missing, or they are not of one moment; a
            parameter's value differs between them, as shards do, which resume on as
            many workers alone.
    """
    new_states: list[dict[str, Entry]] = [dict(states[0]) for _ in range(workers)]
    for prefix in prefixes_in(states[0]):
        require_all_workers(states, prefix)
        redistribute_window(new_states, states, prefix)
    return new_states


def require_all_workers(states: Sequence[Checkpoint], prefix: str) -> None:
    """Raise unless these are states of all workers, by rank."""
    places = [saved_place(state, prefix) for state in states]
    if places != [(rank, len(states)) for rank in range(len(states))]:
        raise explain(
            CheckpointError,
            "states",
            expected="the states of all workers, by rank",
            found=", ".join(f"rank {rank} of {workers}" for rank, workers in places),
            fix="Pass what every worker saved, in the order of their ranks.",
        )


def redistribute_window(
    new_states: Sequence[dict[str, Entry]],
    saved_states: Sequence[Checkpoint],
    prefix: str,
) -> None:
    """Write the entries of one wrapped optimizer's window for each new worker."""
    first = saved_states[0]
    fields = [fields_of(state, prefix) for state in saved_states]
    if any(state.micro_step == INVALID for state in fields):
        raise kit.half_made_error()
    fullest = saved_states[
        fields.index(max(fields, key=lambda state: state.micro_step))
    ]
    event_name, terms_name, loss_name = (
        f"{prefix}.{name}" for name in ("last_event", "terms", LOSS)
    )
    last_loss = first[loss_name].asnumpy()[2]
    # In float64, as Python adds up the weights: equal if all losses are known.
    losses = sum(state[loss_name].asnumpy().astype(float) for state in saved_states)
    sums = sums_of(saved_states, prefix)
    for rank, state in enumerate(kit.redistributed(fields, len(new_states))):
        values: dict[str, object] = {
            f"{prefix}.{field}": value for field, value in state._asdict().items()
        }
        values[terms_name] = fullest[terms_name].asnumpy()
        values[loss_name] = [0.0, 0.0, last_loss]
        if rank == 0:
            values[loss_name] = [*losses[:2], last_loss]
        event = first[event_name].asnumpy().copy()
        if state.micro_step > 0:
            event[:GRAD_NORM] = 0
        values[event_name] = event
        for name, total in sums.items():
            values[name] = total if rank == 0 else np.zeros_like(total)
        entries = {name: Tensor(values[name], first[name].dtype) for name in values}
        entries[f"{prefix}.{WORKERS}"] = Tensor([rank, len(new_states)], ms.int32)
        for name, entry in entries.items():
            new_states[rank][name] = hidden_parameter(entry, name)


def fields_of(state: Checkpoint, prefix: str) -> State:
    return State(
        *(state[f"{prefix}.{field}"].asnumpy().item() for field in FIELD_DTYPES)
    )


def sums_of(saved_states: Sequence[Checkpoint], prefix: str) -> dict[str, Array]:
    """Return the sums of the sums; the parameters they belong to must be the same on
    every worker.
    """
    sum_suffix, master_suffix = suffixes(prefix)
    first = saved_states[0]
    sums: dict[str, Array] = {}
    for sum_name in [name for name in first if name.endswith(sum_suffix)]:
        name = sum_name.removesuffix(sum_suffix)
        for copied_name in (name, name + master_suffix):
            if copied_name in first:
                arrays = [array_of_entry(state[copied_name]) for state in saved_states]
                require_one_value(copied_name, arrays)
        arrays = [array_of_entry(state[sum_name]) for state in saved_states]
        sums[sum_name] = np.sum(arrays, axis=0)
    return sums


def require_one_value(name: str, arrays: Sequence[Array]) -> None:
    first = arrays[0]
    if not all(np.array_equal(first, array, equal_nan=True) for array in arrays):
        shapes = [array.shape for array in arrays]
        raise explain(
            CheckpointError,
            repr(name),
            expected="one value on every worker, as copies have",
            found=f"different ones, of the shapes {shapes}",
            fix="Shards (layerwise_parallel) resume on as many workers, each with its"
            " own file; copies: save between the same two updates.",
        )


def array_of_entry(entry: Entry) -> Array:
    """Return an entry as NumPy reads it; bfloat16, which NumPy has not, as float32."""
    work = working_dtype(entry.dtype)
    if entry.dtype not in ARRAYS:
        entry = entry.astype(work)
    array: Array = entry.asnumpy().astype(ARRAYS.get(work), copy=False)
    return array
