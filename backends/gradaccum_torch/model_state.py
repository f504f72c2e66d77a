"""A state for `torch.distributed.checkpoint.state_dict`, which keeps ``"state"`` and ``"param_groups"`` and drops the rest.

So the wrapper's entry travels in the first group. The masters travel beside the inner optimizer's tensors of their parameters, which torch
calls by name and shards. A window's sum does not fit: torch loads such a checkpoint into tensors that must exist before, and whether there
is a sum changes from step to step. So an open window is refused.
"""

from __future__ import annotations

from itertools import chain

from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.entry import KEY, StateDict, describe
from gradaccum_torch.masters import Parameters
from gradaccum_torch.torch_private import LocalVariables

MASTER = "gradaccum_master"


def spread(state_dict: StateDict, parameters: Parameters, caller: LocalVariables) -> StateDict:
    """`state_dict` in that form, for torch's function with the local variables `caller`.

    Raises:
        UsageError: a window is open, or the state is to be flattened, which drops the entries of a group that torch does not know.
    """
    entry = state_dict.pop(KEY)
    if entry["micro_step"]:
        found, fix = "an open window", "Call opt.flush() or opt.discard() first, or save opt.state_dict() itself, which holds the window."
        raise _left_out_error("to be called between two windows", found, fix)
    if getattr(caller.get("info"), "flatten_optimizer_state_dict", False):
        raise _left_out_error("flatten_optimizer_state_dict=False", "True, which drops the state of the window", "Leave it out.")
    masters = entry["masters"]
    for index, parameter in enumerate(parameters.positions() if masters else ()):
        # A parameter that is its own master gets an entry too: torch wants a state for each, and the inner optimizer may have none.
        state_dict["state"].setdefault(index, {})[MASTER] = masters.get(index, parameter.detach())
    state_dict["param_groups"][0][KEY] = {name: value for name, value in entry.items() if name not in ("parameters", "sums", "masters")}
    return state_dict


def gather(state_dict: StateDict, parameters: Parameters) -> StateDict:
    """`state_dict` in the form in which the wrapper saves it; it may be in that form already."""
    groups = state_dict.get("param_groups", ())
    if KEY in state_dict or not groups or KEY not in groups[0]:
        return state_dict
    state = {name: dict(entries) for name, entries in state_dict["state"].items()}
    found = ((index, state.get(name, {}).pop(MASTER, None)) for index, name in enumerate(chain(*(group["params"] for group in groups))))
    masters = {index: master for index, master in found if isinstance(master, Tensor) and index in parameters.masters()}
    return {
        **state_dict,
        "state": {name: entries for name, entries in state.items() if entries},
        "param_groups": [{name: value for name, value in group.items() if name != KEY} for group in groups],
        KEY: {**groups[0][KEY], "parameters": describe(parameters.groups()), "sums": {}, "masters": masters},
    }


def _left_out_error(expected: str, found: str, fix: str) -> UsageError:
    """The error for a state of which torch would leave out a part."""
    return explain(UsageError, "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict", expected=expected, found=found, fix=fix)
