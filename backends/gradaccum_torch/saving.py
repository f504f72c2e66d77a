"""Saving and loading, even while a window is open. A resumed run gives the same bits as
a run without interruption.

The ``state_dict`` contains the inner optimizer's entries and one additional entry of
the wrapped optimizer. An optimizer that is not wrapped ignores the additional entry
when it loads the state. The entry contains only plain numbers, lists and tensors, so
that ``torch.load(weights_only=True)`` can read it:

- ``format``: `gradaccum.kit.FORMAT`, the version of this format;
- the seven fields of `gradaccum.kit.State`, and ``grad_norm``;
- ``terms``: the options that an open window depends on. They are the fields of
  `gradaccum.kit.Terms`, as a mapping. If the window ends at a total weight, ``steps``
  is this weight with a negative sign;
- ``worker``: the rank that saved the entry, and the number of workers. Both are saved
  because each worker's sum is only a part of the sum over all workers;
- ``parameters``: the shape and dtype of each parameter, so that the state of a
  different model is detected;
- ``sums``: the open window's partial sums, keyed by the index of the parameter; it is
  empty if no window is open;
- ``loss`` and ``window_loss``: the sum of the open window's losses, and the loss of the
  last closed window;
- ``masters``: the float32 master weight of each half-precision parameter, keyed by the
  index of the parameter.
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
"""A saved state in torch's format. It contains ``"state"`` (keyed by the index of the
parameter), ``"param_groups"``, and any other entries that an optimizer adds.
"""
Entry = dict[str, Any]
"""The entry that the wrapped optimizer adds to a ``state_dict``. It is stored under the
key `KEY`.
"""

KEY = "gradaccum"
FIX = (
    "Load a state that was saved from this model, with the same accumulate_dtype= and"
    " master_weights= as now."
)


def save(window: Window) -> StateDict:
    """Return the inner optimizer's ``state_dict`` with an entry for the open window.
    The tensors are not copied.
    """
    window.require_savable()
    return {**window.masters.inner.state_dict(), KEY: entry_of(window)}


def entry_of(window: Window) -> Entry:
    state = window.current_state()
    # If no window is open, do not call the user's function for the window sizes,
    # because this function may not be defined beyond the run's last update.
    size = window.size if state.micro_step else None
    terms = kit.terms_of(window.options._replace(steps=size), state.optimizer_step)
    # Save the total weight of an `UntilWeight` as a negative number.
    steps = None if terms.steps is None else int(kit.code_of(terms.steps))
    masters = window.masters.by_index()
    entry: Entry = {
        "format": kit.FORMAT,
        **state._asdict(),
        "grad_norm": window.grad_norm,
        "terms": {**terms._asdict(), "steps": steps},
        "worker": list(window.workers.place),
        "parameters": describe(window.masters),
        "sums": window.saved_sums(),
        "masters": {index: master.detach() for index, master in masters.items()},
    }
    for index, total in entry["sums"].items():
        # Copy a sharded sum that is a view into a larger buffer, because `torch.save`
        # cannot save such a view.
        if is_sharded(total) and total.storage_offset():
            entry["sums"][index] = total.clone()
    for extension in window.extensions:
        entry |= extension.state_dict()
    return entry


def load(window: Window, state_dict: StateDict) -> None:
    """Restore what `save` returned. If the state comes from an optimizer that is not
    wrapped, no window is open afterwards.

    Raises:
        CheckpointError: the saved state belongs to different parameters, or contains an
            open window with different options. The error is raised before anything is
            changed.
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
        # Keep the scaler's current scale, because the user may have restored the scaler
        # separately.
        state = window.scaler.with_scale(state)
    bare_state = {name: value for name, value in state_dict.items() if name != KEY}
    # Put the master weights into the groups first, because torch casts the tensors that
    # it loads to the dtype of the parameters in the groups.
    with window.masters.in_place():
        window.masters.inner.load_state_dict(bare_state)
    window.masters.load(entry.get("masters", {}))
    window.restore(state, entry.get("sums", {}), entry)


def state_in(entry: Entry) -> State:
    return State(*[entry[name] for name in State._fields])


def resumed_state(entry: Entry, window: Window) -> State:
    """Return the state to resume with. Raise if the saved entry contains an open window
    that has different options or belongs to another worker.
    """
    state = state_in(entry)
    place = window.workers.place
    saved_place = entry.get("worker")
    # An open window's sum on one worker is only a part of the sum over all workers, so
    # each worker must load its own state.
    if state.micro_step and saved_place and tuple(saved_place) != place:
        raise checkpoint_error(
            "worker",
            "the open window of rank {} of {}".format(*place),
            "the open window of rank {} of {}".format(*saved_place),
            "Load the state that this rank saved, or"
            " gradaccum_torch.redistributed(state_dicts, workers)[rank] with the"
            " states that all ranks saved.",
        )
    return kit.resumed(state, decode_terms(entry["terms"]), window.options)


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
    """Raise unless the saved entry matches the window's parameters, the dtypes of its
    gradient sums, and its master weights.
    """
    # Do not compare the parameters' names, because only some checkpoints contain them.
    for parameter, saved_parameter in zip_longest(
        describe(window.masters), entry["parameters"], fillvalue=list[Any]()
    ):
        if parameter != saved_parameter[:2]:
            raise checkpoint_error(
                "parameters", f"shape and dtype {parameter}", f"{saved_parameter}"
            )
    for index, total in entry["sums"].items():
        dtype = window.sum_dtypes[index]
        if total.dtype != dtype:
            raise checkpoint_error("accumulate_dtype", f"{dtype}", f"{total.dtype}")
    masters = sorted(window.masters.by_index())
    saved_masters = sorted(entry.get("masters", {}))
    if masters != saved_masters:
        raise checkpoint_error(
            "master_weights",
            f"master weights for the parameters {masters}",
            f"{saved_masters}",
        )


# At the end of a window, the sums of all workers are added up. It therefore does not
# matter how the total is split among the workers that resume. Here, the first worker
# gets all of it.


def redistributed(state_dicts: Sequence[StateDict], workers: int) -> list[StateDict]:
    """Return state dicts from which `workers` workers can resume a run that was saved
    with a different number of workers, even in the middle of a window. The tensors are
    not copied.

    The first worker gets the total of all workers' gradient sums, in the same dtype,
    and the total weight. The other workers start with an empty sum. All workers get the
    highest micro-batch count that any worker has saved, so that their windows end
    together.

    Each worker loads its own state dict:
    ``opt.load_state_dict(gradaccum_torch.redistributed(state_dicts,
    world_size)[rank])``.

    Args:
        state_dicts: the results of ``opt.state_dict()`` on every worker, ordered by
            rank, from optimizers wrapped with ``module=``.
        workers: the number of workers that resume, >= 1.

    Raises:
        CheckpointError: the states were not saved at the same moment; the state of a
            rank is missing; or the sums are sharded.
    """
    entries = [state_dict[KEY] for state_dict in state_dicts]
    for entry in entries:
        kit.require_format(entry["format"])
        if any(map(is_sharded, entry["sums"].values())):
            raise checkpoint_error(
                "sums",
                "gradient sums that are not sharded",
                "sharded gradient sums",
                "Save between two windows with torch.distributed.checkpoint, which"
                " reshards the state.",
            )
    states = kit.redistributed([state_in(entry) for entry in entries], workers)
    # If any worker has an open window, use the options that this worker saved, because
    # a worker without an open window saves no window size.
    open_entries = [entry for entry in entries if entry["micro_step"]]
    terms = (open_entries or entries)[0]["terms"]
    places = [list(entry.get("worker") or (0, 1)) for entry in entries]
    all_places = [[rank, len(places)] for rank in range(len(places))]
    if open_entries and sorted(places) != all_places:
        raise checkpoint_error(
            "state_dicts",
            f"one state from each of the {places[0][1]} ranks",
            f"states from the ranks {[rank for rank, _ in places]}",
            "Wrap with module=, and save opt.state_dict() on every worker, in a"
            " separate file for each worker.",
        )
    common_entry = {**entries[0], "terms": terms, "sums": {}, "loss": 0.0}
    new_entries = [
        {**common_entry, **state._asdict(), "worker": [rank, workers]}
        for rank, state in enumerate(states)
    ]
    new_entries[0]["sums"] = add_up([entry["sums"] for entry in entries])
    new_entries[0]["loss"] = sum(entry["loss"] for entry in entries)
    return [{**state_dicts[0], KEY: entry} for entry in new_entries]


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
