"""`gradaccum_torch.verify`: a check whether accumulation is right for a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gradaccum import ArgumentTypeError, ArgumentValueError, VerificationReport
from gradaccum.kit import Nest, as_loss, examine, explain, first_of, require_bool
from gradaccum_torch.extensions import is_divided_by
from gradaccum_torch.torch_private.names import is_sharded
from gradaccum_torch.verification.batch import Batch
from gradaccum_torch.verification.subject import TorchSubject, weight_of

DIVIDED_LOSS = (
    "The loss is divided by {steps}, and a window of {steps} micro-batches is divided by"
    " itself. If `loss / {steps}` is left of another loop, delete the division, or each"
    " update is {steps} times too small."
)


def verify(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    steps: int | None = None,
    *,
    reduction: str = "mean",
    weight: Any = None,
    axes: Nest = 0,
    has_aux: bool = False,
) -> VerificationReport:
    """Check whether gradient accumulation is right for a loss, and if not, why; see
    `gradaccum.verify`.

    The model runs in the mode that it is in. Gradients come from `torch.autograd.grad`,
    without ``.grad`` and its hooks; hooks on tensors and modules run. Random numbers
    are replayed for each item. Memory: a copy of the model's parameters and state, and
    ``steps + 3`` gradients in float64.

    Args:
        model: the model; parameters of other modules that `loss_fn` closes over count
            too.
        loss_fn: ``loss_fn(model, *batch)``, a scalar tensor. The usual criterion,
            ``criterion(output, *targets)``, is called with ``model(batch[0])`` and the
            rest of the batch; a function that closes over its model,
            ``loss_fn(*batch)``, with the batch.
        batch: a tuple of nests of tensors, NumPy arrays and lists with one value per
            item; one nest alone is the only argument, or a dictionary of arguments by
            name. A plain value is passed whole.
        steps: micro-batches, from 2 to the number of items; by default 4, or all items.
        reduction: as in `gradaccum.wrap`.
        weight: a callable ``weight(*micro_batch)`` or one number per item. Default: the
            number of items.
        axes: a prefix nest of `batch`: the batch axis of each leaf; None for what is
            passed whole.
        has_aux: `loss_fn` returns ``(loss, aux)``; `aux` is ignored.

    Raises:
        ArgumentTypeError: `model` is no module, or one that other processes share;
            `loss_fn` returns no tensor, or does not take the batch; `axes` has another
            type.
        ArgumentValueError: the loss is no scalar or has no graph; a leaf has no such
            axis, or another number of items; `steps` does not suit the batch.
        UsageError: the loss goes through a reentrant checkpoint, which works with
            ``backward()`` alone; or the installed torch cannot show the random draws.
    """
    _require_model(model)
    own = set(model.parameters())
    arguments = batch if type(batch) is tuple else (batch,)
    loss, arguments = as_loss(
        loss_fn,
        model,
        arguments,
        lambda value: (
            isinstance(value, nn.Module) and not own.isdisjoint(value.parameters())
        ),
    )
    require_bool("has_aux", has_aux)
    if has_aux:
        loss = first_of(loss)
    divided = Batch(arguments, axes)
    subject = TorchSubject(model, loss, divided, weight_of(weight, divided))
    report = examine(subject, steps, reduction)
    if steps is None or not is_divided_by(subject.division(), steps, reduction):
        return report
    note = DIVIDED_LOSS.format(steps=steps)
    return replace(report, notes=(*report.notes, note))


def _require_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        found = f"an object of type {type(model).__name__}"
        raise explain(
            ArgumentTypeError,
            "model",
            expected="a torch.nn.Module",
            found=found,
            fix="Write verify(model, loss_fn, batch).",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel) or any(
        map(is_sharded, model.parameters())
    ):
        fix = (
            "Verify the bare module in one process: ddp.module, or the model before"
            " fully_shard."
        )
        found = f"a {type(model).__name__} over several processes"
        raise explain(
            ArgumentTypeError,
            "model",
            expected="a module of one process",
            found=found,
            fix=fix,
        )
    lazy = [
        name
        for name, parameter in model.named_parameters()
        if nn.parameter.is_lazy(parameter)
    ]
    if lazy:
        fix = "Run the model once before."
        raise explain(
            ArgumentValueError,
            "model",
            expected="parameters with numbers",
            found=f"{lazy[0]}, which is lazy",
            fix=fix,
        )
