"""An open window in a state for `torch.distributed.checkpoint`: the sum of each parameter beside the inner optimizer's tensors of it.

torch calls these by the parameter's name and shards them, so that another number of workers can load them. It fills tensors that exist, and
whether there is a sum changes from step to step. So a state that is to be filled has room only where the user has asked for it.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import CheckpointError
from gradaccum.kit import State, explain
from gradaccum_torch.entry import Entry, StateDict
from gradaccum_torch.masters import Parameters
from gradaccum_torch.torch_private import initialize_state, is_sharded, mesh_of, placements_of
from gradaccum_torch.workers import Workers
from gradaccum_torch.workers.workers import Shares

SUM = "gradaccum_sum"
_NOTES = "open_window"
"""`Notes` as JSON: torch takes lists and mappings apart, and wants as many items in the state that it fills."""


class Notes(NamedTuple):
    """What tells the tensors of an open window apart."""

    shares: Sequence[Any] = ()
    """`Shares`, in order."""
    present: Sequence[int] = ()
    """The positions of the parameters that have a sum; the others have zeros."""
    stateless: Sequence[int] = ()
    """The positions of those that the inner optimizer has no state of, as in its first window. torch wants one of each."""


def put(
    state_dict: StateDict,
    entry: Entry,
    *,
    inner: torch.optim.Optimizer,
    parameters: Parameters,
    sum_dtypes: Sequence[torch.dtype],
    workers: Workers,
) -> None:
    """Put the sums of `entry` into `state_dict`, zeros where there is none, and beside the entry what tells them apart; collective."""
    shares = workers.shares(State(*(entry[name] for name in State._fields)), entry["loss"])
    entry[_NOTES] = json.dumps(Notes(shares, sorted(entry["sums"]), _fill(state_dict, inner, parameters)))
    for index, (parameter, dtype) in enumerate(zip(parameters.positions(), sum_dtypes, strict=True)):
        total = entry["sums"].get(index)
        if parameter.requires_grad or total is not None:
            zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False) if total is None else total
            state_dict["state"].setdefault(index, {})[SUM] = zeros


def take(sums: dict[int, Tensor], entry: Entry, parameters: Parameters, workers: Workers) -> Entry:
    """`entry` with its sums, which torch has filled, and this worker's weight.

    Raises:
        CheckpointError: the window was open, and the state had no room for its sum.
    """
    rest, notes = {name: value for name, value in entry.items() if name != _NOTES}, notes_of(entry)
    if not entry["micro_step"]:
        return {**rest, "sums": {}}
    if not notes.shares or not sums.keys() >= set(notes.present):
        raise _no_room_error()
    shares = Shares(*notes.shares)
    weight, loss, factors = workers.own(shares)
    positions = parameters.positions()
    held = {index: _as_split(sums[index], positions[index]) for index in notes.present}
    if any(factor != 1 for factor in factors):
        held = {index: total * factors[index] for index, total in held.items()}
    return {**rest, "weight": weight, "loss": loss, "overflow": shares.overflow, "sums": held}


def notes_of(entry: Entry) -> Notes:
    """Those that `put` left in `entry`."""
    return Notes(*json.loads(entry[_NOTES])) if _NOTES in entry else Notes()


def _fill(state_dict: StateDict, inner: torch.optim.Optimizer, parameters: Parameters) -> list[int]:
    """Give each trainable parameter without state the state of an optimizer that has made a step of nothing; returns which."""
    held = state_dict["state"]
    stateless = [index for index, each in enumerate(parameters.positions()) if each.requires_grad and index not in held]
    if stateless:
        blank = _blank_state(inner, parameters)
        held.update((index, blank[index]) for index in stateless if index in blank)
    return stateless


def _blank_state(inner: torch.optim.Optimizer, parameters: Parameters) -> dict[int, Any]:
    """What torch would make, without a change of `inner` and of the gradients."""
    with parameters.masters_in_place():
        own = [parameter for group in inner.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in own]
        twin = copy.copy(inner)
        twin.state, twin.param_groups = defaultdict(dict), [dict(group) for group in inner.param_groups]
        try:
            for parameter in own:
                parameter.grad = None
            initialize_state(twin)
            blank: dict[int, Any] = twin.state_dict()["state"]
        finally:
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
    return blank


def _as_split(total: Tensor, parameter: Tensor) -> Tensor:
    """`total` split over the processes as the parameter is, where torch gives it whole to each."""
    if is_sharded(parameter) and not is_sharded(total):
        from torch.distributed.tensor import distribute_tensor  # Its import takes longer than all of this package.

        return distribute_tensor(total, mesh_of(parameter), placements_of(parameter), src_data_rank=None)
    return total


def _no_room_error() -> CheckpointError:
    return explain(
        CheckpointError,
        "sums",
        expected="a state with the sum of its open window",
        found="none: the state that torch filled had no room for it",
        fix="Call opt.expect_open_window() before get_optimizer_state_dict() makes the state that is to be filled.",
    )
