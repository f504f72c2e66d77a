"""`gradaccum.verify`: a single function for all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from gradaccum.errors import ArgumentTypeError, BackendNotFoundError
from gradaccum.options import Reduction
from gradaccum.registry import available_backends, backend_of, load_backend
from gradaccum.verification.examination import examine
from gradaccum.verification.report import VerificationReport


def verify(
    model_or_params: Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    steps: int | None = None,
    *,
    reduction: Reduction = "mean",
    weight: Any = None,
    axes: Any = 0,
    has_aux: bool = False,
) -> VerificationReport:
    """Check whether gradient accumulation is right for a loss, and if it is not, find
    out why.

    The batch is split into micro-batches in several ways, and the accumulated gradients
    are compared with the whole batch's gradient. If they differ by more than rounding,
    experiments look for the cause. Afterwards the batch, the random states, and the
    model's parameters, buffers and plain attributes are the same as before. Do not call
    `verify` under `jax.jit`, or in two threads at once.

    Each micro-batch begins with the same random state. Layers such as dropout draw
    random numbers per item, so they run in evaluation mode, and the report says so. A
    loss function that itself draws random numbers per item cannot be checked. In JAX,
    split one key into a key per item, and pass these keys in the batch.

    Args:
        model_or_params: a `torch.nn.Module`, a `mindspore.nn.Cell`, or a pytree of JAX
            arrays.
        loss_fn: ``loss_fn(model_or_params, *batch)`` returns a scalar. With a module or
            a Cell it may also be a criterion, ``criterion(output, *targets)``, or a
            function that closes over its model, ``loss_fn(*batch)``.
        batch: a tuple or list of nests of arrays. Use real data, including padding,
            with at least `steps` items. A dictionary is passed as one argument, or as
            keyword arguments. Values that are not arrays are passed whole.
        steps: the number of micro-batches, at least 2; by default 4, or the number of
            items if there are fewer.
        reduction: as in `gradaccum.wrap`.
        weight: the weight that training uses: a callable ``weight(*micro_batch)``, or
            one number per item. Default: the number of items. If `batch` is a
            dictionary, the callable may take all its keys as keyword arguments.
        axes: the batch axis of each array: one number for all arrays, or a nest with
            the same outer levels as `batch`. None means that an array is passed whole.
            ``"key"`` means that the array is a random key (JAX).
        has_aux: True if `loss_fn` returns ``(loss, aux)``; `aux` is ignored.

    Returns:
        The report: ``print(report)``, ``report.equivalent``, ``report.causes``.

    Raises:
        ArgumentTypeError: `model_or_params` belongs to no installed framework; or
            another argument has the wrong type.
        ArgumentValueError: an argument has an invalid value.
        Exception: `loss_fn` raised this exception for a part of the batch; `verify`
            adds a note to it.
    """
    for backend in _backends(model_or_params):
        # A backend need not support `verify`.
        subject_type = getattr(backend, "subject_type", None)
        if subject_type is not None and backend.verifies(model_or_params):
            subject = subject_type(
                model_or_params,
                loss_fn,
                batch,
                weight=weight,
                axes=axes,
                has_aux=has_aux,
            )
            return examine(subject, steps, reduction)
    raise ArgumentTypeError(
        "model_or_params: expected a torch.nn.Module, a mindspore.nn.Cell or a pytree"
        f" of JAX arrays; got an object of type {type(model_or_params).__name__}. The"
        " corresponding framework must be installed. Installed frameworks:"
        f" {', '.join(available_backends()) or 'none'}."
    )


def _backends(model: object) -> Iterator[Any]:
    """Yield the backends that may be able to examine `model`. The backend of the
    model's type comes first, because loading any other backend would import another
    framework.
    """
    with suppress(ArgumentTypeError):
        yield backend_of(model)
    for name in available_backends():
        with suppress(BackendNotFoundError):  # The adapter needs another package.
            yield load_backend(name)
