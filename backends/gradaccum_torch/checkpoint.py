"""Saving and loading, in mid-window too: the resumed run is bitwise the uninterrupted one.

The wrapper's entry in a ``state_dict`` is `gradaccum_torch.entry`'s; how `torch.distributed.checkpoint` wants it is `model_state`'s.
"""

from __future__ import annotations

from functools import partial

import torch

from gradaccum import CheckpointError
from gradaccum.kit import explain, initial_state
from gradaccum_torch.entry import KEY, Saved, StateDict, decode, encode
from gradaccum_torch.masters import Parameters
from gradaccum_torch.model_state import gather, spread
from gradaccum_torch.open_window import put
from gradaccum_torch.torch_private import LocalVariables
from gradaccum_torch.window import Window
from gradaccum_torch.workers import Workers

_BARE = Saved(initial_state(), None, 0.0, {}, {})
"""What a bare optimizer's state says of a window."""


class Loads:
    """What a wrapped optimizer was told about saved states.

    It is one object that is changed, not attributes that are set: Lightning and Fabric put proxies in the optimizer's place, whose methods
    are the optimizer's, and what those set on ``self`` stays on the proxy.
    """

    def __init__(self) -> None:
        self.expects_open_window = False
        """The next state to load was saved in mid-window; see ``expect_open_window``."""
        self.pair = 0, 0
        """How often a saved state was loaded, and the updates that the last one had."""

    def note(self, updates: int) -> None:
        """A state with this many updates was loaded."""
        self.expects_open_window, self.pair = False, (self.pair[0] + 1, updates)


def save(
    window: Window, parameters: Parameters, inner: torch.optim.Optimizer, workers: Workers, caller: LocalVariables | None, *, room: bool
) -> StateDict:
    """The state of `inner` with the window's entry beside it; the tensors are the live ones.

    Args:
        window: the window.
        parameters: those of `inner`.
        inner: the inner optimizer.
        workers: those that share the window.
        caller: the local variables of torch's checkpoint function, if that asks.
        room: torch's function is to make room for the sum of a window, open or not.

    Raises:
        UsageError: a micro-batch of the open window is under way, or something changed ``.grad``; or torch's checkpoint function asks, and
            would drop a part.
    """
    saved = window.saved()
    state_dict = inner.state_dict()
    state_dict[KEY] = encode(saved, parameters.groups())
    if caller is None:
        return state_dict
    put_sums = partial(put, inner=inner, parameters=parameters, sum_dtypes=window.sum_dtypes, workers=workers)
    return spread(state_dict, parameters, caller, put_sums if room or saved.fields.micro_step else None)


def load(state_dict: StateDict, window: Window, parameters: Parameters, inner: torch.optim.Optimizer, workers: Workers) -> None:
    """Restore what `save` gave; a bare optimizer's state is an empty window.

    Raises:
        CheckpointError: the state is of other parameters, or of an open window under other options; nothing was changed.
    """
    state_dict = gather(state_dict, parameters, workers)
    saved = decode(state_dict[KEY], parameters, window.sum_dtypes) if KEY in state_dict else _BARE
    saved = saved._replace(fields=window.resumed(saved))
    _load_inner({key: value for key, value in state_dict.items() if key != KEY}, parameters, inner)
    window.restore(saved)


def _load_inner(state_dict: StateDict, parameters: Parameters, inner: torch.optim.Optimizer) -> None:
    try:
        # torch casts what it loads to the dtype of the parameter in the groups.
        with parameters.masters_in_place():
            inner.load_state_dict(state_dict)
    except (ValueError, KeyError) as error:
        expected, fix = "a state of these parameter groups", "Load a state that was saved from this model and optimizer."
        raise explain(CheckpointError, "state_dict", expected=expected, found=f"one where {error}", fix=fix) from error
