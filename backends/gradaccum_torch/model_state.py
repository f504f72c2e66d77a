"""A state for `torch.distributed.checkpoint.state_dict`, which keeps ``"state"`` and ``"param_groups"`` and drops the rest.

So the wrapper's entry travels in the first group. The masters and the sums of an open window travel beside the inner optimizer's tensors of
their parameters, which torch calls by name and shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.entry import KEY, Entry, StateDict, describe
from gradaccum_torch.masters import Parameters
from gradaccum_torch.open_window import SUM, notes_of, take
from gradaccum_torch.torch_private import LocalVariables
from gradaccum_torch.workers import Workers

MASTER = "gradaccum_master"
_MEASURED = "grad_norm"
_TOGETHER = (_MEASURED, "loss", "window_loss", "noise")
"""One text has all of these: torch loads no state without an entry that it looks for, and ``noise`` is there with ``noise_scale=`` only."""
_ELSEWHERE = ("parameters", "sums", "masters", "worker", "loss", "window_loss", "noise")
"""Parts of the entry that are not saved in the first group. No worker's own sum is saved so, and other workers may load it."""


def spread(
    state_dict: StateDict, parameters: Parameters, caller: LocalVariables, put_sums: Callable[[StateDict, Entry], None] | None
) -> StateDict:
    """`state_dict` in that form, for torch's function with the local variables `caller`; `put_sums` where a window is open.

    Raises:
        UsageError: the state is to be flattened, which drops the entries of a group that torch does not know.
    """
    entry = state_dict.pop(KEY)
    # torch puts the inner optimizer's own mappings into a state dict.
    state_dict["state"] = {index: dict(entries) for index, entries in state_dict["state"].items()}
    if getattr(caller.get("info"), "flatten_optimizer_state_dict", False):
        raise _left_out_error("flatten_optimizer_state_dict=False", "True, which drops the state of the window", "Leave it out.")
    if put_sums is not None:
        put_sums(state_dict, entry)
    masters = entry["masters"]
    for index, parameter in enumerate(parameters.positions() if masters else ()):
        # A parameter that is its own master gets an entry too: torch wants a state for each, and the inner optimizer may have none.
        state_dict["state"].setdefault(index, {})[MASTER] = masters.get(index, parameter.detach())
    rest = {name: value for name, value in entry.items() if name not in _ELSEWHERE}
    state_dict["param_groups"][0][KEY] = {**rest, _MEASURED: json.dumps([entry.get(name) for name in _TOGETHER])}
    return state_dict


def gather(state_dict: StateDict, parameters: Parameters, workers: Workers) -> StateDict:
    """`state_dict` in the form in which the wrapper saves it; it may be in that form already.

    Raises:
        CheckpointError, UsageError: as `take`.
    """
    groups = state_dict.get("param_groups", ())
    if KEY in state_dict or not groups or KEY not in groups[0]:
        return state_dict
    state = {name: dict(entries) for name, entries in state_dict["state"].items()}
    names = list(chain(*(group["params"] for group in groups)))
    masters, sums = (_taken_out(state, names, key) for key in (MASTER, SUM))
    for index in notes_of(groups[0][KEY]).stateless:
        state.pop(names[index], None)
    own = parameters.masters()
    entry = take(sums, _apart(groups[0][KEY]), parameters, workers)
    return {
        **state_dict,
        "state": {name: entries for name, entries in state.items() if entries},
        "param_groups": [{name: value for name, value in group.items() if name != KEY} for group in groups],
        KEY: {
            **entry,
            "parameters": describe(parameters.groups()),
            "masters": {index: master for index, master in masters.items() if index in own},
        },
    }


def _apart(entry: Entry) -> Entry:
    """`entry` with its measurements apart."""
    found = zip(_TOGETHER, json.loads(entry[_MEASURED]), strict=True)
    return {**entry, **{name: value for name, value in found if value is not None}}


def _taken_out(state: dict[Any, dict[str, Any]], names: Sequence[Any], key: str) -> dict[int, Tensor]:
    """The tensors under `key` of each parameter's entries, by position."""
    found = ((index, state.get(name, {}).pop(key, None)) for index, name in enumerate(names))
    return {index: tensor for index, tensor in found if isinstance(tensor, Tensor)}


def _left_out_error(expected: str, found: str, fix: str) -> UsageError:
    """The error for a state of which torch would leave out a part."""
    return explain(UsageError, "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict", expected=expected, found=found, fix=fix)
