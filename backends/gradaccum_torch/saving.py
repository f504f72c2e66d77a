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
- ``parameters``: shape and dtype of each, to refuse another model's state;
- ``sums``: the partial sum by the index of its parameter, only while a window is open;
- ``loss`` and ``window_loss``: what the open window's losses add up to, and the loss of
  the last closed one;
- ``masters``: the float32 master of each half-precision parameter by its index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gradaccum import CheckpointError, kit
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
FIX = (
    "Load a state that was saved from this model, with accumulate_dtype= and"
    " master_weights= as they are now."
)


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
    masters = window.masters.by_index()
    entry: Entry = {
        "format": kit.FORMAT,
        **state._asdict(),
        "grad_norm": window.last_event[3],
        "terms": {**terms._asdict(), "steps": encode_size(terms.steps)},
        "worker": list(window.workers.place),
        "parameters": describe(window.masters),
        "sums": window.saved_sums(),
        "masters": {index: master.detach() for index, master in masters.items()},
    }
    for index, total in entry["sums"].items():
        # A part of a sharded buffer is copied without storage, which `torch.save`
        # needs.
        if is_sharded(total) and total.storage_offset():
            entry["sums"][index] = total.clone()
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
        kit.require_format(entry["format"])
        require_same_model(entry, window)
        state = resumed_state(entry, window)
    has_dynamic_scale = bool(entry) and entry["terms"]["scale"] == "dynamic"
    if window.scaler is not None and not (state.micro_step or has_dynamic_scale):
        # The scaler is the user's, and may have been loaded from a file of its own.
        state = window.scaler.with_scale(state)
    bare_state = {name: value for name, value in state_dict.items() if name != KEY}
    # torch casts what it loads to the dtype of the parameter in the groups.
    with window.masters.in_place():
        window.masters.inner.load_state_dict(bare_state)
    window.masters.load(entry.get("masters", {}))
    window.restore(state, entry.get("sums", {}), entry)


def state_in(entry: Entry) -> State:
    return State(*[entry[name] for name in State._fields])


def resumed_state(entry: Entry, window: Window) -> State:
    """Return the state to resume with; refuse an open window of other options or of
    another worker.
    """
    state = state_in(entry)
    place = window.workers.place
    saved_place = entry.get("worker")
    # The sum of an open window is a part of that of all workers.
    if state.micro_step and saved_place and tuple(saved_place) != place:
        raise checkpoint_error(
            "worker",
            "the open window of rank {} of {}".format(*place),
            "that of rank {} of {}".format(*saved_place),
            "Load what this rank saved, or gradaccum_torch.redistributed(state_dicts,"
            " workers)[rank] from what all ranks saved.",
        )
    return kit.resumed(state, decode_terms(entry["terms"]), window.options)


def encode_size(steps: Any) -> int | None:
    """Return a window's size as a number; a weight that ends it is negative."""
    size: Any = kit.code_of(steps) if isinstance(steps, UntilWeight) else steps
    return None if size is None else int(size)


def decode_terms(saved_terms: Mapping[str, Any]) -> Terms:
    steps = saved_terms["steps"]
    if steps is not None and steps < 0:
        steps = UntilWeight(-steps)
    return Terms(**{**saved_terms, "steps": steps})


def describe(masters: MasterWeights) -> list[list[Any]]:
    """Return the shape and the dtype of each parameter."""
    return [
        [list(parameter.shape), str(parameter.dtype)]
        for parameter in masters.parameters()
    ]


def checkpoint_error(
    argument: str, expected: str, found: str, fix: str = FIX
) -> CheckpointError:
    return CheckpointError(f"{argument}: expected {expected}; got {found}. {fix}")


def require_same_model(entry: Entry, window: Window) -> None:
    """Raise unless the entry is of the same parameters, dtypes of sums and masters."""
    # Some checkpoints have the name of each parameter, too.
    for parameter, saved_parameter in zip_longest(
        describe(window.masters), entry["parameters"], fillvalue=list[Any]()
    ):
        if parameter != saved_parameter[:2]:
            raise checkpoint_error("parameters", f"{parameter}", f"{saved_parameter}")
    for index, total in entry["sums"].items():
        dtype = window.sum_dtypes[index]
        if total.dtype != dtype:
            raise checkpoint_error("accumulate_dtype", f"{dtype}", f"{total.dtype}")
    masters = sorted(window.masters.by_index())
    saved_masters = sorted(entry.get("masters", {}))
    if masters != saved_masters:
        raise checkpoint_error("master_weights", f"{masters}", f"{saved_masters}")


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
        CheckpointError: they are not of one moment, or not those of all ranks, or the
            sums are sharded.
    """
    entries = [state_dict[KEY] for state_dict in state_dicts]
    for entry in entries:
        kit.require_format(entry["format"])
        if any(map(is_sharded, entry["sums"].values())):
            raise checkpoint_error(
                "sums",
                "the complete sums of each worker",
                "sharded sums",
                "Save between two windows by torch.distributed.checkpoint, which"
                " reshards the state.",
            )
    states = kit.redistributed([state_in(entry) for entry in entries], workers)
    # An empty window has no size of its own.
    open_entries = [entry for entry in entries if entry["micro_step"]]
    terms = (open_entries or entries)[0]["terms"]
    if open_entries:
        places = [list(entry.get("worker") or (0, 1)) for entry in entries]
        require_all_ranks(places)
    common_entry = {**entries[0], "terms": terms, "sums": {}, "loss": 0.0}
    new_entries = [
        {**common_entry, **state._asdict(), "worker": [rank, workers]}
        for rank, state in enumerate(states)
    ]
    new_entries[0]["sums"] = add_up([entry["sums"] for entry in entries])
    new_entries[0]["loss"] = sum(entry["loss"] for entry in entries)
    return [{**state_dicts[0], KEY: entry} for entry in new_entries]


def require_all_ranks(places: Sequence[list[int]]) -> None:
    if sorted(places) != [[rank, len(places)] for rank in range(len(places))]:
        raise checkpoint_error(
            "state_dicts",
            f"those of all {places[0][1]} ranks, once each",
            f"those of the ranks {[rank for rank, _ in places]}",
            "Save opt.state_dict() on every worker of an optimizer that was wrapped"
            " with module=, in a file of its own.",
        )


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
