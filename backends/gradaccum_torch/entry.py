"""The wrapper's entry in a ``state_dict``: plain numbers, lists and tensors only, so that ``torch.load(weights_only=True)`` reads it.

It sits under one key beside the inner optimizer's own entries, and torch ignores it when a bare optimizer loads the state:

- ``format``: `gradaccum.kit.FORMAT`, the number of what these entries mean;
- the seven fields of `gradaccum.kit.State`, and ``grad_norm``;
- ``terms``: `gradaccum.kit.Terms` as a mapping, the options that an open window depends on; a size by weight is a negative number;
- ``worker``: the rank that saved it and the number of workers, as the sum of each is a part of that of all;
- ``parameters``: shape, dtype and name of each, to refuse another model's state;
- ``sums``: the partial sum by the index of its parameter, only while a window is open;
- ``loss`` and ``window_loss``: what the open window's losses add up to, and the loss of the last closed one;
- ``noise``: the four fields of `gradaccum.kit.Noise`, only with ``noise_scale=``;
- ``masters``: the float32 master of each half-precision parameter by the index of that parameter, only with ``master_weights=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import CheckpointError
from gradaccum.kit import FORMAT, Noise, Options, State, Terms, UntilWeight, code_of, explain, initial_state, require_format, resumed
from gradaccum_torch.knowledge import NOTHING_KNOWN, Known
from gradaccum_torch.masters import Group, Parameters
from gradaccum_torch.torch_private import is_sharded

KEY = "gradaccum"

_FIX = "Load a state that was saved from this model and optimizer."


StateDict = dict[str, Any]
"""A saved state as torch has it: ``"state"`` by the index of a parameter, ``"param_groups"`` and what an optimizer adds to them."""
Entry = dict[str, Any]
"""The wrapper's part of a ``state_dict``, under `KEY`."""
Place = tuple[int, int] | None
"""The rank of a worker and the number of workers; None: the part of a sum that it saves can be loaded by any."""
Description = list[Any]
"""Shape, dtype and name of a parameter: ``[[2, 3], "torch.float32", "layer.weight"]``."""


class Saved(NamedTuple):
    """A window as a checkpoint holds it."""

    fields: State
    """The fields as they were saved; `terms` decide which of them go on."""
    terms: Terms | None
    """None: it is a bare optimizer's state, and the fields are of this optimizer."""
    grad_norm: float
    sums: Mapping[int, Tensor]
    """The partial sum by the index of its parameter; empty between two windows."""
    masters: Mapping[int, Tensor]
    """The float32 masters by the index of their parameter."""
    place: Place = None
    """The worker that saved it."""
    known: Known = NOTHING_KNOWN

    def resumed(self, options: Options, place: Place) -> State:
        """The fields to go on with under `options`, for the worker at `place`.

        Raises:
            CheckpointError: it is an open window under other options, or another worker's.
        """
        self._require_place(place)
        return initial_state(options.scale_rule.init_scale) if self.terms is None else resumed(self.fields, self.terms, options)

    def _require_place(self, own: Place) -> None:
        # The sum of an open window is a part of that of all workers.
        if self.fields.micro_step and self.place and own and tuple(self.place) != own:
            expected, found = ("that of rank {} of {}".format(*place) for place in (own, self.place))
            fix = "Load what this rank saved, or gradaccum_torch.redistributed(state_dicts, workers)[rank] from what all ranks saved."
            raise explain(CheckpointError, "worker", expected=f"the open window of a worker, {expected}", found=found, fix=fix)


def describe(groups: Sequence[Group]) -> list[Description]:
    """Shape, dtype and name (None if the optimizer was not told) of each parameter, in the order of the groups."""
    described = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for parameter, name in zip(group["params"], names, strict=True):
            described.append([list(parameter.shape), str(parameter.dtype), name])
    return described


def encode(saved: Saved, groups: Sequence[Group]) -> Entry:
    """The entry to save, of a window over the parameters of `groups`; sums and masters are the tensors themselves."""
    assert saved.terms is not None
    return {
        "format": FORMAT,
        **saved.fields._asdict(),
        "grad_norm": saved.grad_norm,
        "terms": _with_coded_size(saved.terms),
        "worker": None if saved.place is None else list(saved.place),
        "parameters": describe(groups),
        "sums": {index: _savable(total) for index, total in saved.sums.items()},
        "masters": {index: master.detach() for index, master in saved.masters.items()},
        "loss": saved.known.loss,
        "window_loss": saved.known.window_loss,
        **({} if saved.known.noise is None else {"noise": list(saved.known.noise)}),
    }


def _with_coded_size(terms: Terms) -> dict[str, Any]:
    """`terms` as a mapping; a window that ends by its weight has that weight, negative, for its size."""
    return {**terms._asdict(), "steps": code_of(terms.steps) if isinstance(terms.steps, UntilWeight) else terms.steps}


def _terms(saved: Mapping[str, Any]) -> Terms:
    """What `_with_coded_size` made a mapping of."""
    steps = saved["steps"]
    return Terms(**{**saved, "steps": UntilWeight(-steps) if steps is not None and steps < 0 else steps})


def _known(entry: Entry) -> Known:
    noise = entry.get("noise")
    return Known(entry["loss"], entry["window_loss"], None if noise is None else Noise(*noise))


def _savable(total: Tensor) -> Tensor:
    """A part of a sharded buffer has a place in no memory, which `torch.save` takes for a place in memory."""
    return total.clone() if is_sharded(total) and total.storage_offset() else total


def decode(entry: Entry, own: Parameters, sum_dtypes: Sequence[torch.dtype]) -> Saved:
    """Read what `encode` made for the parameters `own`; `sum_dtypes` are the dtypes this optimizer sums in, by parameter.

    Raises:
        CheckpointError: it is of other parameters, or something is missing.
    """
    require_entries(entry)
    _require_parameters(entry["parameters"], describe(own.groups()))
    fields = State(*(entry[name] for name in State._fields))
    for index, total in entry["sums"].items():
        _require_sum(index, total, own.positions(), sum_dtypes)
    masters = entry.get("masters", {})
    _require_masters(masters, own.masters())
    return Saved(fields, _terms(entry["terms"]), float(entry["grad_norm"]), entry["sums"], masters, entry.get("worker"), _known(entry))


def own_copy(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    """`total` copied to where the parameter is, so that training on leaves the saved one as it is."""
    return None if total is None else total.detach().to(parameter.device, copy=True)


def require_entries(entry: Any) -> None:
    """Raise unless `entry` holds all that `encode` writes, in the format of this release.

    Raises:
        CheckpointError: something is missing, or the format is another.
    """
    expected = ["format", *State._fields, "grad_norm", "terms", "parameters", "sums", "loss", "window_loss"]
    missing = [name for name in expected if name not in entry] if isinstance(entry, Mapping) else expected
    if missing:
        raise explain(CheckpointError, KEY, expected=f"the entries {expected}", found=f"a state without {missing}", fix=_FIX)
    require_format(entry["format"])


def _require_parameters(saved: Sequence[Description], own: Sequence[Description]) -> None:
    if len(saved) != len(own):
        raise explain(CheckpointError, "parameters", expected=f"{len(own)} parameters", found=f"a state of {len(saved)}", fix=_FIX)
    for index, ((shape, dtype, name), mine) in enumerate(zip(saved, own, strict=True)):
        same_name = name is None or mine[2] is None or name == mine[2]
        if [list(shape), dtype] != mine[:2] or not same_name:
            raise explain(
                CheckpointError, f"parameter {index}", expected=_show(*mine), found=f"a state of {_show(shape, dtype, name)}", fix=_FIX
            )


def _require_masters(saved: Mapping[int, Tensor], own: Mapping[int, Tensor]) -> None:
    described, expected = ({index: (m.shape, m.dtype) for index, m in masters.items()} for masters in (saved, own))
    if described != expected:
        raise explain(
            CheckpointError,
            "masters",
            expected=f"float32 master weights of {len(own)} parameters",
            found=f"a state with those of {len(saved)}",
            fix="Wrap the optimizer with the master_weights= it was saved with.",
        )


def _require_sum(index: int, total: Tensor, parameters: Sequence[Tensor], sum_dtypes: Sequence[torch.dtype]) -> None:
    if not 0 <= index < len(parameters) or total.shape != parameters[index].shape or total.dtype != sum_dtypes[index]:
        raise explain(
            CheckpointError,
            f"sums[{index}]",
            expected="a partial sum with the shape of its parameter and the dtype that this optimizer accumulates in",
            found=f"a tensor of shape {tuple(total.shape)} and dtype {total.dtype}",
            fix="Wrap the optimizer with the accumulate_dtype= it was saved with.",
        )


def _show(shape: Sequence[int], dtype: str, name: str | None) -> str:
    return f"{name or 'a parameter'} of shape {tuple(shape)} and {dtype}"
