"""Saving and loading, in mid-window too: the resumed run is bitwise the uninterrupted
one.

Between two windows `spread` and `gather` convert a state for
`torch.distributed.checkpoint`; `redistributed` resumes an open window on other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, CheckpointError, UsageError, kit
from gradaccum_torch.parameters import Group, Parameters
from gradaccum_torch.private.names import LocalVariables, is_sharded
from gradaccum_torch.statistics import NOTHING_KNOWN, Known


def save(
    saved: Saved,
    parameters: Parameters,
    inner: torch.optim.Optimizer,
    caller: LocalVariables | None,
) -> StateDict:
    """Return the state of `inner` with the window's entry; the tensors are the live
    ones. `caller`: the variables of torch's checkpoint function.
    """
    if caller is not None:
        require_no_open_window(saved.fields.micro_step)
    state_dict = inner.state_dict()
    state_dict[KEY] = encode(saved, parameters.groups())
    return state_dict if caller is None else spread(state_dict, parameters, caller)


def require_no_open_window(micro_step: int) -> None:
    """Raise unless the window is empty: `torch.distributed.checkpoint` has no place for
    a sum.
    """
    if micro_step:
        fix = (
            "Call opt.flush() first, or opt.discard() before a load. Or save"
            " opt.state_dict() on each worker, which has the open window; "
        )
        fix += "gradaccum_torch.redistributed gives it to another number of workers."
        raise kit.explain(
            UsageError,
            _CHECKPOINT,
            expected="to be called between two windows",
            found="an open window",
            fix=fix,
        )


def load(
    state_dict: StateDict,
    sum_dtypes: Sequence[torch.dtype],
    parameters: Parameters,
    inner: torch.optim.Optimizer,
    resumed: Callable[[Saved], kit.State],
) -> Saved:
    """Load into `inner` what `save` returned, and return the window; a bare optimizer's
    state is an empty one.

    Raises:
        CheckpointError: the state is of other parameters, or of an open window under
            other options; nothing was changed.
    """
    state_dict = gather(state_dict, parameters)
    # What a bare optimizer's state says of a window.
    bare = Saved(kit.initial_state(), None, 0.0, {}, {})
    saved = (
        decode(state_dict[KEY], parameters, sum_dtypes) if KEY in state_dict else bare
    )
    saved = saved._replace(fields=resumed(saved))
    _load_inner(
        {key: value for key, value in state_dict.items() if key != KEY},
        parameters,
        inner,
    )
    return saved


def _load_inner(
    state_dict: StateDict, parameters: Parameters, inner: torch.optim.Optimizer
) -> None:
    try:
        # torch casts what it loads to the dtype of the parameter in the groups.
        with parameters.masters_in_place():
            inner.load_state_dict(state_dict)
    except (ValueError, KeyError) as error:
        expected, fix = (
            "a state of these parameter groups",
            "Load a state that was saved from this model and optimizer.",
        )
        raise kit.explain(
            CheckpointError,
            "state_dict",
            expected=expected,
            found=f"one where {error}",
            fix=fix,
        ) from error


# The wrapper's entry in a ``state_dict``: plain numbers, lists and tensors only, so
# that ``torch.load(weights_only=True)`` reads it.
#
# It sits under one key beside the inner optimizer's own entries, and torch ignores it
# when a bare optimizer loads the state:
#
# - ``format``: `gradaccum.kit.FORMAT`, the number of what these entries mean;
# - the seven fields of `gradaccum.kit.State`, and ``grad_norm``;
# - ``terms``: `gradaccum.kit.Terms` as a mapping, the options that an open window
#   depends on; a size by weight is a negative number;
# - ``worker``: the rank that saved it and the number of workers, as the sum of each is
#   a part of that of all;
# - ``parameters``: shape, dtype and name of each, to refuse another model's state;
# - ``sums``: the partial sum by the index of its parameter, only while a window is
#   open;
# - ``loss`` and ``window_loss``: what the open window's losses add up to, and the loss
#   of the last closed one;
# - ``masters``: the float32 master of each half-precision parameter by the index of
#   that parameter, only with ``master_weights=True``.


KEY = "gradaccum"

_FIX = "Load a state that was saved from this model and optimizer."


StateDict = dict[str, Any]
"""A saved state as torch has it: ``"state"`` by the index of a parameter,
``"param_groups"`` and what an optimizer adds to them.
"""
Entry = dict[str, Any]
"""The wrapper's part of a ``state_dict``, under `KEY`."""
Place = tuple[int, int] | None
"""The rank of a worker and the number of workers; None: the part of a sum that it saves
can be loaded by any.
"""
Description = list[Any]
"""Shape, dtype and name of a parameter: ``[[2, 3], "torch.float32", "layer.weight"]``.
"""


class Saved(NamedTuple):
    """A window as a checkpoint holds it."""

    fields: kit.State
    """The fields as they were saved; `terms` decide which of them go on."""
    terms: kit.Terms | None
    """None: it is a bare optimizer's state, and the fields are of this optimizer."""
    grad_norm: float
    sums: Mapping[int, Tensor]
    """The partial sum by the index of its parameter; empty between two windows."""
    masters: Mapping[int, Tensor]
    """The float32 masters by the index of their parameter."""
    place: Place = None
    """The worker that saved it."""
    known: Known = NOTHING_KNOWN

    def resumed(self, options: kit.Options, place: Place) -> kit.State:
        self._require_place(place)
        return (
            kit.initial_state(options.scale_rule.init_scale)
            if self.terms is None
            else kit.resumed(self.fields, self.terms, options)
        )

    def _require_place(self, own: Place) -> None:
        # The sum of an open window is a part of that of all workers.
        if self.fields.micro_step and self.place and own and tuple(self.place) != own:
            expected, found = (
                "that of rank {} of {}".format(*place) for place in (own, self.place)
            )
            fix = (
                "Load what this rank saved, or"
                " gradaccum_torch.redistributed(state_dicts, workers)[rank] from what"
                " all ranks saved."
            )
            raise kit.explain(
                CheckpointError,
                "worker",
                expected=f"the open window of a worker, {expected}",
                found=found,
                fix=fix,
            )


def describe(groups: Sequence[Group]) -> list[Description]:
    """Return shape, dtype and name (None without names) of each parameter, in the order
    of the groups.
    """
    described = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for parameter, name in zip(group["params"], names, strict=True):
            described.append([list(parameter.shape), str(parameter.dtype), name])
    return described


def encode(saved: Saved, groups: Sequence[Group]) -> Entry:
    """Return the entry to save, with the tensors themselves."""
    assert saved.terms is not None
    return {
        "format": kit.FORMAT,
        **saved.fields._asdict(),
        "grad_norm": saved.grad_norm,
        "terms": _with_coded_size(saved.terms),
        "worker": None if saved.place is None else list(saved.place),
        "parameters": describe(groups),
        # A part of a sharded buffer is copied without storage, which `torch.save`
        # needs.
        "sums": {
            index: (
                total.clone() if is_sharded(total) and total.storage_offset() else total
            )
            for index, total in saved.sums.items()
        },
        "masters": {index: master.detach() for index, master in saved.masters.items()},
        "loss": saved.known.loss,
        "window_loss": saved.known.window_loss,
    }


def _with_coded_size(terms: kit.Terms) -> dict[str, Any]:
    """Return `terms` as a mapping; a weight that ends the window is its size,
    negative.
    """
    return {
        **terms._asdict(),
        "steps": (
            kit.code_of(terms.steps)
            if isinstance(terms.steps, kit.UntilWeight)
            else terms.steps
        ),
    }


def _terms(saved: Mapping[str, Any]) -> kit.Terms:
    steps = saved["steps"]
    return kit.Terms(
        **{
            **saved,
            "steps": (
                kit.UntilWeight(-steps) if steps is not None and steps < 0 else steps
            ),
        }
    )


def _known_of(entry: Entry) -> Known:
    return Known(entry["loss"], entry["window_loss"])


def decode(entry: Entry, own: Parameters, sum_dtypes: Sequence[torch.dtype]) -> Saved:
    """Read what `encode` wrote for the parameters `own`; `sum_dtypes` are by parameter.

    Raises:
        CheckpointError: it is of other parameters, or something is missing.
    """
    require_entries(entry)
    _require_parameters(entry["parameters"], describe(own.groups()))
    fields = kit.State(*(entry[name] for name in kit.State._fields))
    for index, total in entry["sums"].items():
        _require_sum(index, total, own.positions(), sum_dtypes)
    masters = entry.get("masters", {})
    _require_masters(masters, own.masters_by_position())
    return Saved(
        fields,
        _terms(entry["terms"]),
        float(entry["grad_norm"]),
        entry["sums"],
        masters,
        entry.get("worker"),
        _known_of(entry),
    )


def own_copy(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if total is None else total.detach().to(parameter.device, copy=True)


def require_entries(entry: Any) -> None:
    expected = [
        "format",
        *kit.State._fields,
        "grad_norm",
        "terms",
        "parameters",
        "sums",
        "loss",
        "window_loss",
    ]
    missing = (
        [name for name in expected if name not in entry]
        if isinstance(entry, Mapping)
        else expected
    )
    if missing:
        raise kit.explain(
            CheckpointError,
            KEY,
            expected=f"the entries {expected}",
            found=f"a state without {missing}",
            fix=_FIX,
        )
    kit.require_format(entry["format"])


def _require_parameters(
    saved: Sequence[Description], own: Sequence[Description]
) -> None:
    if len(saved) != len(own):
        raise kit.explain(
            CheckpointError,
            "parameters",
            expected=f"{len(own)} parameters",
            found=f"a state of {len(saved)}",
            fix=_FIX,
        )
    for index, ((shape, dtype, name), mine) in enumerate(zip(saved, own, strict=True)):
        same_name = name is None or mine[2] is None or name == mine[2]
        if [list(shape), dtype] != mine[:2] or not same_name:
            found = f"a state of {_show(shape, dtype, name)}"
            raise kit.explain(
                CheckpointError,
                f"parameter {index}",
                expected=_show(*mine),
                found=found,
                fix=_FIX,
            )


def _require_masters(saved: Mapping[int, Tensor], own: Mapping[int, Tensor]) -> None:
    described, expected = (
        {index: (m.shape, m.dtype) for index, m in masters.items()}
        for masters in (saved, own)
    )
    if described != expected:
        wanted, found = (
            f"float32 master weights of {len(own)} parameters",
            f"a state with those of {len(saved)}",
        )
        fix = "Wrap the optimizer with the master_weights= it was saved with."
        raise kit.explain(
            CheckpointError, "masters", expected=wanted, found=found, fix=fix
        )


def _require_sum(
    index: int,
    total: Tensor,
    parameters: Sequence[Tensor],
    sum_dtypes: Sequence[torch.dtype],
) -> None:
    if (
        not 0 <= index < len(parameters)
        or total.shape != parameters[index].shape
        or total.dtype != sum_dtypes[index]
    ):
        expected = (
            "a partial sum with the shape of its parameter and the dtype that this"
            " optimizer accumulates in"
        )
        found = f"a tensor of shape {tuple(total.shape)} and dtype {total.dtype}"
        fix = "Wrap the optimizer with the accumulate_dtype= it was saved with."
        raise kit.explain(
            CheckpointError, f"sums[{index}]", expected=expected, found=found, fix=fix
        )


def _show(shape: Sequence[int], dtype: str, name: str | None) -> str:
    return f"{name or 'a parameter'} of shape {tuple(shape)} and {dtype}"


# A state for `torch.distributed.checkpoint.state_dict`, which keeps ``"state"`` and
# ``"param_groups"`` and drops the rest.
#
# So the wrapper's entry travels in the first group. The masters stand beside the inner
# optimizer's tensors of their parameters, which torch calls by name and shards.


_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
MASTER = "gradaccum_master"
_ELSEWHERE = ("parameters", "sums", "masters", "worker")
"""Parts of the entry that are not saved in the first group."""


def spread(
    state_dict: StateDict, parameters: Parameters, caller: LocalVariables
) -> StateDict:
    """Convert `state_dict` for torch's function with the local variables `caller`."""
    entry = state_dict.pop(KEY)
    # torch puts the inner optimizer's own mappings into a state dict.
    state_dict["state"] = {
        index: dict(entries) for index, entries in state_dict["state"].items()
    }
    if getattr(caller.get("info"), "flatten_optimizer_state_dict", False):
        expected, found = (
            "flatten_optimizer_state_dict=False",
            "True, which drops the state of the window",
        )
        raise kit.explain(
            UsageError,
            f"{_CHECKPOINT}.get_optimizer_state_dict",
            expected=expected,
            found=found,
            fix="Leave it out.",
        )
    masters = entry["masters"]
    for index, parameter in enumerate(parameters.positions() if masters else ()):
        # A parameter that is its own master gets an entry too: torch wants a state for
        # each, and the inner optimizer may have none.
        state_dict["state"].setdefault(index, {})[MASTER] = masters.get(
            index, parameter.detach()
        )
    state_dict["param_groups"][0][KEY] = {
        name: value for name, value in entry.items() if name not in _ELSEWHERE
    }
    return state_dict


def gather(state_dict: StateDict, parameters: Parameters) -> StateDict:
    """Convert `state_dict` back into the wrapper's form, if it is not in that form."""
    groups = state_dict.get("param_groups", ())
    if KEY in state_dict or not groups or KEY not in groups[0]:
        return state_dict
    state = {name: dict(entries) for name, entries in state_dict["state"].items()}
    names = list(chain(*(group["params"] for group in groups)))
    found = (
        (index, state.get(name, {}).pop(MASTER, None))
        for index, name in enumerate(names)
    )
    masters = {index: master for index, master in found if isinstance(master, Tensor)}
    own = parameters.masters_by_position()
    return {
        **state_dict,
        "state": {name: entries for name, entries in state.items() if entries},
        "param_groups": [
            {name: value for name, value in group.items() if name != KEY}
            for group in groups
        ],
        KEY: {
            **groups[0][KEY],
            "sums": {},
            "parameters": describe(parameters.groups()),
            "masters": {
                index: master for index, master in masters.items() if index in own
            },
        },
    }


# An open window that some workers saved, resumed by another number of workers: the
# window's end adds up the sums of all workers, so any split of their total gives the
# same window. The first worker gets it all.


_OTHER_RUN = "Load what the workers of one run saved between the same two updates."


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
    entries = [_entry_of(state_dict) for state_dict in state_dicts]
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise kit.explain(
            ArgumentTypeError,
            "workers",
            expected="the number of workers",
            got=workers,
            fix="Pass the new world size.",
        )
    states = [
        kit.State(*(entry[name] for name in kit.State._fields)) for entry in entries
    ]
    fields = kit.redistributed(states, workers)
    _require_one_run(state_dicts, entries)
    _require_all_ranks(entries)
    # An empty window has no size of its own.
    terms = max(entries, key=lambda entry: bool(entry["micro_step"]))["terms"]
    shared = {**entries[0], "terms": terms, "sums": {}, "loss": 0.0}
    first, *others = [
        {**shared, **own._asdict(), "worker": [rank, workers]}
        for rank, own in enumerate(fields)
    ]
    everything = {
        "sums": _added([entry["sums"] for entry in entries]),
        "loss": sum(entry["loss"] for entry in entries),
    }
    return [{**state_dicts[0], KEY: entry} for entry in (first | everything, *others)]


def _entry_of(state_dict: StateDict) -> Entry:
    if not isinstance(state_dict, Mapping):
        fix = "Pass a list of what opt.state_dict() gave on each worker."
        raise kit.explain(
            ArgumentTypeError,
            "state_dicts",
            expected="one state dict per worker that saved",
            got=state_dict,
            fix=fix,
        )
    entry: Entry = state_dict.get(KEY, {})
    require_entries(entry)
    if any(map(is_sharded, entry["sums"].values())):
        fix = (
            "Save between two windows by torch.distributed.checkpoint, which reshards"
            " the state."
        )
        raise kit.explain(
            CheckpointError,
            "sums",
            expected="the whole sums of each worker",
            found="sharded ones",
            fix=fix,
        )
    return entry


def _require_one_run(
    state_dicts: Sequence[StateDict], entries: Sequence[Entry]
) -> None:
    opened = [entry for entry in entries if entry["micro_step"]]
    for name in ("parameters", "masters"):
        _require_one(name, [entry[name] for entry in entries])
    for name in ("reduction", "on_overflow", "scale"):
        _require_one(name, [entry["terms"][name] for entry in entries])
    _require_one("steps", [entry["terms"]["steps"] for entry in opened])
    for name in ("param_groups", "state"):
        _require_one(name, [state_dict[name] for state_dict in state_dicts])


def _require_all_ranks(entries: Sequence[Entry]) -> None:
    places = sorted(list(entry.get("worker") or (0, 1)) for entry in entries)
    if any(entry["micro_step"] for entry in entries) and places != [
        [rank, len(entries)] for rank in range(len(entries))
    ]:
        expected, found = (
            f"those of all {places[0][1]} ranks, once each",
            f"those of the ranks {[rank for rank, _ in places]}",
        )
        fix = (
            "Save opt.state_dict() on every worker of an optimizer that was wrapped"
            " with module=, in a file of its own."
        )
        raise kit.explain(
            CheckpointError, "state_dicts", expected=expected, found=found, fix=fix
        )


def _require_one(name: str, values: Sequence[Any]) -> None:
    for rank, value in enumerate(values):
        if not _same(value, values[0]):
            found = f"another one in state dict {rank}"
            raise kit.explain(
                CheckpointError,
                name,
                expected="one value on every worker",
                found=found,
                fix=_OTHER_RUN,
            )


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same_kind, other = (
            one.dtype == other.dtype and one.shape == other.shape,
            other.to(one.device),
        )
        return same_kind and (
            torch.equal(one, other)
            or bool(((one == other) | ((one != one) & (other != other))).all())
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(
            _same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@torch.no_grad()
def _added(sums: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    added: dict[int, Tensor] = {}
    for own in sums:
        for index, total in own.items():
            added[index] = (
                total.clone()
                if index not in added
                else added[index].add_(total.to(added[index].device))
            )
    return dict(sorted(added.items()))
