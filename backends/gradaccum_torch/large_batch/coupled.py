"""``gradaccum_torch.coupled_backward``: the gradient of a loss that couples all items
(contrastive, covariance, load balance), computed one micro-batch at a time.

The first pass computes all outputs without gradients. Then the loss of all outputs is
differentiated once, with respect to the outputs and to the loss's own parameters, such
as a temperature. The second pass runs each micro-batch again, and backpropagates the
gradient of the micro-batch's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum.kit import (
    LargeBatch,
    MicroBatch,
    Nest,
    concatenated,
    make_division,
    make_options,
    require_rows,
)
from gradaccum_torch.large_batch.auto import run_divided
from gradaccum_torch.large_batch.batch import (
    copy_without_graph,
    map_tensors,
    require_scalar,
    tensors_of,
)
from gradaccum_torch.large_batch.gradients import GradientsInGrad, options_of_call
from gradaccum_torch.large_batch.replay import Buffers
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import untraced_within


@untraced_within
def coupled_backward(
    outputs_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    *batch: Any,
    steps: int | None = None,
    micro_batch_size: int | str | AutoMicroBatchSize | None = None,
    axes: Nest = 0,
    optimizer: AccumulatingOptimizer | None = None,
    modules: Sequence[nn.Module] = (),
) -> Tensor:
    """Add the gradient of ``loss_fn(outputs_fn(*batch))`` to ``.grad``, one micro-batch
    at a time, and return the loss.

    `outputs_fn` runs twice per micro-batch, and must return the same values both times,
    up to rounding. Before the second run, the buffers of the called modules are
    restored, and so are the global random states of Python, NumPy and torch. A batch
    norm's statistics are updated as in a single pass.

    Args:
        outputs_fn: ``outputs_fn(*micro_batch)`` returns a nested structure of tensors,
            which are concatenated along their first axis. A tensor may have one row per
            item or any other number of rows, for example one per token.
        loss_fn: ``loss_fn(outputs)`` returns a loss, a tensor of shape ``()``.
        batch: as for `gradaccum_torch.backward`.
        steps: as for `gradaccum_torch.backward`.
        micro_batch_size: as for `gradaccum_torch.backward`.
        axes: as for `gradaccum_torch.backward`.
        optimizer: as for `gradaccum_torch.backward`. A loss scale multiplies the
            gradients of the outputs and of the loss's own parameters. With several
            workers, each loss couples the items of one worker. If the optimizer's
            reduction is ``"mean"``, the update uses the gradient of the mean of the
            workers' losses, weighted by their numbers of items. With
            ``"sum_per_item"``, this mean is unweighted. With ``"sum"``, the losses are
            added.
        modules: the modules whose buffers are restored. Default: the modules that are
            called. Pass this argument if the functions run compiled code, because
            compiled code may hide the modules that it calls.

    Returns:
        The loss, detached, shape ``()``.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, the batch cannot be
            divided in this way, or the loss is not a scalar.
        UsageError: the second run returns different outputs; `optimizer` was wrapped
            with ``on_overflow="drop_micro_batch"``; or `optimizer` was not passed,
            although the parameters belong to a wrapped optimizer or several workers
            train them.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 4)
        >>> x = torch.randn(8, 3)
        >>> coupling = lambda z: torch.cov(z.T).triu(1).square().sum()
        >>> loss = coupled_backward(model, coupling, x, steps=4)
        >>> model.weight.grad.shape
        torch.Size([4, 3])
    """
    division = make_division(steps, micro_batch_size)
    options = options_of_call(optimizer, None)
    if options.on_overflow == "drop_micro_batch":
        raise UsageError(
            "optimizer: expected an optimizer that applies or skips all micro-batches"
            ' together; got an optimizer with on_overflow="drop_micro_batch". Write'
            ' on_overflow="skip_window".'
        )
    # There is only one loss, which covers all items, so its gradient is not divided.
    # With several workers and reduction="mean", however, the workers' losses are
    # weighted by their numbers of items.
    is_shared = optimizer is not None and optimizer.whole_window().is_shared
    if not is_shared or options.reduction != "mean":
        options = make_options(None, reduction="sum")

    def run(micro_batches: list[MicroBatch], destination: GradientsInGrad) -> Tensor:
        return run_twice(outputs_fn, loss_fn, micro_batches, destination)

    return run_divided(
        run,
        outputs_fn,
        LargeBatch(batch, axes),
        division,
        options,
        optimizer,
        modules,
        notes_calls=not modules,
        runs_twice=True,
    )


def run_twice(
    outputs_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    micro_batches: list[MicroBatch],
    destination: GradientsInGrad,
) -> Tensor:
    if not micro_batches:
        return torch.zeros(())
    before = destination.before
    random_states = []
    nests = []
    with torch.no_grad():
        for micro_batch in micro_batches:
            random_states.append(before.random_state())
            outputs = outputs_fn(*micro_batch.arguments)
            outputs = map_tensors(copy_without_graph, outputs)
            for tensor in tensors_of(outputs):
                if not tensor.ndim:
                    require_rows("outputs_fn", (), micro_batch.items)
            nests.append(outputs)
    # Clear the cache of an enclosing autocast, because before torch 2.8 it may contain
    # weights that were cast without a graph.
    torch.clear_autocast_cache()
    all_outputs = Outputs(nests)
    loss = require_scalar(loss_fn(all_outputs.nest))
    random_state_after = before.random_state()
    buffers_after = Buffers(before.buffers.modules.values())
    destination.ignore(map(id, all_outputs.tensors))
    # With several workers and reduction="mean", the divisor is the number of items;
    # otherwise it is 1.
    destination.add_loss(loss, destination.divisor, destination.divisor)
    value = loss.detach().clone()
    del loss  # This also frees the graph of all items.
    before.buffers.put_back()
    for index, micro_batch in enumerate(micro_batches):
        random_states[index].put_back()
        with torch.enable_grad():
            tensors, gradients = all_outputs.gradients_of(
                index, outputs_fn(*micro_batch.arguments)
            )
        if tensors:
            destination.add_outputs(tensors, gradients)
        del tensors  # This also frees their graph.
    all_outputs.require_same()
    random_state_after.put_back()
    buffers_after.put_back()
    return value


class Outputs:
    """The outputs of `outputs_fn` for all micro-batches, concatenated. `outputs_fn`
    runs twice for each micro-batch: the first pass computes these outputs without a
    graph, and the second pass computes the same outputs with a graph.
    """

    def __init__(self, nests: list[Nest]) -> None:
        columns = zip(*map(tensors_of, nests), strict=True)
        self._starts = [[0, *accumulate(map(len, column))] for column in columns]
        """For each output tensor, the index of each micro-batch's first row, followed
        by the total number of rows.
        """
        self.nest = concatenated(nests, torch.cat)
        nests.clear()
        self.tensors = tensors_of(self.nest)
        for tensor in self.tensors:
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        self._differences: list[Tensor] = []
        """Whether the second pass produced different values: one scalar bool tensor for
        each output tensor of each micro-batch.
        """

    def gradients_of(
        self, index: int, outputs: Nest
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return a list of the tensors in `outputs`, and a list of the loss's gradients
        with respect to these tensors. `outputs` is the return value of `outputs_fn` for
        micro-batch `index` in the second pass. Tensors without a gradient are left out.

        Also record whether `outputs` differ from the first pass, for `require_same`.
        """
        tensors = []
        gradients = []
        for tensor, starts, new_tensor in zip(
            self.tensors, self._starts, tensors_of(outputs), strict=True
        ):
            rows = slice(*starts[index : index + 2])
            self._differences.append(
                differs(tensor.detach()[rows], new_tensor.detach())
            )
            if new_tensor.requires_grad and tensor.grad is not None:
                tensors.append(new_tensor)
                gradients.append(tensor.grad[rows].to(new_tensor.dtype))
        return tensors, gradients

    def require_same(self) -> None:
        """Raise unless both passes produced the same outputs up to rounding. This
        synchronizes with the device.
        """
        if any(self._differences):
            raise UsageError(
                "outputs_fn: expected a function that returns the same outputs when it"
                " is called again; got outputs that differed by more than rounding"
                " error in the second pass. Draw random numbers from the global"
                " generators of torch, NumPy or Python, and keep any state that changes"
                " between calls in module buffers."
            )


def differs(first: Tensor, second: Tensor) -> Tensor:
    """Return whether the tensors differ, as a scalar bool tensor. Floating-point and
    complex tensors differ if they agree in fewer than half of the digits. The result is
    false if either tensor contains NaN, or if `first` contains inf.
    """
    if not (first.is_floating_point() or first.is_complex()):
        return (first != second).any()
    tolerance = math.sqrt(torch.finfo(first.dtype).eps)
    wide_dtype = torch.promote_types(first.dtype, torch.float32)
    first = first.to(wide_dtype)
    distance: Tensor = torch.linalg.vector_norm(second.to(wide_dtype) - first)
    limit: Tensor = tolerance * torch.linalg.vector_norm(first)
    return distance > limit
