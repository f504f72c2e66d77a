"""An open window that some workers saved goes on with another number of workers.

The window's end adds up the sums of all workers, so any split of their total gives the same window. The first worker to go on gets it
all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, CheckpointError
from gradaccum.kit import Noise, State, explain, forget_window
from gradaccum.kit import redistributed as redistributed_fields
from gradaccum_torch.entry import KEY, Entry, StateDict, require_entries
from gradaccum_torch.torch_private import is_sharded

_OTHER_RUN = "Load what the workers of one run saved between the same two updates."


def redistributed(state_dicts: Sequence[StateDict], workers: int) -> list[StateDict]:
    """The state dicts with which `workers` workers go on, from those that others saved, in mid-window too.

    The first worker gets the sum of the sums, in their dtype, and the weight of all; the others hold nothing of the window. All have the
    micro-batches of the worker that had most, so that their windows end together.

    Each worker loads its own: ``opt.load_state_dict(gradaccum_torch.redistributed(state_dicts, world_size)[rank])``. The model is loaded
    beside it, and a `torch.amp.GradScaler`'s own state where it is saved; that of any worker will do.

    Args:
        state_dicts: what ``opt.state_dict()`` gave on every worker that saved, in the order of their ranks, from optimizers that were
            wrapped with ``module=``. They are not changed.
        workers: the number of workers to go on, >= 1; it may be the same.

    Returns:
        One state dict per worker. They share the tensors that all workers have alike, such as the inner optimizer's state.

    Raises:
        ArgumentTypeError: `state_dicts` are no state dicts, or `workers` is no int.
        ArgumentValueError: there is no state dict, or no worker.
        CheckpointError: they are not of one moment, of one model or under the same options, or an entry is missing; names the entry. Or the
            sums are sharded, which `torch.distributed.checkpoint` loads on another number of workers.
    """
    entries = [_entry_of(state_dict) for state_dict in state_dicts]
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise explain(ArgumentTypeError, "workers", expected="the number of workers", got=workers, fix="Pass the new world size.")
    states = [State(*(entry[name] for name in State._fields)) for entry in entries]
    fields = redistributed_fields(states, workers)
    _require_one_run(state_dicts, entries)
    _require_all_ranks(entries)
    # An empty window has no size of its own.
    terms = max(entries, key=lambda entry: bool(entry["micro_step"]))["terms"]
    shared = {**entries[0], "terms": terms, "sums": {}, **_known(entries, False)}
    first, *others = [{**shared, **own._asdict(), "worker": [rank, workers]} for rank, own in enumerate(fields)]
    everything = {"sums": _added([entry["sums"] for entry in entries]), **_known(entries, True)}
    return [{**state_dicts[0], KEY: entry} for entry in (first | everything, *others)]


def _known(entries: Sequence[Entry], everything: bool) -> Entry:
    """What the worker that gets `everything` of the open window goes on with, or any other one, besides the sums and the weight."""
    known: Entry = {"loss": sum(entry["loss"] for entry in entries) if everything else 0.0}
    if noises := [entry["noise"] for entry in entries if "noise" in entry]:
        known["noise"] = list(forget_window(Noise(*noises[0])))
    return known


def _entry_of(state_dict: StateDict) -> Entry:
    if not isinstance(state_dict, Mapping):
        fix = "Pass a list of what opt.state_dict() gave on each worker."
        raise explain(ArgumentTypeError, "state_dicts", expected="one state dict per worker that saved", got=state_dict, fix=fix)
    entry: Entry = state_dict.get(KEY, {})
    require_entries(entry)
    if any(map(is_sharded, entry["sums"].values())):
        fix = "Save and load opt.state_dict() by torch.distributed.checkpoint, which reshards it."
        raise explain(CheckpointError, "sums", expected="the whole sums of each worker", found="sharded ones", fix=fix)
    return entry


def _require_one_run(state_dicts: Sequence[StateDict], entries: Sequence[Entry]) -> None:
    """All workers make the same updates of the same parameters, so that their optimizers' states are the same to the last bit."""
    opened = [entry for entry in entries if entry["micro_step"]]
    for name in ("parameters", "masters"):
        _require_one(name, [entry[name] for entry in entries])
    for name in ("reduction", "on_overflow", "scale"):
        _require_one(name, [entry["terms"][name] for entry in entries])
    _require_one("steps", [entry["terms"]["steps"] for entry in opened])
    for name in ("param_groups", "state"):
        _require_one(name, [state_dict[name] for state_dict in state_dicts])


def _require_all_ranks(entries: Sequence[Entry]) -> None:
    """Each worker's open window is there, once."""
    places = sorted(list(entry.get("worker") or (0, 1)) for entry in entries)
    if any(entry["micro_step"] for entry in entries) and places != [[rank, len(entries)] for rank in range(len(entries))]:
        expected, found = f"those of all {places[0][1]} ranks, once each", f"those of the ranks {[rank for rank, _ in places]}"
        fix = "Save opt.state_dict() on every worker of an optimizer that was wrapped with module=, in a file of its own."
        raise explain(CheckpointError, "state_dicts", expected=expected, found=found, fix=fix)


def _require_one(name: str, values: Sequence[Any]) -> None:
    for rank, value in enumerate(values):
        if not _same(value, values[0]):
            raise explain(
                CheckpointError, name, expected="one value on every worker", found=f"another one in state dict {rank}", fix=_OTHER_RUN
            )


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _same_numbers(one, other.to(one.device))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


@torch.no_grad()
def _added(sums: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """The sum of each parameter over the workers that hold one, in order of rank."""
    added: dict[int, Tensor] = {}
    for own in sums:
        for index, total in own.items():
            added[index] = total.clone() if index not in added else added[index].add_(total.to(added[index].device))
    return dict(sorted(added.items()))
