"""What is refused of a call that takes the large batch, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.torch_private import is_sharded


def require_function(argument: str, function: object) -> None:
    """Refuse what cannot be called.

    Raises:
        ArgumentTypeError: `function` cannot be.
    """
    if not callable(function):
        fix = "Write gradaccum_torch.backward(loss_fn, x, y, steps=4), and loss_fn is called with each micro-batch of x and y."
        raise explain(ArgumentTypeError, argument, expected="a function", got=function, fix=fix)


def require_alone(modules: Iterable[nn.Module]) -> None:
    """Refuse modules that several workers train, which would reduce in every micro-batch and count no weights.

    Raises:
        UsageError: one is.
    """
    for module in modules:
        if isinstance(module, DistributedDataParallel) or any(map(is_sharded, module.parameters(recurse=False))):
            found = f"a {type(module).__name__} that several workers train"
            fix = "Write optimizer=gradaccum.wrap(optimizer, steps=None, module=module): the sum is then reduced as the wrapper does it."
            raise explain(UsageError, "optimizer", expected="a wrapped optimizer beside workers", found=found, fix=fix)


def require_optimizer(optimizer: object, reduction: str | None) -> AccumulatingOptimizer:
    """Refuse an optimizer whose window this call cannot fill and close.

    Raises:
        ArgumentTypeError: it is not wrapped.
        ArgumentValueError: it closes its windows itself, or has another `reduction`; None: the call takes the optimizer's.
    """
    if not isinstance(optimizer, AccumulatingOptimizer):
        fix = "Write optimizer=gradaccum.wrap(optimizer, steps=None)."
        raise explain(ArgumentTypeError, "optimizer", expected="a wrapped optimizer", found=f"a {type(optimizer).__name__}", fix=fix)
    own = optimizer.whole_window().options
    if own.steps is not None:
        fix = "Write gradaccum.wrap(optimizer, steps=None): this call makes the micro-batches and closes the window."
        raise explain(ArgumentValueError, "optimizer", expected="one that was wrapped with steps=None", found=f"steps={own.steps}", fix=fix)
    if reduction not in (None, own.reduction):
        fix = f"Leave reduction out, or write reduction={own.reduction!r} here as well."
        expected = f"{own.reduction!r}, that of the wrapped optimizer"
        raise explain(ArgumentValueError, "reduction", expected=expected, got=reduction, fix=fix)
    return optimizer


def require_coupled_optimizer(optimizer: object) -> AccumulatingOptimizer:
    """Refuse an optimizer whose window cannot hold a coupled loss.

    Raises:
        ArgumentTypeError, ArgumentValueError: as `require_optimizer`.
        UsageError: it drops micro-batches, and a part of a coupled loss's gradient is no gradient.
    """
    wrapped = require_optimizer(optimizer, None)
    if wrapped.whole_window().options.on_overflow == "drop_micro_batch":
        fix = 'Write on_overflow="skip_window".'
        found = 'on_overflow="drop_micro_batch"'
        raise explain(UsageError, "optimizer", expected="one that keeps or skips a coupled loss whole", found=found, fix=fix)
    return wrapped


def touched_error() -> UsageError:
    """The error for a loss function that writes into the gradients which the call collects."""
    fix = "Return the loss, and leave backward() and zero_grad() to the caller."
    found = "one that changes .grad itself, as backward() or zero_grad() does"
    return explain(UsageError, "loss_fn", expected="a function that computes the loss", found=found, fix=fix)
