"""Loading a checkpoint of a wrapped optimizer: checked completely before anything is
written, and seen by compiled code.

`mindspore.load_param_into_net` skips a value that it does not find and checks no
window, and a function that was compiled before ignores what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspore import Parameter, Tensor, nn

from gradaccum import CheckpointError, kit
from gradaccum.kit import FIELD_DTYPES, State, explain
from gradaccum_mindspore.gradient_sum import write
from gradaccum_mindspore.state import (
    WORKERS,
    Checkpoint,
    Storage,
    with_known_size,
)


def load_checkpoint_into(cell: nn.Cell, parameter_dict: Checkpoint) -> None:
    """Write a checkpoint into a wrapped optimizer, or into a cell that holds one,
    whether or not it has been compiled.

    Args:
        cell: a wrapped optimizer, or a cell such as `mindspore.nn.TrainOneStepCell`.
        parameter_dict: the dict that `mindspore.load_checkpoint` returned, or
            ``{name: Parameter or Tensor}``. It holds a value for every Parameter of
            `cell`. Other entries (such as ``epoch_num``) are left alone.

    Raises:
        CheckpointError: a value is missing, of another shape or dtype; the checkpoint
            has a sum or a master that `cell` has not; its open window was saved under
            another reduction, overflow policy, loss scale or number of steps, or by
            another worker or number of workers; or two Parameters of `cell` have one
            name. Nothing was written then.
    """
    cells = [part for _, part in nn.Cell.cells_and_names(cell)]
    storages = [part for part in cells if isinstance(part, Storage)]
    parameters = parameters_by_name(cell)
    # A checkpoint of one worker has no entry of its place.
    optional = {storage.saved_place.name for storage in storages if storage.has_workers}
    for name, parameter in parameters.items():
        if name in parameter_dict or name not in optional:
            require_fit(name, parameter, parameter_dict.get(name))
    changed_values: dict[str, object] = {}
    for storage in storages:
        require_no_other_entries(storage, parameters, parameter_dict)
        changed_values |= resumed_values(storage, parameter_dict)
    for name, parameter in parameters.items():
        value = changed_values.get(name)
        if value is None:
            value = parameter_dict[name].asnumpy()
        write(parameter, Tensor(value, parameter.dtype))
    for storage in storages:
        storage.note_loaded()


def parameters_by_name(cell: nn.Cell) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for _, parameter in cell.parameters_and_names():
        if parameters.setdefault(parameter.name, parameter) is not parameter:
            raise explain(
                CheckpointError,
                "cell",
                expected="Parameters of different names, as a checkpoint has one of"
                " each",
                found=f"two that are called {parameter.name!r}",
                fix="Give one of them another name; an optimizer's state:"
                " name='generator'.",
            )
    return parameters


def require_fit(name: str, parameter: Parameter, entry: Tensor | None) -> None:
    right_kind = f"{parameter.dtype} of shape {tuple(parameter.shape)}"
    if entry is None:
        raise checkpoint_error(
            f"{name!r}: {right_kind}",
            "a checkpoint without it",
            "Save the whole optimizer: mindspore.save_checkpoint(optimizer, file).",
        )
    kind = f"{entry.dtype} of shape {tuple(entry.shape)}"
    if kind != right_kind:
        raise checkpoint_error(
            f"{name!r}: {right_kind}",
            kind,
            "Load the checkpoint of the same model and optimizer.",
        )


def require_no_other_entries(
    storage: Storage, parameters: Mapping[str, Parameter], parameter_dict: Checkpoint
) -> None:
    """Raise unless the cell has every sum and master of the checkpoint."""
    # Another wrapped optimizer of the cell may have the same suffixes.
    suffixes = (storage.sum_suffix, storage.masters.suffix)
    unknown = [
        name
        for name in parameter_dict
        if name.endswith(suffixes) and name not in parameters
    ]
    if unknown:
        raise checkpoint_error(
            f"no sums and masters but those of {[name for name, _, _ in storage.specs]}",
            f"also {unknown}",
            "Load the checkpoint of the same model, wrapped with the same options.",
        )


def resumed_values(storage: Storage, parameter_dict: Checkpoint) -> dict[str, object]:
    """Return the values, by name, that differ from the checkpoint's; raise unless its
    window can go on here.
    """
    fields = {field: getattr(storage, field).name for field in FIELD_DTYPES}
    saved_state = State(
        *(parameter_dict[name].asnumpy().item() for name in fields.values())
    )
    terms = kit.decode_terms(parameter_dict[storage.terms.name].asnumpy().tolist())
    options = storage.options
    if saved_state.micro_step:
        options = with_known_size(options, saved_state.optimizer_step)
    elif storage.size_varies:
        # A schedule may end with the run, so only the next micro-batch asks it, and
        # writes its answer.
        options = options._replace(steps=terms.steps)
    state = kit.resumed(saved_state, terms, options)
    values: dict[str, object] = dict(zip(fields.values(), state, strict=True))
    terms = kit.terms_of(options, saved_state.optimizer_step)
    values[storage.terms.name] = kit.encode_terms(terms)
    if saved_state.micro_step or storage.sharded_places:
        require_place(saved_place(parameter_dict, storage.prefix), storage)
    if storage.has_workers:
        values[storage.saved_place.name] = storage.place
    return values


def saved_place(parameter_dict: Checkpoint, prefix: str) -> tuple[int, int]:
    """Return the rank of the worker that saved the checkpoint, and the number of
    workers.
    """
    name = f"{prefix}.{WORKERS}"
    if name not in parameter_dict:
        return 0, 1
    rank, workers = parameter_dict[name].asnumpy().tolist()
    return rank, workers


def require_place(place: tuple[int, int], storage: Storage) -> None:
    if place != storage.place:
        saved_rank, saved_workers = place
        rank, workers = storage.place
        raise explain(
            CheckpointError,
            f"{storage.prefix}.{WORKERS}",
            expected=f"the open window of rank {rank} of {workers}",
            found=f"the open window of rank {saved_rank} of {saved_workers}",
            fix="Let each worker load its own file; for another number of workers write"
            " gradaccum_mindspore.redistributed(states, workers), or save between two"
            " windows.",
        )


def checkpoint_error(expected: str, found: str, fix: str) -> CheckpointError:
    return explain(
        CheckpointError, "parameter_dict", expected=expected, found=found, fix=fix
    )
