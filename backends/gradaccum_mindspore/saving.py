"""Loading a checkpoint of a wrapped optimizer: checked whole before anything is
written, and seen by compiled code.

`mindspore.load_param_into_net` skips a value that it does not find and checks no
window, and a function that was compiled before ignores what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mindspore import Parameter, Tensor, nn

from gradaccum import ArgumentTypeError, CheckpointError
from gradaccum.kit import (
    FIELD_DTYPES,
    State,
    decode_terms,
    encode_terms,
    explain,
    resumed,
    terms_of,
)
from gradaccum_mindspore.gradient_sum import write
from gradaccum_mindspore.state import (
    OWN,
    SHARED,
    TORN,
    Saved,
    Storage,
    with_known_size,
)

SPREAD = "redistributed"
"""The name of an entry that says that `redistributed` returned the checkpoint."""


class SavedPlace(NamedTuple):
    """`gradaccum_mindspore.state.Storage.shared` as it was saved."""

    held: int
    rank: int
    workers: int


def saved_place(state: Saved, prefix: str) -> SavedPlace:
    """Return the place of the worker that saved `state`."""
    entry = state.get(f"{prefix}.{SHARED}")
    place = (
        SavedPlace(OWN, 0, 1)
        if entry is None
        else SavedPlace(*entry.asnumpy().tolist())
    )
    if place.held == TORN:
        found, fix = (
            "one whose reduction over the workers failed",
            "Load an earlier checkpoint, on every worker.",
        )
        raise explain(
            CheckpointError,
            f"{prefix}.{SHARED}",
            expected="a whole sum",
            found=found,
            fix=fix,
        )
    return place


def require_place(saved: SavedPlace, own: tuple[int, int], prefix: str) -> None:
    if saved[1:] != own:
        expected, found = (
            f"the open window of rank {own[0]} of {own[1]}",
            f"that of rank {saved.rank} of {saved.workers}",
        )
        fix = (
            "Let each worker load its own file; for another number of workers write"
            " gradaccum_mindspore.redistributed(states, workers), or save between two"
            " windows."
        )
        raise explain(
            CheckpointError,
            f"{prefix}.{SHARED}",
            expected=expected,
            found=found,
            fix=fix,
        )


def load_checkpoint_into(cell: nn.Cell, parameter_dict: Saved) -> None:
    """Write a checkpoint into a wrapped optimizer, or into a cell that holds one,
    whether or not it has been compiled.

    Args:
        cell: a wrapped optimizer, or a cell such as `mindspore.nn.TrainOneStepCell`.
        parameter_dict: the dict that `mindspore.load_checkpoint` returned, or
            ``{name: Parameter or Tensor}``. It holds a value for every Parameter of
            `cell`. Other entries (such as ``epoch_num``) are left alone.

    Raises:
        ArgumentTypeError: `cell` is no Cell, or `parameter_dict` is the path of a file.
        CheckpointError: a value is missing, of another shape or dtype; the checkpoint
            has a sum or a master that `cell` has not; its open window was saved under
            another reduction, overflow policy, loss scale or number of steps, or by
            another worker or number of workers; or two Parameters of `cell` have one
            name. Nothing was written then.
    """
    _check_arguments(cell, parameter_dict)
    parameters = _parameters(cell)
    unsaved = [
        storage.shared.name
        for storage in _storages(cell)
        if storage.several and storage.shared.name not in parameter_dict
    ]
    for name, parameter in parameters.items():
        if name not in unsaved:
            _check_entry(name, parameter, parameter_dict.get(name))
    for storage in _storages(cell):
        _check_names(storage, parameters, parameter_dict)
    changed = {
        name: value
        for storage in _storages(cell)
        for name, value in _resumed(storage, parameter_dict)
    }
    for name, parameter in parameters.items():
        write(
            parameter,
            Tensor(
                changed[name] if name in changed else parameter_dict[name].asnumpy(),
                parameter.dtype,
            ),
        )
    for storage in _storages(cell):
        storage.half_made = False
        storage.listening.loaded()
        storage.open_window.note_state()


def _check_arguments(cell: object, parameter_dict: object) -> None:
    if not isinstance(cell, nn.Cell):
        found, fix = (
            f"an object of type {type(cell).__name__}",
            "Write load_checkpoint_into(optimizer, mindspore.load_checkpoint(file)).",
        )
        raise explain(
            ArgumentTypeError,
            "cell",
            expected="a wrapped optimizer or a Cell that holds one",
            found=found,
            fix=fix,
        )
    if not isinstance(parameter_dict, Mapping):
        fix = "Write load_checkpoint_into(optimizer, mindspore.load_checkpoint(file))."
        raise explain(
            ArgumentTypeError,
            "parameter_dict",
            expected="a dict by name",
            got=parameter_dict,
            fix=fix,
        )


def _storages(cell: nn.Cell) -> Iterator[Storage]:
    for _, part in nn.Cell.cells_and_names(cell):
        if isinstance(part, Storage):
            yield part


def _check_entry(name: str, parameter: Parameter, entry: Tensor | None) -> None:
    expected = f"{parameter.dtype} of shape {tuple(parameter.shape)}"
    if entry is None:
        raise _checkpoint_error(
            f"{name!r}: {expected}",
            "a checkpoint without it",
            "Save the whole optimizer: mindspore.save_checkpoint(optimizer, file).",
        )
    found = f"{entry.dtype} of shape {tuple(entry.shape)}"
    if found != expected:
        raise _checkpoint_error(
            f"{name!r}: {expected}",
            found,
            "Load the checkpoint of the same model and optimizer.",
        )


def _check_names(
    storage: Storage, parameters: Mapping[str, Parameter], parameter_dict: Saved
) -> None:
    for entries, suffix, kind in (
        (storage.sums, storage.suffix, "sums"),
        (storage.masters.masters, storage.masters.suffix, "masters"),
    ):
        # Another wrapped optimizer of the cell may have the same suffix.
        unknown = [
            name
            for name in parameter_dict
            if name.endswith(suffix) and name not in parameters
        ]
        if unknown:
            own, fix = (
                sorted(entry.name for entry in entries),
                "Load the checkpoint of the same model, wrapped with the same options.",
            )
            raise _checkpoint_error(
                f"{kind} for {own or 'no parameter'} only", f"also {unknown}", fix
            )


def _parameters(cell: nn.Cell) -> dict[str, Parameter]:
    named: dict[str, Parameter] = {}
    for _, parameter in cell.parameters_and_names():
        if named.setdefault(parameter.name, parameter) is not parameter:
            found, fix = (
                f"two that are called {parameter.name!r}",
                (
                    "Give one of them another name; an optimizer's state:"
                    " name='generator'."
                ),
            )
            raise explain(
                CheckpointError,
                "cell",
                expected=(
                    "Parameters of different names, as a checkpoint has one of each"
                ),
                found=found,
                fix=fix,
            )
    return named


def _resumed(
    storage: Storage, parameter_dict: Saved
) -> Iterator[tuple[str, float | Sequence[float]]]:
    own = storage.options
    saved = State(
        *(
            parameter_dict[getattr(storage, field).name].asnumpy().item()
            for field in FIELD_DTYPES
        )
    )
    terms = decode_terms(parameter_dict[storage.terms.name].asnumpy().tolist())
    if saved.micro_step:
        own = with_known_size(own, saved.optimizer_step)
    elif storage.varies:
        # A schedule may end with the run, so only the next micro-batch asks it, and
        # writes its answer.
        own = own._replace(steps=terms.steps)
    for field, value in zip(FIELD_DTYPES, resumed(saved, terms, own), strict=True):
        yield getattr(storage, field).name, value
    yield storage.terms.name, encode_terms(terms_of(own, saved.optimizer_step))
    place = saved_place(parameter_dict, storage.prefix)
    if saved.micro_step or place.held != OWN or storage.sharded:
        require_place(place, storage.place, storage.prefix)
    if storage.sharded and f"{storage.prefix}.{SPREAD}" in parameter_dict:
        expected, fix = (
            "each worker's own shards, as layerwise_parallel says",
            "Let as many workers as saved load their own files.",
        )
        raise _checkpoint_error(
            expected, "what redistributed made of the files of some", fix
        )
    if storage.several:
        yield storage.shared.name, [place.held, *storage.place]


def _checkpoint_error(expected: str, found: str, fix: str) -> CheckpointError:
    return explain(
        CheckpointError, "parameter_dict", expected=expected, found=found, fix=fix
    )
