"""``gradaccum_torch.backward``: the large batch's gradient and loss from one call, with
the activations of one micro-batch.

Each loss is differentiated with its share as the incoming gradient, so no operation is
added to the user's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum import AutoMicroBatchSize, kit
from gradaccum_torch.large_batch.auto import (
    has_nothing_to_share,
    run_divided,
    share_nothing,
)
from gradaccum_torch.large_batch.batch import (
    CutBatch,
    LargeBatch,
    MergeAux,
    MicroBatch,
    Weight,
    copy_without_graph,
    merge,
    require_scalar,
)
from gradaccum_torch.large_batch.gradients import (
    GradientsInGrad,
    collecting,
    options_of_call,
)
from gradaccum_torch.large_batch.replay import Before
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
    """Add the large batch's gradient to ``.grad``, one micro-batch at a time, and
    return its loss.

    The result is that of ``loss_fn(*batch).backward()`` where the loss is a mean or sum
    over items. A batch norm in training takes its statistics from each micro-batch, and
    a loss that couples items needs `gradaccum_torch.coupled_backward`.

    Every leaf that the loss reaches gets its gradient, a batch tensor too; its hooks
    run once per micro-batch and see its share. Half-precision gradients are summed in
    float32 and cast once. If `loss_fn` raises, Ctrl-C included, ``.grad`` and the
    global random states are what they were, and so are the buffers of `modules`.

    Args:
        loss_fn: ``loss_fn(*micro_batch)`` returns a loss, a tensor of shape ``()``, or
            ``(loss, aux)`` if `has_aux`.
        batch: any nest of tuples, lists, dicts and dataclasses of tensors and arrays,
            cut into views. A plain number, text or None is passed whole. For keywords
            pass a dict: ``backward(lambda b: model(**b).loss, b, steps=4)``.
        steps: at most so many micro-batches, of ceil(items / steps) items.
        micro_batch_size: items of a micro-batch; ``"auto"`` or an `AutoMicroBatchSize`,
            whose limit is ignored: the most that fit into the memory of a device; when
            it runs out, the call starts over with half as many. On a CPU write a
            number, because the system ends a process whose memory runs out. All workers
            of the optimizer's group, or of the default process group, make such a call
            together.
        reduction: ``"mean"``: `loss_fn` returns a mean, and each counts by its weight;
            ``"sum"``: losses are added; ``"sum_per_item"``: `loss_fn` returns a sum, and
            the total is divided by the total weight. Default: the reduction of
            `optimizer`, else ``"mean"``.
        weight: a function, ``weight(*micro_batch)``, called for all micro-batches
            before the first one runs; or one number per item, shape ``(items,)``; a
            micro-batch's are summed. Default: the number of items. Weight 0 adds
            nothing; where all have weight 0, ``.grad`` stays as it is and the loss is 0.
        axes: a prefix nest of `batch`: the batch axis of each leaf, None for what is
            passed whole. The elements of a list each hold all items; a list that may be
            as long as the batch needs an entry for each element, or None.
        has_aux: `loss_fn` returns ``(loss, aux)``; tensors in aux are detached.
        merge_aux: ``"concatenate"``: the tensors of aux have a row per item, and come
            back as those of the large batch; a function, ``merge_aux(auxes, weights)``,
            of a list of one aux per micro-batch and the list of their weights. Default:
            the list of aux comes back.
        optimizer: wrapped with ``steps=None``. The micro-batches are its window, which
            the call closes with one update. If a hook of `register_step_pre_hook`
            raises, ``opt.discard()`` or a load resumes.
        modules: their buffers, such as a batch norm's statistics, are restored if
            something raises. Default: none; with an automatic size all modules that are
            called, and compiled code is refused, as it may hide them.

    Returns:
        The loss, detached, shape ``()``, in the dtype of `loss_fn`'s; or
        ``(loss, aux)``. With several workers both are this worker's; a worker with an
        empty batch takes part in the others' window, and returns the loss 0 and the aux
        None.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, the batch cannot be
            divided so, or the loss is no scalar.
        UsageError: `loss_fn` calls ``backward()`` or ``zero_grad()``; or the parameters
            are a wrapped optimizer's or several workers', and `optimizer` is not given.

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
    large = LargeBatch(batch, axes, weight)
    if optimizer is not None and has_nothing_to_share(large, optimizer):
        loss = share_nothing(division, optimizer)
        return (loss, None) if has_aux else loss
    is_automatic = isinstance(division.micro_batch_size, AutoMicroBatchSize)
    is_alone = optimizer is None and processes() > 1
    notes_calls = not modules and (is_automatic or is_alone)

    def run(division: kit.Division, agree: Callable[[], None]) -> Any:
        cut = large.cut(division, options)
        factors = [micro_batch.factor for micro_batch in cut.micro_batches]
        before = Before(large.tensors, modules, notes_calls=notes_calls)
        with collecting(optimizer, factors, cut.divisor, before) as destination:
            loss, auxes = run_micro_batches(loss_fn, cut, destination, has_aux)
            weights = [micro_batch.weight for micro_batch in cut.micro_batches]
            aux = merge(auxes, weights, merge_aux)
            agree()
        return (loss, aux) if has_aux else loss

    return run_divided(run, division, loss_fn, large, optimizer)


def run_micro_batches(
    loss_fn: Callable[..., Any],
    cut: CutBatch,
    destination: GradientsInGrad,
    has_aux: bool,
) -> tuple[Tensor, list[Any]]:
    """Differentiate all losses; return the large batch's loss, and all aux."""
    total: Tensor | None = None
    auxes = []
    for micro_batch in cut.micro_batches:
        loss, aux = differentiate(loss_fn, micro_batch, destination, has_aux)
        if total is None:
            dtype = loss.dtype
            wide_dtype = torch.promote_types(dtype, torch.float32)
            total = torch.zeros_like(loss, dtype=wide_dtype)
        if micro_batch.factor:
            total += loss.to(wide_dtype) * (micro_batch.factor / cut.divisor)
        auxes.append(aux)
    assert total is not None
    return total.to(dtype), auxes


def differentiate(
    loss_fn: Callable[..., Any],
    micro_batch: MicroBatch,
    destination: GradientsInGrad,
    has_aux: bool,
) -> tuple[Tensor, Any]:
    """Return the loss and the aux of one micro-batch; its graph is freed as this
    returns.
    """
    loss = loss_fn(*micro_batch.arguments)
    aux = None
    if has_aux:
        if isinstance(loss, Tensor):
            raise kit.missing_aux_error(loss)
        loss, aux = loss
        aux = kit.mapped(copy_without_graph, aux)
    loss = require_scalar(loss)
    destination.add_loss(loss, micro_batch.weight, micro_batch.factor)
    return loss.detach(), aux
