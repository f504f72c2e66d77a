"""``gradaccum_torch.backward``: the gradient and the loss of the large batch from a
single call, with the activations of only one micro-batch in memory.

The backward pass of each micro-batch starts from its weight factor instead of from 1,
so that no multiplication is added to the user's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum import AutoMicroBatchSize, kit
from gradaccum_torch.large_batch.auto import run_divided
from gradaccum_torch.large_batch.batch import (
    MergeAux,
    Weight,
    copy_without_graph,
    map_tensors,
    require_scalar,
)
from gradaccum_torch.large_batch.gradients import GradientsInGrad, options_of_call
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import processes, untraced_within


@untraced_within
def backward(
    loss_fn: Callable[..., Any],
    *batch: Any,
    steps: int | None = None,
    micro_batch_size: int | str | AutoMicroBatchSize | None = None,
    reduction: str | None = None,
    weight: Weight = None,
    axes: kit.Nest = 0,
    has_aux: bool = False,
    merge_aux: MergeAux = None,
    optimizer: AccumulatingOptimizer | None = None,
    modules: Sequence[nn.Module] = (),
) -> Any:
    """Add the gradient of a large batch to ``.grad``, and return the loss of the large
    batch. The call splits the large batch into micro-batches, and runs the forward and
    backward pass of one micro-batch after the other.

    The result is the same as from ``loss_fn(*batch).backward()`` if the loss is a mean
    or sum over items. A batch norm in training mode uses the statistics of each
    micro-batch. A loss that couples items needs `gradaccum_torch.coupled_backward`.

    Every leaf tensor that the loss depends on gets its gradient, even a tensor of the
    batch. Hooks of a leaf run once per micro-batch and see only that micro-batch's
    share of the gradient. Half-precision gradients are summed in float32 and cast once.
    If `loss_fn` raises, or you press Ctrl-C, then ``.grad``, torch's global random
    states and the buffers of `modules` are restored. With an automatic size, the random
    states of Python and NumPy are restored too.

    Args:
        loss_fn: ``loss_fn(*micro_batch)`` returns a loss, a tensor of shape ``()``, or
            ``(loss, aux)`` if `has_aux`.
        batch: any nested structure of tuples, lists, dicts and dataclasses. Its tensors
            and arrays are split into views. Plain numbers, strings and None are passed
            unchanged to every micro-batch. For keyword arguments pass a dict:
            ``backward(lambda b: model(**b).loss, b, steps=4)``.
        steps: the maximum number of micro-batches, each of ceil(items / steps) items.
        micro_batch_size: the number of items in a micro-batch. With ``"auto"`` or an
            `AutoMicroBatchSize` (whose `memory_limit` is ignored), a micro-batch
            contains as many items as fit into the device's memory: if memory runs out,
            the call starts over with half as many. On a CPU pass a number, because the
            operating system kills a process that runs out of memory. An automatic size
            requires that all workers of the optimizer's group, or of the default
            process group, make the call together.
        reduction: ``"mean"`` if `loss_fn` returns a mean; the means are averaged with
            their weights. ``"sum"`` adds the losses. ``"sum_per_item"`` if `loss_fn`
            returns a sum; the sum of all losses is divided by the total weight.
            Default: the reduction of `optimizer`, or ``"mean"`` without an optimizer.
        weight: either one number per item, shape ``(items,)``, or a function
            ``weight(*micro_batch)``. Numbers are summed over each micro-batch. A
            function is called for all micro-batches before the first forward pass.
            Default: the number of items. A micro-batch of weight 0 adds nothing. If all
            micro-batches have weight 0, ``.grad`` is not changed and the loss is 0.
        axes: the batch axis of each leaf of `batch`: one number for all leaves, or a
            nested structure of numbers, in which a number may stand for a whole
            substructure. None means that a leaf is not split. Each array in a list must
            contain all items. If a list may have as many elements as the batch has
            items, pass an axis for each element, or None to pass the list unsplit.
        has_aux: whether `loss_fn` returns ``(loss, aux)``. Tensors in `aux` are
            detached.
        merge_aux: how the `aux` values of the micro-batches are combined.
            ``"concatenate"`` concatenates their tensors, which must have one row per
            item. A function ``merge_aux(auxes, weights)`` is called with the list of
            all `aux` values and the list of the micro-batches' weights. By default the
            list of `aux` values is returned.
        optimizer: an optimizer wrapped with ``steps=None``. The micro-batches form one
            window of this optimizer, which the call closes with one update. If a hook
            from `register_step_pre_hook` raises, call ``opt.discard()`` or load a state
            before you continue.
        modules: the modules whose buffers, such as a batch norm's statistics, are
            restored if an error is raised. Default: none. With an automatic size, or in
            several processes without `optimizer`, the default is all modules that
            `loss_fn` calls, and compiled code is rejected, because it may hide modules.

    Returns:
        The loss, detached, shape ``()``, in the dtype of `loss_fn`'s loss; or ``(loss,
            aux)``. With several workers, both cover only this worker's batch. A worker
            with an empty batch takes part in the other workers' window, and returns the
            loss 0 and None as `aux`.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, the batch cannot be
            divided in this way, or the loss is not a scalar.
        UsageError: `loss_fn` calls ``backward()`` or ``zero_grad()``; or `optimizer`
            was not passed, although the parameters belong to a wrapped optimizer or
            several workers train them.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> loss = backward(lambda x, y: (model(x) - y).square().mean(), x, y, steps=4)
        >>> model.weight.grad.shape
        torch.Size([1, 3])
    """
    division = kit.make_division(steps, micro_batch_size)
    options = options_of_call(optimizer, reduction)
    is_automatic = isinstance(division.micro_batch_size, AutoMicroBatchSize)
    is_alone = optimizer is None and processes() > 1

    loss, aux = run_divided(
        partial(run_micro_batches, loss_fn, has_aux=has_aux, merge_aux=merge_aux),
        loss_fn,
        kit.LargeBatch(batch, axes, weight),
        division,
        options,
        optimizer,
        modules,
        notes_calls=not modules and (is_automatic or is_alone),
    )
    return (loss, aux) if has_aux else loss


def run_micro_batches(
    loss_fn: Callable[..., Any],
    micro_batches: list[kit.MicroBatch],
    destination: GradientsInGrad,
    has_aux: bool,
    merge_aux: MergeAux,
) -> tuple[Tensor, Any]:
    """Run the forward and backward passes of all micro-batches. Return the large
    batch's loss and its `aux`.
    """
    if not micro_batches:
        return torch.zeros(()), None
    total: Tensor | None = None
    auxes = []
    for micro_batch in micro_batches:
        loss, aux = differentiate(loss_fn, micro_batch, destination, has_aux)
        if total is None:
            dtype = loss.dtype
            wide_dtype = torch.promote_types(dtype, torch.float32)
            total = torch.zeros_like(loss, dtype=wide_dtype)
        if micro_batch.factor:
            share = micro_batch.factor / destination.divisor
            total.add_(loss.to(wide_dtype), alpha=share)
        auxes.append(aux)
    assert total is not None
    if not has_aux:
        return total.to(dtype), None
    weights = [micro_batch.weight for micro_batch in micro_batches]
    return total.to(dtype), kit.merged_aux(auxes, weights, merge_aux, torch.cat)


def differentiate(
    loss_fn: Callable[..., Any],
    micro_batch: kit.MicroBatch,
    destination: GradientsInGrad,
    has_aux: bool,
) -> tuple[Tensor, Any]:
    """Run the forward and backward pass of one micro-batch, and free its graph. Return
    the micro-batch's loss and `aux`.
    """
    loss = loss_fn(*micro_batch.arguments)
    aux = None
    if has_aux:
        if isinstance(loss, Tensor):
            raise kit.missing_aux_error(loss)
        loss, aux = loss
        aux = map_tensors(copy_without_graph, aux)
    loss = require_scalar(loss)
    destination.add_loss(loss, micro_batch.weight, micro_batch.factor)
    return loss.detach(), aux
