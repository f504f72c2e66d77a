"""Saving and loading, in mid-window too: the resumed run is bitwise the uninterrupted
one.

The wrapper's entry sits under one key beside the inner optimizer's own, and torch
ignores it when a bare optimizer loads the state. It has plain numbers, lists and tensors
only, so that ``torch.load(weights_only=True)`` reads it:

- ``format``: `gradaccum.kit.FORMAT`, the number of what these entries mean;
- the seven fields of `gradaccum.kit.State`, and ``grad_norm``;
- ``terms``: `gradaccum.kit.Terms` as a mapping, the options that an open window depends
  on; a size by weight is a negative number;
- ``worker``: the rank that saved it and the number of workers, as the sum of each is a
  part of that of all;
- ``parameters``: shape, dtype and name of each, to refuse another model's state;
- ``sums``: the partial sum by the index of its parameter, only while a window is open;
- ``loss`` and ``window_loss``: what the open window's losses add up to, and the loss of
  the last closed one;
- ``masters``: the float32 master of each half-precision parameter by its index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, CheckpointError, kit
from gradaccum.kit import State, Terms, UntilWeight
from gradaccum_torch.master_weights import MasterWeights
from gradaccum_torch.torch_private.names import is_sharded
from gradaccum_torch.window import Window

StateDict = dict[str, Any]
"""A saved state as torch has it: ``"state"`` by the index of a parameter,
``"param_groups"`` and what an optimizer adds to them.
"""
Entry = dict[str, Any]
"""The wrapper's part of a ``state_dict``, under `KEY`."""

KEY = "gradaccum"
FIX = "Load a state that was saved from this model and optimizer."
ENTRIES = [
    "format",
    *State._fields,
    "grad_norm",
    "terms",
    "parameters",
    "sums",
    "loss",
    "window_loss",
]


def save(window: Window) -> StateDict:
    """Return the inner optimizer's ``state_dict`` with the window's entry; the tensors
    are the live ones.
    """
    window.require_savable()
    return {**window.masters.inner.state_dict(), KEY: entry_of(window)}


def entry_of(window: Window) -> Entry:
    state = window.current_state()
    # Between two windows the schedule, which may have come to its end, is not asked.
    size = window.size if state.micro_step else None
    terms = kit.terms_of(window.options._replace(steps=size), state.optimizer_step)
    place = window.workers.place
    entry: Entry = {
        "format": kit.FORMAT,
        **state._asdict(),
        "grad_norm": window.last_event[3],
        "terms": {**terms._asdict(), "steps": encode_size(terms.steps)},
        "worker": None if place is None else list(place),
        "parameters": describe(window.masters),
        # A part of a sharded buffer is copied without storage, which `torch.save`
        # needs.
        "sums": {
            index: total.clone()
            if is_sharded(total) and total.storage_offset()
            else total
            for index, total in window.saved_sums().items()
        },
        "masters": {
            index: master.detach()
            for index, master in window.masters.by_index().items()
        },
    }
    for extension in window.extensions:
        entry |= extension.state_dict()
    return entry


def load(window: Window, state_dict: StateDict) -> None:
    """Restore what `save` returned; a bare optimizer's state is an empty window.

    Raises:
        CheckpointError: the state is of other parameters, or of an open window under
            other options; nothing was changed.
    """
    if KEY not in state_dict:
        state = kit.initial_state(window.options.scale_rule.init_scale)
        entry = {}
    else:
        entry = state_dict[KEY]
        require_entries(entry)
        require_same_model(entry, window)
        state = resumed(entry, window)
    has_dynamic_scale = bool(entry) and entry["terms"]["scale"] == "dynamic"
    if window.scaler is not None and not (state.micro_step or has_dynamic_scale):
        # The scaler is the user's, and may have been loaded from a file of its own.
        state = window.scaler.with_scale(state)
    bare_state = {name: value for name, value in state_dict.items() if name != KEY}
    load_inner(window.masters, bare_state)
    window.masters.load(entry.get("masters", {}))
    window.restore(state, entry.get("sums", {}), entry)


def load_entry(window: Window, entry: Entry) -> None:
    """Restore the window alone, of a copied optimizer."""
    state = State(*(entry[name] for name in State._fields))
    window.restore(state, entry["sums"], entry)


def load_inner(masters: MasterWeights, state_dict: StateDict) -> None:
    try:
        # torch casts what it loads to the dtype of the parameter in the groups.
        with masters.in_place():
            masters.inner.load_state_dict(state_dict)
    except (ValueError, KeyError) as error:
        raise refused(
            "state_dict", "a state of these parameter groups", f"one where {error}"
        ) from error


def resumed(entry: Entry, window: Window) -> State:
    """Return the state to resume with; refuse an open window of other options or of
    another worker.
    """
    state = State(*(entry[name] for name in State._fields))
    place = window.workers.place
    saved_place = entry.get("worker")
    # The sum of an open window is a part of that of all workers.
    if not (state.micro_step and saved_place and place):
        pass
    elif tuple(saved_place) != place:
        raise refused(
            "worker",
            "the open window of a worker, that of rank {} of {}".format(*place),
            "that of rank {} of {}".format(*saved_place),
            "Load what this rank saved, or gradaccum_torch.redistributed(state_dicts,"
            " workers)[rank] from what all ranks saved.",
        )
    return kit.resumed(state, decode_terms(entry["terms"]), window.options)


def encode_size(steps: Any) -> int | None:
    """Return a window's size as a number; a weight that ends it is negative."""
    size: Any = kit.code_of(steps) if isinstance(steps, UntilWeight) else steps
    return None if size is None else int(size)


def decode_terms(saved: Mapping[str, Any]) -> Terms:
    steps = saved["steps"]
    if steps is not None and steps < 0:
        steps = UntilWeight(-steps)
    return Terms(**{**saved, "steps": steps})


def describe(masters: MasterWeights) -> list[list[Any]]:
    """Return shape, dtype and name (None without names) of each parameter."""
    descriptions: list[list[Any]] = []
    for group in masters.groups():
        names = group.get("param_names") or [None] * len(group["params"])
        for parameter, name in zip(group["params"], names, strict=True):
            shape = list(parameter.shape)
            descriptions.append([shape, str(parameter.dtype), name])
    return descriptions


# Refusals.


def refused(
    argument: str, expected: str, found: str, fix: str = FIX
) -> CheckpointError:
    return kit.explain(
        CheckpointError, argument, expected=expected, found=found, fix=fix
    )


def require_entries(entry: Any) -> None:
    missing = ENTRIES
    if isinstance(entry, Mapping):
        missing = [name for name in ENTRIES if name not in entry]
    if missing:
        raise refused(KEY, f"the entries {ENTRIES}", f"a state without {missing}")
    kit.require_format(entry["format"])


def require_same_model(entry: Entry, window: Window) -> None:
    """Raise unless the entry is of the same parameters, sums and masters."""
    saved = entry["parameters"]
    descriptions = describe(window.masters)
    if len(saved) != len(descriptions):
        raise refused(
            "parameters",
            f"{len(descriptions)} parameters",
            f"a state of {len(saved)}",
        )
    for index, (theirs, ours) in enumerate(zip(saved, descriptions, strict=True)):
        has_names = theirs[2] is not None and ours[2] is not None
        length = 3 if has_names else 2
        if list(theirs)[:length] != ours[:length]:
            raise refused(
                f"parameter {index}", show(*ours), f"a state of {show(*theirs)}"
            )
    for index, total in entry["sums"].items():
        require_sum(index, total, window)
    saved_masters = marks_of(entry.get("masters", {}))
    masters = marks_of(window.masters.by_index())
    if saved_masters != masters:
        raise refused(
            "masters",
            f"float32 master weights of {len(masters)} parameters",
            f"a state with those of {len(saved_masters)}",
            "Wrap the optimizer with the master_weights= it was saved with.",
        )


def require_sum(index: int, total: Tensor, window: Window) -> None:
    parameters = window.masters.parameters()
    is_known = 0 <= index < len(parameters)
    if (
        not is_known
        or total.shape != parameters[index].shape
        or total.dtype != window.sum_dtypes[index]
    ):
        raise refused(
            f"sums[{index}]",
            "a partial sum with the shape of its parameter and the dtype that this"
            " optimizer accumulates in",
            f"a tensor of shape {tuple(total.shape)} and dtype {total.dtype}",
            "Wrap the optimizer with the accumulate_dtype= it was saved with.",
        )


def marks_of(masters: Mapping[int, Tensor]) -> dict[int, tuple[Any, Any]]:
    return {index: (each.shape, each.dtype) for index, each in masters.items()}


def show(shape: Sequence[int], dtype: str, name: str | None) -> str:
    return f"{name or 'a parameter'} of shape {tuple(shape)} and {dtype}"


# An open window that some workers saved, resumed by another number of workers: the
# window's end adds up the sums of all workers, so any split of their total gives the
# same window. The first worker gets it all.


def redistributed(state_dicts: Sequence[StateDict], workers: int) -> list[StateDict]:
    """Return the state dicts with which `workers` workers resume what others saved, in
    mid-window too; tensors are shared.

    The first worker gets the sum of the sums, in their dtype, and the weight of all;
    the others hold nothing of the window. All have the micro-batches of the worker that
    had most, so that their windows end together.

    Each worker loads its own:
    ``opt.load_state_dict(gradaccum_torch.redistributed(state_dicts,
    world_size)[rank])``.

    Args:
        state_dicts: what ``opt.state_dict()`` returned on every worker, by rank, from
            optimizers wrapped with ``module=``.
        workers: the number of workers that resume, >= 1.

    Raises:
        ArgumentTypeError: `state_dicts` are no state dicts, or `workers` is no int.
        ArgumentValueError: there is no state dict, or no worker.
        CheckpointError: they are not of one moment, of one model or under the same
            options, or an entry is missing; names the entry. Or the sums are sharded.
    """
    entries = [complete_entry(state_dict) for state_dict in state_dicts]
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise kit.explain(
            ArgumentTypeError,
            "workers",
            expected="the number of workers",
            got=workers,
            fix="Pass the new world size.",
        )
    saved_states = [
        State(*(entry[name] for name in State._fields)) for entry in entries
    ]
    states = kit.redistributed(saved_states, workers)
    require_one_run(state_dicts, entries)
    require_all_ranks(entries)
    # An empty window has no size of its own.
    terms = max(entries, key=lambda entry: bool(entry["micro_step"]))["terms"]
    shared = {**entries[0], "terms": terms, "sums": {}, "loss": 0.0}
    new_entries = [
        {**shared, **state._asdict(), "worker": [rank, workers]}
        for rank, state in enumerate(states)
    ]
    new_entries[0]["sums"] = add_up([entry["sums"] for entry in entries])
    new_entries[0]["loss"] = sum(entry["loss"] for entry in entries)
    return [{**state_dicts[0], KEY: entry} for entry in new_entries]


def complete_entry(state_dict: StateDict) -> Entry:
    if not isinstance(state_dict, Mapping):
        raise kit.explain(
            ArgumentTypeError,
            "state_dicts",
            expected="one state dict per worker that saved",
            got=state_dict,
            fix="Pass a list of what opt.state_dict() gave on each worker.",
        )
    entry: Entry = state_dict.get(KEY, {})
    require_entries(entry)
    if any(map(is_sharded, entry["sums"].values())):
        raise refused(
            "sums",
            "the whole sums of each worker",
            "sharded ones",
            "Save between two windows by torch.distributed.checkpoint, which reshards"
            " the state.",
        )
    return entry


def require_one_run(state_dicts: Sequence[StateDict], entries: Sequence[Entry]) -> None:
    for name in ("parameters", "masters"):
        require_one(name, [entry[name] for entry in entries])
    for name in ("reduction", "on_overflow", "scale"):
        require_one(name, [entry["terms"][name] for entry in entries])
    open_entries = [entry for entry in entries if entry["micro_step"]]
    require_one("steps", [entry["terms"]["steps"] for entry in open_entries])
    for name in ("param_groups", "state"):
        require_one(name, [state_dict[name] for state_dict in state_dicts])


def require_all_ranks(entries: Sequence[Entry]) -> None:
    places = sorted(list(entry.get("worker") or (0, 1)) for entry in entries)
    is_open = any(entry["micro_step"] for entry in entries)
    if is_open and places != [[rank, len(entries)] for rank in range(len(entries))]:
        raise refused(
            "state_dicts",
            f"those of all {places[0][1]} ranks, once each",
            f"those of the ranks {[rank for rank, _ in places]}",
            "Save opt.state_dict() on every worker of an optimizer that was wrapped"
            " with module=, in a file of its own.",
        )


def require_one(name: str, values: Sequence[Any]) -> None:
    for rank, value in enumerate(values):
        if not is_same(value, values[0]):
            raise refused(
                name,
                "one value on every worker",
                f"another one in state dict {rank}",
                "Load what the workers of one run saved between the same two updates.",
            )


def is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.allclose(one, other.to(one.device), rtol=0, atol=0, equal_nan=True)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(
            is_same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@torch.no_grad()
def add_up(sums: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    totals: dict[int, Tensor] = {}
    for worker_sums in sums:
        for index, total in worker_sums.items():
            if index in totals:
                totals[index].add_(total.to(totals[index].device))
            else:
                totals[index] = total.clone()
    return dict(sorted(totals.items()))
