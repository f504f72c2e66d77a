"""``gradaccum_torch.backward``: the large batch's gradient and loss from one call, with the activations of one micro-batch.

Each loss is differentiated with its share as the incoming gradient: no operation is added to the user's graph, and nothing is left to
divide at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, ArgumentValueError, AutoMicroBatchSize, kit
from gradaccum_torch.large_batch.auto import has_nothing_to_share, run_divided, share_nothing
from gradaccum_torch.large_batch.batch import (
    LargeBatch,
    MicroBatch,
    Shares,
    Split,
    Weight,
    cat,
    evaluated,
    large_batch_loss,
    require_alone,
    require_function,
    shares_of,
)
from gradaccum_torch.large_batch.gradients import Gradients, InWindow, delivering, require_optimizer
from gradaccum_torch.large_batch.replay import reached_by
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.private import untraced_within
from gradaccum_torch.sums.arithmetic import HALF


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
    """Add the large batch's gradient to ``.grad``, one micro-batch at a time, and return its loss.

    The result is that of ``loss_fn(*batch).backward()`` where the loss is a mean or sum over items. A batch norm in training takes its
    statistics from each micro-batch, and a loss that couples items needs `gradaccum_torch.coupled_backward`.

    Every leaf that the loss reaches gets its gradient, a batch tensor too; its hooks run once per micro-batch and see its share.
    Half-precision gradients are summed in float32 and cast once. The sum is added to ``.grad`` at the end. If something raises, Ctrl-C
    included, ``.grad``, random states and buffers of modules in the closure of `loss_fn` are what they were.

    Args:
        loss_fn: ``loss_fn(*micro_batch)`` returns a scalar loss, a real floating-point tensor of shape ``()``, or ``(loss, aux)`` if `aux`
            is given. It must not call ``backward()`` itself.
        batch: the arguments of `loss_fn` for the large batch: any nest of tuples, lists, dicts and dataclasses of tensors and arrays, cut
            into views. A plain number, text or None is passed whole to each micro-batch.
        steps: at most so many micro-batches, of ceil(items / steps) items; the last one may be smaller.
        micro_batch_size: items of a micro-batch; ``"auto"`` or an `AutoMicroBatchSize` without a limit: the most that fit into the
            memory of a device; when it runs out, the call starts over with half as many. All workers of the optimizer's group, or of the
            default process group, make such a call together.
        micro_batch_weight: consecutive items are packed up to this weight, by `weight`, an array.
        reduction: ``"mean"``: `loss_fn` returns a mean, and each counts by its weight; ``"sum"``: losses are added; ``"item_mean"``:
            `loss_fn` returns a sum, and the total is divided by the total weight. Default: the reduction of `optimizer`, else ``"mean"``.
        weight: the weight of a micro-batch: a callable, ``weight(*micro_batch)``, called for all of them before the first one runs; or one
            number per item, shape ``(items,)``, which are summed. Default: its number of items. Weight 0 adds nothing; where all have
            weight 0, ``.grad`` stays as it is and the loss is 0.
        axes: a prefix nest of `batch`: the batch axis of each leaf; None for what is passed whole; "items" for a list or tuple of items,
            as ``axes=(0, "items")``. A list that may be as long as the batch needs it.
        split: your own division: ``split(*batch)``, or ``split(*batch, steps=steps)``, returns the micro-batches, each a tuple of
            arguments, or its only argument.
        aux: a prefix nest of kinds, by which the aux merges per leaf: ``"sum"``, ``"mean"`` (over items), ``"weighted_mean"``, ``"max"``,
            ``"min"``, ``"concatenate"``. Leaves are detached.
        optimizer: an optimizer wrapped with ``steps=None``. The micro-batches are then its window, which the call closes with one update;
            see ``optimizer.result``. If a step pre-hook raises, the window stays full, as after ``flush()``.

    Returns:
        The loss, detached, shape ``()``, in the dtype of `loss_fn`'s; or ``(loss, aux)``. With several workers it is this worker's; a
        worker whose batch is empty takes part in the window of the others, and returns the loss 0 and the aux None.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, the batch cannot be divided so, or `loss_fn` returns something else.
        UsageError: `loss_fn` calls ``backward()``, or its parameters are a wrapped optimizer's or several workers' and `optimizer` is not
            given.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(8, 3), torch.randn(8, 1)
        >>> loss = backward(lambda x, y: (model(x) - y).square().mean(), x, y, steps=4)
        >>> model.weight.grad.shape
        torch.Size([1, 3])
    """
    division = kit.make_division(steps, micro_batch_size, micro_batch_weight, own_split=split is not None)
    call = _Call(loss_fn, LargeBatch(batch, axes, weight, split), reduction, aux, optimizer)
    if optimizer is not None and has_nothing_to_share(call.large, optimizer):
        nothing = share_nothing(division, optimizer)
        return nothing if aux is None else (nothing, None)
    return run_divided(call.run, division, loss_fn, call.large, call.reached.modules, optimizer)


class _Call:
    """One checked call. `run` leaves everything as it was if it raises, so it can start over with another size."""

    def __init__(self, loss_fn: Callable[..., Any], large: LargeBatch, reduction: str | None, aux: kit.Nest, optimizer: object) -> None:
        require_function("loss_fn", loss_fn)
        if aux is not None:
            require_kinds(aux)
        self._loss_fn, self._aux, self.large = loss_fn, aux, large
        if reduction is not None:  # An unknown one is refused as such, whatever the optimizer has.
            kit.make_options(None, reduction=reduction)
        self._optimizer = None if optimizer is None else require_optimizer(optimizer, reduction)
        own = "mean" if self._optimizer is None else self._optimizer.whole_window().options.reduction
        self._options = kit.make_options(None, reduction=own if reduction is None else reduction)
        self.reached = reached_by(loss_fn)
        if optimizer is None:
            require_alone(self.reached.modules)

    def run(self, division: kit.Division, agreed: Callable[[], None]) -> Any:
        """Differentiate the micro-batches of `division`; call `agreed` before their gradients are delivered."""
        micro_batches = self.large.micro_batches(division)
        shares = shares_of([each.weight for each in micro_batches], self._options)
        collector: Collector = LossesInGrad(shares) if self._optimizer is None else LossesInWindow(self._optimizer, shares)
        with delivering(collector, self.reached, self.large.devices()):
            return self._accumulate(micro_batches, shares, collector, agreed)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], shares: Shares, collector: Collector, agreed: Callable[[], None]) -> Any:
        merged = None if self._aux is None else Merged(self._aux)
        pairs = zip(micro_batches, shares.contributions, strict=True)
        losses = [self._differentiated(*pair, collector, merged) for pair in pairs]
        loss = large_batch_loss(losses, shares)
        returned = loss if merged is None else (loss, merged.result())
        agreed()
        collector.close()
        return returned

    def _differentiated(self, micro_batch: MicroBatch, contribution: float, collector: Collector, merged: Merged | None) -> Tensor:
        """Return the loss of one micro-batch; its graph and its aux are freed as this returns."""
        loss, aux = evaluated(self._loss_fn, micro_batch, has_aux=merged is not None)
        collector.require_untouched()
        if merged is not None:
            merged.add(aux, micro_batch)
        collector.add(loss, micro_batch.weight, contribution)
        return loss.detach().clone()  # The next micro-batch's may come in the same memory, from the replay of a CUDA graph.


# The losses of the micro-batches, one after the other, on their way to ``.grad`` or into a window.


class LossesInGrad(Gradients):
    """The collector into ``.grad``."""

    def __init__(self, shares: Shares) -> None:
        super().__init__()
        self._shares = shares
        self._unit: float | None = None
        """The divisor that the incoming gradients have already; what is left of it divides the sum at the end."""

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        """Differentiate the loss of a micro-batch, shape ``()``."""
        if contribution:
            self.reach(loss)
            if self._unit is None:
                self._unit = self._unit_for(loss)
            self.backward([loss], [torch.full_like(loss, contribution / self._unit, requires_grad=False)])

    def close(self) -> None:
        """Deliver the gradients after the last micro-batch."""
        self.deliver(1.0 if self._unit is None else self._shares.divisor / self._unit)

    def _unit_for(self, loss: Tensor) -> float:
        """Return the whole divisor, so that no pass over the sums is needed.

        Half-precision gradients are divided as the wide sums are cast; there the largest micro-batch begins with 1, against underflow.
        """
        if self.are_half() or loss.dtype in (torch.float16, torch.bfloat16):
            return max(self._shares.contributions)
        return self._shares.divisor


class LossesInWindow(InWindow):
    """The collector into the next window of a wrapped optimizer, which it closes."""

    def __init__(self, optimizer: AccumulatingOptimizer, shares: Shares) -> None:
        super().__init__(optimizer)
        self._shares = shares

    def add(self, loss: Tensor, weight: float, contribution: float) -> None:
        if contribution:
            self.reach(loss)
        self._optimizer.backward(loss, weight=weight)
        self._others.note()
        self._optimizer.step()

    def close(self) -> None:
        self.deliver(self._shares.divisor)


Collector = LossesInGrad | LossesInWindow


# The other outputs of a loss function, merged as they come into those of the large batch. The core has the arithmetic.


class _Ops:
    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)

    def widened(self, value: Tensor) -> Tensor:
        if value.dtype in HALF:
            return value.float()
        return value.long() if value.dtype is torch.bool else value


_OPS = _Ops()


class _Sums(NamedTuple):
    """The aux of the micro-batches so far, leaf by leaf."""

    nest: kit.Nest
    paths: list[str]
    kinds: list[str]
    so_far: list[Any]
    items: int = 0
    weight: float = 0.0


class Merged:
    """The aux of the micro-batches seen so far."""

    def __init__(self, declared: kit.Nest) -> None:
        self._declared = declared
        self._sums: _Sums | None = None
        require_kinds(declared)

    def add(self, aux: kit.Nest, micro_batch: MicroBatch) -> None:
        """Merge one micro-batch's aux; leaves are tensors of any dtype or Python numbers, and are detached."""
        leaves = kit.leaves_of(aux, "aux")
        paths, sums = [leaf.path for leaf in leaves], self._sums
        kinds = kit.kinds_of(self._declared, aux) if sums is None else sums.kinds
        if sums is not None and paths != sums.paths:
            fix = "Return the same structure for every micro-batch."
            raise kit.explain(ArgumentValueError, "aux", expected=f"the leaves {sums.paths}", found=f"{paths}", fix=fix)
        values = [_value(leaf.path, leaf.value) for leaf in leaves]
        shares = [self._share(*each, micro_batch) for each in zip(kinds, paths, values, strict=True)]
        if sums is None:
            so_far: list[Any] = [[given] if kind == "concatenate" else given for kind, given in zip(kinds, shares, strict=True)]
            sums = _Sums(aux, paths, kinds, so_far)
        else:
            so_far = [_joined(*each) for each in zip(kinds, sums.so_far, shares, paths, strict=True)]
        self._sums = sums._replace(so_far=so_far, items=sums.items + (micro_batch.items or 0), weight=sums.weight + micro_batch.weight)

    def result(self) -> kit.Nest:
        """Return the large batch's aux. Means of half precision are in float32; a total weight of 0 gives 0."""
        assert self._sums is not None
        nest, paths, kinds, so_far, items, weight = self._sums
        return kit.with_leaves(nest, iter([_finished(*each, items, weight) for each in zip(kinds, so_far, paths, strict=True)]))

    def _share(self, kind: str, path: str, value: Tensor, micro_batch: MicroBatch) -> Tensor:
        if kind == "concatenate" and value.dim() == 0:
            raise kit.concatenate_error(path, "a scalar")
        if kind == "mean" and micro_batch.items is None:
            fix = "Declare weighted_mean for this leaf: a micro-batch of your own split has a weight, and no number of items."
            raise kit.explain(ArgumentValueError, path, expected="a kind that needs no number of items", got=kind, fix=fix)
        if kind == "weighted_mean" and micro_batch.weight == 0:  # Adds nothing, even if it is NaN.
            value = torch.zeros_like(value)
        return kit.share(kind, value, micro_batch.items, micro_batch.weight, _OPS)


def _finished(kind: str, so_far: Any, path: str, items: int, weight: float) -> Tensor:
    made: Tensor = cat(path, so_far) if kind == "concatenate" else kit.finished(kind, so_far, items, weight or 1.0)
    return made


def require_kinds(declared: kit.Nest) -> None:
    inside = [(step, part) for step, part in enumerate(declared)] if isinstance(declared, list | tuple) else kit.children_of(declared)
    if inside is None:
        kit.require_kind(declared)
    for _, part in inside or ():
        require_kinds(part)


def _value(path: str, value: object) -> Tensor:
    """Return `value` as a tensor of its own without a graph; a Python float in float64."""
    if isinstance(value, Tensor):
        return value.detach().clone()  # The next micro-batch may write into it: a buffer, or what a CUDA graph returns.
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    fix = "Return tensors and numbers."
    raise kit.explain(ArgumentTypeError, path, expected="a tensor or a number", got=value, fix=fix)


def _joined(kind: str, so_far: Any, given: Tensor, path: str) -> Any:
    if kind == "concatenate":
        so_far.append(given)
        return so_far
    if so_far.shape != given.shape:
        fix = "Reduce it to one shape in the loss function, or declare concatenate."
        raise kit.explain(ArgumentValueError, path, expected=f"the shape {tuple(so_far.shape)}", found=f"{tuple(given.shape)}", fix=fix)
    return kit.merged(kind, so_far, given, _OPS)
