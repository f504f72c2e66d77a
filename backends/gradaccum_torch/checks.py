"""Checks of what a user passes to `gradaccum.wrap`, and the errors for calls that would
make an open window wrong. Each is raised before anything has changed.
"""

from __future__ import annotations

import torch

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import (
    Options,
    UntilWeight,
    accumulate_dtype_error,
    require_steps,
    select,
    steps_at,
)

Size = int | UntilWeight | None
"""How long a window is: its micro-batches, or its weight; None: the caller closes it.
"""


def window_size(options: Options, optimizer_step: int) -> Size:
    if options.steps is None or isinstance(options.steps, int):
        return options.steps  # Checked by wrap.
    size = steps_at(options.steps, optimizer_step, select)
    return require_steps(size, optimizer_step, options.steps)


def known_window_size(options: Options, optimizer_step: int) -> Size:
    """Return the size of a window that has not begun; None if the schedule raises."""
    try:
        return window_size(options, optimizer_step)
    except Exception:
        return None


def require_accumulate_dtype(dtype: object) -> torch.dtype | None:
    """Raise unless `dtype` is a real floating-point dtype, or the name of one; return
    it as a torch dtype.
    """
    if dtype is None:
        return None
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise accumulate_dtype_error(dtype)
    return torch_dtype


CUDA_GRAPH = (
    " A replay of your own CUDA graph runs no hooks of autograd: capture the model with"
    " torch.cuda.make_graphed_callables instead."
)


def changed_gradients_error() -> UsageError:
    return UsageError(
        ".grad: expected the gradients as backward() accumulated them since the window"
        " began; got gradients that were written, assigned or cleared, most likely by"
        " clip_grad_norm_ or model.zero_grad(). To clip, write"
        " gradaccum.wrap(optimizer, ..., clip_norm=...), and read opt.result.grad_norm."
        " To clear, call opt.zero_grad(), which keeps the window's sum. If"
        " DistributedDataParallel averaged them, add module=parallel; a pipeline's"
        f" schedule needs scale_grads=False.{CUDA_GRAPH} A loop that needs .grad for"
        " itself is right with separate_sums=True. The window cannot be mended: call"
        " opt.discard()."
    )


def no_backward_error() -> UsageError:
    return UsageError(
        "step(): expected a backward pass since the last step(); got none that reached"
        " a parameter of this optimizer. Call opt.backward(loss) before each step(),"
        " with weight=0 for a micro-batch that adds nothing; to close a short window"
        f" opt.flush().{CUDA_GRAPH}"
    )


def unfinished_error(call: str) -> UsageError:
    return UsageError(
        f"{call}: expected to be called after step(); got a call between backward() and"
        " step() of a micro-batch in an open window. Call opt.step() first, or"
        " opt.discard() to drop the whole window. Keep backward passes of other losses"
        " away from these parameters:"
        " loss.backward(inputs=list(generator.parameters())), or separate_sums=True."
        " Where workers share a window, add the losses of its last micro-batch up, and"
        " write checkpoint(..., use_reentrant=False)."
    )


def interrupted_error() -> UsageError:
    return UsageError(
        "backward(): expected to deliver a micro-batch's gradients or none; got a"
        " backward pass that raised when it had delivered a part of them. Call"
        " opt.discard(); in a window's first micro-batch, or with separate_sums=True,"
        " opt.zero_grad() will do."
    )


def not_scaled_error() -> UsageError:
    return UsageError(
        "loss: expected to be multiplied by this optimizer's weight and loss scale"
        " before it is differentiated; got a plain loss.backward(), or another wrapped"
        " optimizer's backward(loss). Write opt.backward(loss), after opt.discard()."
        ' One loss for several optimizers: reduction="sum_per_item", a summed loss,'
        " loss.backward() and opt.weigh(n) for each. To keep gradients out:"
        " opt.backward(loss, inputs=list(generator.parameters()))."
    )


def other_weight_error(weight: float, earlier: float) -> UsageError:
    return UsageError(
        f"weight: expected {earlier:g}, the weight that the same micro-batch was given"
        f" before; got {weight!r} ({type(weight).__name__}). Call opt.step() after each"
        " micro-batch, or opt.weigh(n) once for all losses."
    )


def second_wrapper_error(name: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"optimizer: expected one that no living wrapper has; got {name}, which an"
        " earlier gradaccum.wrap has wrapped. Use the optimizer that gradaccum.wrap"
        " returned first, or delete it (del opt) before you wrap again."
    )


def bypassed_error(name: str) -> UsageError:
    return UsageError(
        "step(): expected the wrapped optimizer's, which alone knows when a window"
        f" ends; got the inner optimizer's own: {name}.step(). Write optimizer ="
        f" gradaccum.wrap({name}(...), ...), so that one name is left, and call its"
        " step()."
    )


def new_parameters_error() -> UsageError:
    """Return the error for numbers in ``.grad`` of parameters that are new to a wrapped
    optimizer.
    """
    return UsageError(
        ".grad: expected no gradients in parameters that are new to a wrapped"
        " optimizer; got gradients of earlier backward passes, or of another"
        " optimizer's window. Call model.zero_grad() first."
    )


def model_state_error() -> UsageError:
    return UsageError(
        "torch.distributed.checkpoint.state_dict: expected an optimizer whose state is"
        " the parameters' alone; got a wrapped one, whose window and master weights it"
        " would leave out. Write get_state_dict(model, opt.optimizer) between two"
        ' windows, and save opt.state_dict()["gradaccum"] beside it (DISTRIBUTED.md of'
        " gradaccum_torch)."
    )
