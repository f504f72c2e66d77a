"""The checkpoints of an open window for another number of workers than saved them.

The first of the new workers gets the sum of all, and the others begin with nothing: the
end of the window adds up the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from gradaccum_mindspore.saving import REDISTRIBUTED, saved_place
from gradaccum_mindspore.state import (
    GRAD_NORM,
    THIS_WORKER,
    WORKERS,
    Checkpoint,
    prefixes_in,
    suffixes,
)

Entry: TypeAlias = Parameter | Tensor


def redistributed(
    states: Sequence[Checkpoint | None], workers: int
) -> list[dict[str, Entry]]:
    """Return what `workers` workers load to resume the open windows of others, whose
    number may differ.

    Args:
        states: the dict that `mindspore.load_checkpoint` returned of each worker's
            file, by rank: of a wrapped optimizer with ``data_parallel=True`` or of a
            cell that holds it; one such dict, of an optimizer without it, is right too.
            None stands for a worker that was lost: the window resumes without the
            micro-batches of that worker.
        workers: the number of workers that load, >= 1.

    Returns:
        A dict for each of them, by rank, for `load_checkpoint_into`. The first holds
        the sum and the weight of all. What is no part of a window comes from the first
        of `states`.

    Raises:
        ArgumentValueError: there is no state, or no worker.
        CheckpointError: they hold no wrapped optimizer; one of them is missing, or they
            are not of one moment; a parameter's value differs between them, as shards
            do, which resume on as many workers alone; a reduction failed before one of
            them was saved.
    """
    by_rank = {rank: state for rank, state in enumerate(states) if state is not None}
    saved_states = list(by_rank.values())
    if not saved_states:
        kit.redistributed([], workers)
    first = saved_states[0]
    prefixes = prefixes_in(first)
    if not prefixes:
        raise explain(
            CheckpointError,
            "states",
            expected="the states of a wrapped optimizer",
            found="none",
            fix="Save the whole optimizer: mindspore.save_checkpoint(optimizer, file).",
        )
    new_states: list[dict[str, Entry]] = [dict(first) for _ in range(max(workers, 0))]
    for prefix in prefixes:
        require_all_workers(by_rank, len(states), prefix)
        windows = redistributed_window(saved_states, prefix, workers)
        for new_state, entries in zip(new_states, windows, strict=True):
            for name, value in entries.items():
                new_state[name] = hidden_parameter(value, name)
    return new_states


def require_all_workers(
    by_rank: Mapping[int, Checkpoint], workers: int, prefix: str
) -> None:
    """Raise unless these are states of all workers, by rank."""
    places = [saved_place(state, prefix) for state in by_rank.values()]
    expected_places = [(rank, workers) for rank in by_rank]
    if [(place.rank, place.workers) for place in places] != expected_places:
        ranks = [f"rank {place.rank} of {place.workers}" for place in places]
        raise explain(
            CheckpointError,
            "states",
            expected="the states of all workers, by rank",
            found=", ".join(ranks),
            fix="Pass what every worker saved, in the order of their ranks, and None"
            " for a worker that was lost.",
        )


def redistributed_window(
    saved_states: Sequence[Checkpoint], prefix: str, workers: int
) -> list[dict[str, Tensor]]:
    """Return the entries of one wrapped optimizer's window for each new worker."""
    fields = [fields_of(state, prefix) for state in saved_states]
    first = saved_states[0]
    micro_steps = [state.micro_step for state in fields]
    fullest = saved_states[micro_steps.index(max(micro_steps))]
    totals = totals_of(saved_states, prefix)
    total_loss, weight_with_loss, last_loss = losses_of(saved_states, prefix)
    windows = []
    for rank, state in enumerate(kit.redistributed(fields, workers)):
        entries = {
            f"{prefix}.{field}": like(first, f"{prefix}.{field}", value)
            for field, value in state._asdict().items()
        }
        terms = f"{prefix}.terms"
        entries[terms] = like(fullest, terms, fullest[terms].asnumpy())
        event = first[f"{prefix}.last_event"].asnumpy().copy()
        if state.micro_step > 0:
            event[:GRAD_NORM] = 0
        entries[f"{prefix}.last_event"] = Tensor(event)
        losses = [0.0, 0.0, last_loss]
        if rank == 0:
            losses = [total_loss, weight_with_loss, last_loss]
        entries[f"{prefix}.{LOSS}"] = like(first, f"{prefix}.{LOSS}", np.array(losses))
        place = Tensor([THIS_WORKER, rank, workers], ms.int32)
        entries[f"{prefix}.{WORKERS}"] = place
        entries[f"{prefix}.{REDISTRIBUTED}"] = Tensor(True)
        for name, total in totals.items():
            zeros = Tensor(np.zeros(total.shape), total.dtype)
            entries[name] = total if rank == 0 else zeros
        windows.append(entries)
    return windows


def fields_of(state: Checkpoint, prefix: str) -> State:
    return State(
        *(state[f"{prefix}.{field}"].asnumpy().item() for field in FIELD_DTYPES)
    )


def losses_of(
    saved_states: Sequence[Checkpoint], prefix: str
) -> tuple[float, float, float]:
    """Return the sum of the losses of all workers, their weight, and the last window's
    loss.
    """
    parts = [state[f"{prefix}.{LOSS}"].asnumpy().tolist() for state in saved_states]
    # Python adds the weights up like this too: they are equal if all losses are known.
    total = sum(part[0] for part in parts)
    weight = sum(part[1] for part in parts)
    return total, weight, parts[0][2]


def totals_of(saved_states: Sequence[Checkpoint], prefix: str) -> dict[str, Tensor]:
    """Return the sums of the sums; the parameters they belong to must be the same on
    every worker.
    """
    sum_suffix, master_suffix = suffixes(prefix)
    first = saved_states[0]
    totals = {}
    for sum_name in [name for name in first if name.endswith(sum_suffix)]:
        name = sum_name.removesuffix(sum_suffix)
        for copied_name in (name, name + master_suffix):
            if copied_name in first:
                arrays = [array_of_entry(state[copied_name]) for state in saved_states]
                require_one_value(copied_name, arrays)
        total = array_of_entry(first[sum_name])
        for state in saved_states[1:]:
            total = total + array_of_entry(state[sum_name])
        totals[sum_name] = Tensor(total, first[sum_name].dtype)
    return totals


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


def like(state: Checkpoint, name: str, value: object) -> Tensor:
    return Tensor(value, state[name].dtype)
