"""``gradaccum_torch.backward``: the large batch's gradient and loss from one call, with
the activations of one micro-batch.

Each loss is differentiated with its share as the incoming gradient, so no operation is
added to the user's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradaccum import AutoMicroBatchSize, kit
from gradaccum_torch.large_batch import batch as parts
from gradaccum_torch.large_batch.auto import (
    has_nothing_to_share,
    run_divided,
    share_nothing,
)
from gradaccum_torch.large_batch.batch import (
    LargeBatch,
    Merged,
    MicroBatch,
    Shares,
    Split,
    Weight,
)
from gradaccum_torch.large_batch.gradients import (
    Collector,
    LossesInGrad,
    LossesInWindow,
    delivering,
    require_optimizer,
)
from gradaccum_torch.large_batch.replay import reached_by
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private.names import untraced_within


@untraced_within
def backward(
    loss_fn: Callable[..., Any],
    *batch: Any,
    steps: int | None = None,
    micro_batch_size: int | str | AutoMicroBatchSize | None = None,
    micro_batch_weight: float | None = None,
    reduction: str | None = None,
    weight: Weight = None,
    axes: kit.Nest = 0,
    split: Split | None = None,
    aux: kit.Nest = None,
    optimizer: AccumulatingOptimizer | None = None,
) -> Any:
    """Add the large batch's gradient to ``.grad``, one micro-batch at a time, and
    return its loss.

    The result is that of ``loss_fn(*batch).backward()`` where the loss is a mean or sum
    over items. A batch norm in training takes its statistics from each micro-batch, and
    a loss that couples items needs `gradaccum_torch.coupled_backward`.

    Every leaf that the loss reaches gets its gradient, a batch tensor too; its hooks
    run once per micro-batch and see its share. Half-precision gradients are summed in
    float32 and cast once. If something raises, Ctrl-C included, ``.grad``, random
    states and buffers of modules in the closure of `loss_fn` are what they were.

    Args:
        loss_fn: ``loss_fn(*micro_batch)`` returns a loss, a real floating-point tensor
            of shape ``()``, or ``(loss, aux)`` if `aux` is given.
        batch: any nest of tuples, lists, dicts and dataclasses of tensors and arrays,
            cut into views. A plain number, text or None is passed whole.
        steps: at most so many micro-batches, of ceil(items / steps) items.
        micro_batch_size: items of a micro-batch; ``"auto"`` or an `AutoMicroBatchSize`
            without a limit: the most that fit into the memory of a device; when it runs
            out, the call starts over with half as many. All workers of the optimizer's
            group, or of the default process group, make such a call together.
        micro_batch_weight: consecutive items are packed up to this weight, by `weight`,
            an array.
        reduction: ``"mean"``: `loss_fn` returns a mean, and each counts by its weight;
            ``"sum"``: losses are added; ``"sum_per_item"``: `loss_fn` returns a sum, and
            the total is divided by the total weight. Default: the reduction of
            `optimizer`, else ``"mean"``.
        weight: a callable, ``weight(*micro_batch)``, called for all micro-batches
            before the first one runs; or one number per item, shape ``(items,)``, which
            are summed. Default: the number of items. Weight 0 adds nothing; where all
            have weight 0, ``.grad`` stays as it is and the loss is 0.
        axes: a prefix nest of `batch`: the batch axis of each leaf; None for what is
            passed whole; "items" for a list or tuple of items, as
            ``axes=(0, "items")``. A list that may be as long as the batch needs it.
        split: your own division: ``split(*batch)``, or ``split(*batch, steps=steps)``,
            returns the micro-batches, each a tuple of arguments or the only one.
        aux: a prefix nest of kinds, by which the aux merges per leaf: ``"sum"``,
            ``"mean"`` and ``"weighted_mean"`` (by the weight), ``"max"``, ``"min"``,
            ``"concatenate"``. Leaves are detached.
        optimizer: wrapped with ``steps=None``. The micro-batches are its window, which
            the call closes with one update; if a step pre-hook raises, it stays full.

    Returns:
        The loss, detached, shape ``()``, in the dtype of `loss_fn`'s; or
        ``(loss, aux)``. With several workers it is this one's; a worker with an empty
        batch takes part in the others' window, and returns the loss 0 and the aux None.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, the batch cannot be
            divided so, or `loss_fn` returns something else.
        UsageError: `loss_fn` calls ``backward()``, or its parameters are a wrapped
            optimizer's or several workers' and `optimizer` is not given.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> loss = backward(lambda x, y: (model(x) - y).square().mean(), x, y, steps=4)
        >>> model.weight.grad.shape
        torch.Size([1, 3])
    """
    division = kit.make_division(
        steps, micro_batch_size, micro_batch_weight, own_split=split is not None
    )
    call = _Call(
        loss_fn, LargeBatch(batch, axes, weight, split), reduction, aux, optimizer
    )
    if optimizer is not None and has_nothing_to_share(call.large, optimizer):
        nothing = share_nothing(division, optimizer)
        return nothing if aux is None else (nothing, None)
    return run_divided(
        call.run, division, loss_fn, call.large, call.reached.modules, optimizer
    )


class _Call:
    """One checked call, whose `run` leaves everything as it was if it raises."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        large: LargeBatch,
        reduction: str | None,
        aux: kit.Nest,
        optimizer: object,
    ) -> None:
        parts.require_function("loss_fn", loss_fn)
        if aux is not None:
            parts.require_kinds(aux)
        self._loss_fn = loss_fn
        self._aux = aux
        self.large = large
        if optimizer is None:
            self._optimizer = None
        else:
            self._optimizer = require_optimizer(optimizer, reduction)
        if self._optimizer is None:
            own = "mean"
        else:
            own = self._optimizer.whole_window().options.reduction
        self._options = kit.make_options(
            None, reduction=own if reduction is None else reduction
        )
        self.reached = reached_by(loss_fn)
        if optimizer is None:
            parts.require_alone(self.reached.modules)

    def run(self, division: kit.Division, agreed: Callable[[], None]) -> Any:
        micro_batches = self.large.micro_batches(division)
        shares = parts.shares_of([each.weight for each in micro_batches], self._options)
        collector: Collector = (
            LossesInGrad(shares)
            if self._optimizer is None
            else LossesInWindow(self._optimizer, shares)
        )
        with delivering(collector, self.reached, self.large.devices()):
            return self._accumulate(micro_batches, shares, collector, agreed)

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        shares: Shares,
        collector: Collector,
        agreed: Callable[[], None],
    ) -> Any:
        merged = None if self._aux is None else Merged(self._aux)
        pairs = zip(micro_batches, shares.contributions, strict=True)
        losses = [self._differentiated(*pair, collector, merged) for pair in pairs]
        loss = parts.large_batch_loss(losses, shares)
        returned = loss if merged is None else (loss, merged.result())
        agreed()
        collector.close()
        return returned

    def _differentiated(
        self,
        micro_batch: MicroBatch,
        contribution: float,
        collector: Collector,
        merged: Merged | None,
    ) -> Tensor:
        """Return the loss of one micro-batch; its graph and its aux are freed as this
        returns.
        """
        loss, aux = parts.evaluated(
            self._loss_fn, micro_batch, has_aux=merged is not None
        )
        collector.require_untouched()
        if merged is not None:
            merged.add(aux, micro_batch)
        collector.add(loss, micro_batch.weight, contribution)
        # The next micro-batch's may come in the same memory, from the replay of a CUDA
        # graph.
        return loss.detach().clone()
