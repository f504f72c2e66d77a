"""The checkpoints of an open window for another number of workers than saved them.

The first of the new workers gets the sum of all, and the others begin with nothing: the
end of the window adds up the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from gradaccum import ArgumentTypeError, CheckpointError
from gradaccum.kit import FIELD_DTYPES, State, explain
from gradaccum.kit import redistributed as redistributed_fields
from gradaccum_mindspore.extensions import LOSS
from gradaccum_mindspore.gradient_sum import (
    ARRAYS,
    Array,
    hidden_parameter,
    working_dtype,
)
from gradaccum_mindspore.saving import REDISTRIBUTED, saved_place
from gradaccum_mindspore.state import (
    ALL_WORKERS,
    GRAD_NORM,
    THIS_WORKER,
    WORKERS,
    Saved,
    prefixes_in,
    suffixes,
)

Entry: TypeAlias = Parameter | Tensor


def redistributed(
    states: Sequence[Saved | None], workers: int
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
        ArgumentTypeError: `states` are not dicts.
        ArgumentValueError: there is no state, or no worker.
        CheckpointError: they hold no wrapped optimizer; one of them is missing, or they
            are not of one moment; a parameter's value differs between them, as shards
            do, which resume on as many workers alone; a reduction failed before one of
            them was saved.
    """
    if isinstance(states, Mapping) or not all(
        state is None or isinstance(state, Mapping) for state in states
    ):
        found = f"an object of type {type(states).__name__}"
        fix = (
            "Write redistributed([mindspore.load_checkpoint(file) for file in files],"
            " workers)."
        )
        raise explain(
            ArgumentTypeError,
            "states",
            expected="a list of dicts by name, one for each worker",
            found=found,
            fix=fix,
        )
    held = {rank: state for rank, state in enumerate(states) if state is not None}
    left = list(held.values())
    prefixes = prefixes_in(left[0]) if left else ()
    if left and not prefixes:
        found, fix = (
            "none",
            "Save the whole optimizer: mindspore.save_checkpoint(optimizer, file).",
        )
        raise explain(
            CheckpointError,
            "states",
            expected="the states of a wrapped optimizer",
            found=found,
            fix=fix,
        )
    changed: list[dict[str, Tensor]] = [{} for _ in range(max(workers, 0))]
    for prefix in prefixes or ("gradaccum",):
        _require_all_workers(held, len(states), prefix)
        for rank, entries in enumerate(_window(left, prefix, workers)):
            changed[rank].update(entries)
    first = dict(left[0])
    return [
        {
            **first,
            **{name: hidden_parameter(value, name) for name, value in entries.items()},
        }
        for entries in changed
    ]


def _window(
    states: Sequence[Saved], prefix: str, workers: int
) -> Iterator[dict[str, Tensor]]:
    fields = [_fields(state, prefix) for state in states]
    if states and saved_place(states[0], prefix).owner == ALL_WORKERS:
        # Each holds the whole window: the first one's counts.
        fields[1:] = [each._replace(weight=0.0, overflow=False) for each in fields[1:]]
        states = [states[0]]
    new = redistributed_fields(fields, workers)
    most = states[max(range(len(states)), key=lambda index: fields[index].micro_step)]
    totals = dict(_totals(states, prefix))
    for rank, state in enumerate(new):
        entries = {
            f"{prefix}.{field}": _like(states[0], f"{prefix}.{field}", value)
            for field, value in state._asdict().items()
        }
        entries[f"{prefix}.terms"] = _like(
            most, f"{prefix}.terms", most[f"{prefix}.terms"].asnumpy()
        )
        entries[f"{prefix}.last_event"] = _event(
            states[0], prefix, is_open=state.micro_step > 0
        )
        losses = _losses(states, prefix, first=rank == 0)
        entries[f"{prefix}.{LOSS}"] = _like(states[0], f"{prefix}.{LOSS}", losses)
        entries[f"{prefix}.{WORKERS}"], entries[f"{prefix}.{REDISTRIBUTED}"] = (
            Tensor([THIS_WORKER, rank, workers], ms.int32),
            Tensor(True),
        )
        entries.update(
            (name, total if rank == 0 else Tensor(np.zeros(total.shape), total.dtype))
            for name, total in totals.items()
        )
        yield entries


def _require_all_workers(states: Mapping[int, Saved], total: int, prefix: str) -> None:
    places = [saved_place(state, prefix) for state in states.values()]
    if [place[1:] for place in places] != [(rank, total) for rank in states]:
        found = ", ".join(f"rank {place.rank} of {place.workers}" for place in places)
        fix = (
            "Pass what every worker saved, in the order of their ranks, and None for a"
            " worker that was lost."
        )
        raise explain(
            CheckpointError,
            "states",
            expected="the states of all workers, by rank",
            found=found,
            fix=fix,
        )
    if len({place.owner for place in places}) > 1:
        fix = "Load what the workers saved between the same two updates."
        raise explain(
            CheckpointError,
            "states",
            expected="states of one moment",
            found="some from a window's end",
            fix=fix,
        )


def _fields(state: Saved, prefix: str) -> State:
    return State(
        *(state[f"{prefix}.{field}"].asnumpy().item() for field in FIELD_DTYPES)
    )


def _totals(states: Sequence[Saved], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Return the sums of the sums; the parameters they belong to must be the same on
    every worker.
    """
    sum_suffix, master_suffix = suffixes(prefix)
    for name in [name for name in states[0] if name.endswith(sum_suffix)]:
        own = name.removesuffix(sum_suffix)
        for twin in (own, own + master_suffix):
            if twin in states[0]:
                _require_one_value(twin, [_array(state[twin]) for state in states])
        total = _array(states[0][name])
        for other in states[1:]:
            total = total + _array(other[name])
        yield name, Tensor(total, states[0][name].dtype)


def _require_one_value(name: str, arrays: Sequence[Array]) -> None:
    if not all(np.array_equal(arrays[0], other, equal_nan=True) for other in arrays):
        expected, found = (
            "one value on every worker, as copies have",
            f"different ones, of the shapes {[each.shape for each in arrays]}",
        )
        fix = (
            "Shards (layerwise_parallel) resume on as many workers, each with its own"
            " file; copies: save between the same two updates."
        )
        raise explain(
            CheckpointError, repr(name), expected=expected, found=found, fix=fix
        )


def _array(entry: Entry) -> Array:
    work = working_dtype(entry.dtype)
    array: Array = (
        (entry if entry.dtype in ARRAYS else entry.astype(work))
        .asnumpy()
        .astype(ARRAYS.get(work), copy=False)
    )
    return array


def _like(state: Saved, name: str, value: object) -> Tensor:
    return Tensor(value, state[name].dtype)


def _losses(states: Sequence[Saved], prefix: str, *, first: bool) -> Array:
    """Return the losses of a new worker: the first one has those of all."""
    parts = [state[f"{prefix}.{LOSS}"].asnumpy().astype(np.float64) for state in states]
    *_, last = parts[0]
    # Python adds the weights up like this too: they are equal if all losses were told.
    total, told = (
        sum(float(part[index]) if first else 0.0 for part in parts) for index in (0, 1)
    )
    return np.array([total, told, last])


def _event(state: Saved, prefix: str, *, is_open: bool) -> Tensor:
    event = state[f"{prefix}.last_event"].asnumpy().copy()
    if is_open:
        event[:GRAD_NORM] = 0
    return Tensor(event)
