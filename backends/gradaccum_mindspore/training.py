"""The training cell: forward, backward and the wrapped optimizer's call, with the loss scaled and the micro-batch weighed.

`mindspore.nn.TrainOneStepCell` hands over gradients only. It can neither scale the loss by a scale that moves nor say how many items a
micro-batch has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import explain
from gradaccum_mindspore.host_training import HostTraining
from gradaccum_mindspore.modes import decides_on_host
from gradaccum_mindspore.optimizer import AccumulatingOptimizer
from gradaccum_mindspore.types import Weight

WeightFunction = Callable[..., Weight]


def items(*inputs: Tensor) -> Weight:
    """The number of items of a micro-batch: the length of its first input's first axis."""
    first = inputs[0]
    if not isinstance(first, Tensor):
        refuse_input("no Tensor")
    elif first.ndim == 0:
        refuse_input("a Tensor of shape ()")
    return first.shape[0]


@constexpr  # type: ignore[untyped-decorator]
def refuse_input(found: str) -> None:
    """Raise `ArgumentTypeError`: the first input has no items to count."""
    expected = "a function of the network's inputs, because the first of them has no axis of items"
    raise explain(
        ArgumentTypeError, "weight", expected=expected, found=found, fix="Write TrainOneStepCell(network, optimizer, weight=count)."
    )


@constexpr  # type: ignore[untyped-decorator]
def refuse_losses(shape: tuple[int, ...]) -> None:
    """Raise `ArgumentValueError`: the network returns several losses, of which MindSpore differentiates the sum."""
    expected, found = (
        'one loss, because reduction="mean" takes a mean of each micro-batch',
        f"losses of shape {shape}, whose sum is differentiated",
    )
    fix = 'Let the network return their mean, as nn.MSELoss() does; or wrap with reduction="sum" or "item_mean".'
    raise explain(ArgumentValueError, "network", expected=expected, found=found, fix=fix)


class TrainOneStepCell(nn.TrainOneStepCell):  # type: ignore[misc]
    """One micro-batch: the loss, its gradient and the wrapped optimizer's call. The last micro-batch of a window makes the update.

    In PyNative, in `mindspore.jit`, in graph mode, and as the network of `mindspore.train.Model`:
    ``Model(TrainOneStepCell(nn.WithLossCell(net, loss_fn), optimizer))``. A checkpoint of this cell holds everything, also the statistics
    of a normalization, which no optimizer holds. With ``data_parallel=True`` nothing is reduced before a window's end. Without it, in
    MindSpore's data parallel mode, it takes the mean of the workers' gradients in each micro-batch, and all must have equally many items.

    Args:
        network: a Cell that returns the loss, not scaled.
        optimizer: the wrapped optimizer; its loss scale, if any, is applied here.
        weight: a function of the network's inputs that returns how many items the micro-batch has, a number or a Tensor of one element; the
            length of the first input's first axis unless given. None: every micro-batch weighs 1. That saves a pass over the gradients, and
            is the same if all micro-batches have one size.

    Returns:
        When called: the loss of the micro-batch, not scaled.

    Raises:
        ArgumentTypeError: `optimizer` is not wrapped, `weight` is no function; on a call, the first input has no axis of items.
        ArgumentValueError: on a call, the network returned several losses, and the optimizer's reduction is "mean".
    """

    def __init__(self, network: nn.Cell, optimizer: AccumulatingOptimizer, weight: WeightFunction | None = items) -> None:
        if not isinstance(optimizer, AccumulatingOptimizer):
            expected, found = "a wrapped optimizer", f"an object of type {type(optimizer).__name__}"
            raise explain(ArgumentTypeError, "optimizer", expected=expected, found=found, fix="Write gradaccum.wrap(optimizer, steps=4).")
        if weight is not None and not callable(weight):
            expected = "a function of the network's inputs, or None"
            raise explain(ArgumentTypeError, "weight", expected=expected, got=weight, fix="Leave it out.")
        super().__init__(network, optimizer)
        if optimizer.compiled_window.workers is not None:
            self.grad_reducer = nn.Identity()
        # Not `weight`: a Cell that holds parameters in a tuple has an attribute of each one's name.
        self.weight_of_micro_batch = weight
        self.takes_means = optimizer.options.reduction == "mean"
        self.backward = ms.value_and_grad(self.forward, None, self.weights, has_aux=True)
        steps, host = optimizer.options.steps, None
        own = type(self).construct is TrainOneStepCell.construct  # A subclass's construct is the user's, and runs as it stands.
        if own and isinstance(steps, int) and optimizer.compiled_window.workers is None:
            host = HostTraining(self, steps)
        object.__setattr__(self, "host", host)

    def forward(self, *inputs: object) -> tuple[Tensor, Tensor]:
        """The scaled loss, to differentiate, and the loss."""
        loss = self.network(*inputs)
        return self.optimizer.scale(loss), loss

    def __call__(self, *inputs: object, **named: object) -> Any:
        """One micro-batch, from Python."""
        on_host = not named and self.host is not None and decides_on_host()
        return self.optimizer.storage.listening.after(1, self.host if on_host else super().__call__, *inputs, **named)

    def construct(self, *inputs: object) -> Tensor:
        loss, gradients, weight = self.differentiated(*inputs)
        if loss.size == 1:
            return ops.depend(loss, self.optimizer(gradients, weight, loss))
        return ops.depend(loss, self.optimizer(gradients, weight))

    def added(self, *inputs: object) -> Tensor:
        """`construct` for a micro-batch after which nothing ends here."""
        loss, gradients, weight = self.differentiated(*inputs)
        return ops.depend(loss, self.optimizer.take(gradients, weight, loss if loss.size == 1 else None))

    def differentiated(self, *inputs: object) -> tuple[Tensor, tuple[Tensor, ...], Weight]:
        """The loss, the gradients of the scaled loss, and the weight."""
        weight = None
        if self.weight_of_micro_batch is not None:
            weight = self.weight_of_micro_batch(*inputs)
        (_, loss), gradients = self.backward(*inputs)
        if self.takes_means and loss.size != 1:
            refuse_losses(loss.shape)
        return loss, self.grad_reducer(gradients), weight
