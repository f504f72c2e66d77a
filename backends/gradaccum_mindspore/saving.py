"""Load a checkpoint of a wrapped optimizer. The whole checkpoint is checked before
anything is written, and functions that are already compiled use the loaded values.

In contrast, `mindspore.load_param_into_net` skips missing values and does not check the
window, and compiled functions ignore the values that it loads.
"""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn

from gradaccum import CheckpointError, kit
from gradaccum.kit import FIELD_DTYPES, State
from gradaccum_mindspore.gradient_sum import write
from gradaccum_mindspore.state import WORKERS, Checkpoint, Storage, with_known_size


def load_checkpoint_into(cell: nn.Cell, parameter_dict: Checkpoint) -> None:
    """Load a checkpoint into a wrapped optimizer, or into a cell that contains a
    wrapped optimizer. The optimizer or cell may already be compiled.

    Args:
        cell: a wrapped optimizer, or a cell such as `mindspore.nn.TrainOneStepCell`.
        parameter_dict: the dict that `mindspore.load_checkpoint` returned, or
            ``{name: Parameter or Tensor}``. It must contain a value for every Parameter
            of `cell`. Other entries (such as ``epoch_num``) are ignored.

    Raises:
        CheckpointError: a value is missing, or has the wrong shape or dtype; two
            Parameters of `cell` have the same name; or the open window cannot be
            resumed. It can be resumed only if it was saved with the same reduction,
            overflow policy, loss scale and number of steps, by a worker of the same
            rank, in a run with the same number of workers. When this error is raised,
            nothing has been written.
    """
    storages = [
        part for _, part in nn.Cell.cells_and_names(cell) if isinstance(part, Storage)
    ]
    parameters: dict[str, Parameter] = {}
    for parameter in cell.get_parameters():
        name = parameter.name
        if parameters.setdefault(name, parameter) is not parameter:
            raise CheckpointError(
                "cell: expected Parameters with different names, because a checkpoint"
                f" has one value for each name; got two Parameters called {name!r}. If"
                " there are two wrapped optimizers, give one of them a name:"
                " gradaccum.wrap(..., name='generator')."
            )
    # A single worker's checkpoint has no entry for the worker's rank.
    optional = {storage.saved_place.name for storage in storages if storage.has_workers}
    for name, parameter in parameters.items():
        if name in parameter_dict or name not in optional:
            require_fit(name, parameter, parameter_dict.get(name))
    changed_values: dict[str, object] = {}
    for storage in storages:
        changed_values |= resumed_values(storage, parameter_dict)
    for name, parameter in parameters.items():
        value = changed_values.get(name)
        if value is None:
            value = parameter_dict[name].asnumpy()
        write(parameter, Tensor(value, parameter.dtype))
    for storage in storages:
        storage.note_loaded()


def require_fit(name: str, parameter: Parameter, entry: Tensor | None) -> None:
    wanted = kind_of(parameter)
    found = "no such entry" if entry is None else kind_of(entry)
    if found != wanted:
        raise CheckpointError(
            f"{name!r}: expected {wanted}; got {found}. Load a checkpoint of the same"
            " model and optimizer that contains the whole cell:"
            " mindspore.save_checkpoint(cell, file)."
        )


def kind_of(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def resumed_values(storage: Storage, parameter_dict: Checkpoint) -> dict[str, object]:
    """Raise unless this optimizer can resume the saved window. Return a dict that maps
    names of Parameters to values that must be loaded instead of the checkpoint's
    values.
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
        # A schedule of window sizes may be undefined after the last update of a run. So
        # the schedule is called later, when the next micro-batch is added and the
        # window size is stored.
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
    workers at that time.
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
        raise CheckpointError(
            f"{storage.prefix}.{WORKERS}: expected a checkpoint saved by rank {rank} of"
            f" {workers} workers; got a checkpoint saved by rank {saved_rank} of"
            f" {saved_workers}. Have each worker load its own file. If the number of"
            " workers has changed, use gradaccum_mindspore.redistributed(states,"
            " workers), or save between two windows."
        )
