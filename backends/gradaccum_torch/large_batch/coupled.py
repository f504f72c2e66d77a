"""``gradaccum_torch.coupled_backward``: a loss of all items together (contrastive, covariance, load balance), one micro-batch at a time.

The mean of such a loss over micro-batches is another loss. So there are two passes. The first computes the outputs of all micro-batches
without gradients. The loss of all outputs is differentiated once, by them and by parameters of its own, such as a temperature. The second
pass computes each micro-batch again, with the same random numbers and from the same buffers, and hands its outputs their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, AutoMicroBatchSize
from gradaccum.kit import Division, Nest, explain, make_division
from gradaccum_torch.large_batch.auto import has_nothing_to_share, run_divided, share_nothing
from gradaccum_torch.large_batch.backward import trained_by
from gradaccum_torch.large_batch.batch import LargeBatch, MicroBatch, Split
from gradaccum_torch.large_batch.checks import require_alone, require_coupled_optimizer, require_function
from gradaccum_torch.large_batch.coupling import CoupledInGrad, CoupledInWindow, Coupler
from gradaccum_torch.large_batch.loss import evaluated
from gradaccum_torch.large_batch.outputs import Outputs
from gradaccum_torch.large_batch.replay import Before, Buffers, RandomState, reached_by
from gradaccum_torch.large_batch.weights import Weight
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private import untraced_within


@untraced_within
def coupled_backward(
    outputs_fn: Callable[..., Any],
    loss_fn: Callable[[Any], Tensor],
    *batch: Any,
    steps: int | None = None,
    micro_batch_size: int | str | AutoMicroBatchSize | None = None,
    micro_batch_weight: float | None = None,
    weight: Weight = None,
    axes: Nest = 0,
    split: Split | None = None,
    optimizer: AccumulatingOptimizer | None = None,
) -> Tensor:
    """Add the gradient of ``loss_fn(outputs_fn(*batch))`` to ``.grad``, one micro-batch at a time, and return the loss.

    `outputs_fn` runs twice per micro-batch, and must give the same both times. Random states (Python's, NumPy's, torch's, and those of
    generators that the functions close over) and buffers are set back for the second run, so that dropout draws the same numbers, and a
    batch norm's statistics move as in one pass over the micro-batches. Both are then as after that one pass and the loss. Outputs of the
    second run that differ from the first by more than rounding raise an error.

    Args:
        outputs_fn: ``outputs_fn(*micro_batch)`` returns a nest of tensors with a leading axis: one row per item, in order. They are
            concatenated along it. Other numbers of rows, as of tokens, are right too.
        loss_fn: ``loss_fn(outputs)`` of the concatenated nest returns a scalar loss, a real floating-point tensor of shape ``()``.
        batch: as for `gradaccum_torch.backward`.
        steps: as there.
        micro_batch_size: as there.
        micro_batch_weight: as there.
        weight: each item's, shape ``(items,)``; only to pack by `micro_batch_weight`, since a micro-batch counts by its outputs alone.
        axes: as there.
        split: as there.
        optimizer: as there. A loss scale multiplies the gradients of the outputs and of the loss's own parameters.

    Returns:
        The loss, detached, shape ``()``.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong, the batch cannot be divided so, outputs have no leading axis, or
            `loss_fn` returns something else.
        UsageError: the second run gives other outputs; a function calls ``backward()``; or `optimizer` drops micro-batches, or is missing.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 4)
        >>> x = torch.randn(8, 3)
        >>> loss = coupled_backward(model, lambda z: torch.cov(z.T).triu(1).square().sum(), x, steps=4)
        >>> model.weight.grad.shape
        torch.Size([4, 3])
    """
    division = make_division(steps, micro_batch_size, micro_batch_weight, own_split=split is not None)
    if weight is not None and (callable(weight) or micro_batch_weight is None):
        fix = "Leave it out, or write micro_batch_weight= and one number per item."
        found = "a weight that nothing is packed by"
        raise explain(ArgumentTypeError, "weight", expected="one number per item, to pack by", found=found, fix=fix)
    large = LargeBatch(batch, axes, _one if weight is None else weight, split)
    call = _CoupledCall(outputs_fn, loss_fn, large, optimizer)
    if optimizer is not None and has_nothing_to_share(large, optimizer):
        return share_nothing(division, optimizer)
    return run_divided(call.run, division, outputs_fn, large, call.reached.modules, optimizer)


class _CoupledCall:
    """One call, checked; `run` can be started over with another size, since it leaves everything as it was if it raises."""

    def __init__(self, outputs_fn: Callable[..., Any], loss_fn: Callable[..., Any], large: LargeBatch, optimizer: object) -> None:
        require_function("outputs_fn", outputs_fn)
        require_function("loss_fn", loss_fn)
        self._outputs_fn, self._loss_fn, self.large = outputs_fn, loss_fn, large
        self._optimizer = None if optimizer is None else require_coupled_optimizer(optimizer)
        self.reached = reached_by(outputs_fn, loss_fn)
        self._require_alone()

    def _require_alone(self) -> None:
        if self._optimizer is None:
            require_alone(self.reached.modules)

    def run(self, division: Division, agreed: Callable[[], None]) -> Tensor:
        """Make both passes over the micro-batches that `division` makes; `agreed` is called before their gradients are delivered."""
        micro_batches = self.large.micro_batches(division)
        coupler: Coupler = CoupledInGrad() if self._optimizer is None else CoupledInWindow(self._optimizer)
        before = Before(self.reached, self.large.devices())
        try:
            with coupler.kept():
                coupler.expect(trained_by(self.reached))
                loss = self._two_passes(micro_batches, coupler, before, agreed)
        except BaseException:
            if not coupler.delivered():
                before.put_back()
            raise
        coupler.flush()
        return loss

    def _two_passes(self, micro_batches: Sequence[MicroBatch], coupler: Coupler, before: Before, agreed: Callable[[], None]) -> Tensor:
        with before.noting():
            outputs, states = self._first_pass(micro_batches, before)
            loss, _ = evaluated(self._loss_fn, MicroBatch((outputs.whole(),), None, 1.0), has_aux=False)
        self._require_alone()
        coupler.require_untouched()
        outputs.require_untouched()
        final_random, final_buffers = before.random_state(), Buffers(self.reached.modules)
        coupler.differentiate(loss, outputs.leaves())
        value = loss.detach().clone()
        del loss  # And with it the graph of all items.
        before.put_buffers_back()
        for place, (micro_batch, state) in enumerate(zip(micro_batches, states, strict=True)):
            state.put_back()
            self._second_pass(place, micro_batch, outputs, coupler)
        outputs.require_same()
        final_random.put_back()
        final_buffers.put_back()
        agreed()
        coupler.close()
        return value

    def _first_pass(self, micro_batches: Sequence[MicroBatch], before: Before) -> tuple[Outputs, list[RandomState]]:
        outputs, states = Outputs(), []
        with torch.no_grad():
            for micro_batch in micro_batches:
                states.append(before.random_state())
                outputs.add(self._outputs_fn(*micro_batch.arguments))
        torch.clear_autocast_cache()  # Before torch 2.8 an outer autocast has weights in it that were cast without a graph.
        return outputs, states

    def _second_pass(self, place: int, micro_batch: MicroBatch, outputs: Outputs, coupler: Coupler) -> None:
        with torch.enable_grad():
            again = self._outputs_fn(*micro_batch.arguments)
        coupler.require_untouched()
        coupler.add(*outputs.with_gradients(place, again))


def _one(*_: object) -> float:
    """The weight of a micro-batch where none counts."""
    return 1.0
