"""Checks of the arguments of `gradaccum.wrap`, and the errors for calls that would
corrupt an open window. Every error is raised before the call has changed anything.
"""

from __future__ import annotations

import torch

from gradaccum import UsageError
from gradaccum.kit import (
    Options,
    UntilWeight,
    accumulate_dtype_error,
    require_steps,
    select,
    steps_at,
)

Size = int | UntilWeight | None
"""The size at which a window ends: a number of micro-batches, or a total weight. None
means that only ``flush`` closes the window.
"""


def window_size(options: Options, optimizer_step: int) -> Size:
    if options.steps is None or isinstance(options.steps, int):
        return options.steps  # `gradaccum.wrap` has checked this value.
    size = steps_at(options.steps, optimizer_step, select)
    return require_steps(size, optimizer_step, options.steps)


def known_window_size(options: Options, optimizer_step: int) -> Size:
    """Return the size of the window that begins after `optimizer_step` updates. Return
    None if the user's ``steps`` function raises an error or returns an invalid size.
    """
    try:
        return window_size(options, optimizer_step)
    except Exception:
        return None


def require_accumulate_dtype(dtype: object) -> torch.dtype | None:
    """Return `dtype` as a torch dtype. Raise unless `dtype` is None, a real
    floating-point dtype, or the name of such a dtype.
    """
    if dtype is None:
        return None
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise accumulate_dtype_error(dtype)
    return torch_dtype


CUDA_GRAPH = (
    " A CUDA graph that you captured yourself runs no autograd hooks when it is"
    " replayed. Capture the model with torch.cuda.make_graphed_callables instead."
)


def changed_gradients_error() -> UsageError:
    return UsageError(
        ".grad: expected the gradients that backward() has accumulated since the window"
        " began; got gradients that were overwritten, reassigned or cleared inside the"
        " window, most likely by clip_grad_norm_ or model.zero_grad(). This window"
        " cannot be recovered, so call opt.discard(). To clip, pass clip_norm= to"
        " gradaccum.wrap (opt.result.grad_norm is the norm). To clear the gradients,"
        " call opt.zero_grad(). If the model is a DistributedDataParallel module, pass"
        " it as module=. In a pipeline schedule, set scale_grads=False. If your own"
        f" loop has to change .grad, pass separate_sums=True.{CUDA_GRAPH}"
    )


def no_backward_error() -> UsageError:
    return UsageError(
        "step(): expected a backward pass since the last step(); got no backward pass"
        " that reached a parameter of this optimizer. Call opt.backward(loss) before"
        " each step(), with weight=0 for a micro-batch that contributes nothing. To"
        f" close a short window, call opt.flush().{CUDA_GRAPH}"
    )


def unfinished_error(call: str) -> UsageError:
    return UsageError(
        f"{call}: expected a call after step(); got a call between backward() and"
        " step() while a window was open. Call opt.step() first, or call opt.discard()"
        " to drop the whole window. If the loss should not train this optimizer's"
        " parameters, list the parameters that it should train:"
        " loss.backward(inputs=list(generator.parameters())), or wrap with"
        " separate_sums=True. If several workers share the window, call backward() once"
        " per micro-batch, on the sum of the micro-batch's losses, and pass"
        " use_reentrant=False to checkpoint()."
    )


def interrupted_error() -> UsageError:
    return UsageError(
        "backward(): expected a backward pass that accumulates all of its gradients;"
        " got a backward pass that raised an error after accumulating only some of"
        " them. Call opt.discard(). In the first micro-batch of a window, or with"
        " separate_sums=True, opt.zero_grad() is enough."
    )


def not_scaled_error() -> UsageError:
    return UsageError(
        "loss: expected a loss that this optimizer had scaled before the backward pass;"
        " got a loss that it had not scaled, for example from a plain loss.backward()"
        " or from another wrapped optimizer's backward(loss). Call opt.discard(), and"
        " use opt.backward(loss) from then on. If several optimizers share a loss, wrap"
        ' each with reduction="sum_per_item" and without a loss_scale, call'
        " loss.backward() once on the summed loss, and call opt.weigh(n) on each"
        " optimizer. To scale a shared loss, pass the same torch.amp.GradScaler to each"
        " optimizer as loss_scale=, and call scaler.scale(loss).backward() and"
        " scaler.step(opt). If the loss should train only some of the parameters, list"
        " them: opt.backward(loss, inputs=list(generator.parameters()))."
    )


def not_weighed_error(weight: float) -> UsageError:
    return UsageError(
        f"weight: expected gradients that were multiplied by {weight:g}, the weight of"
        " this micro-batch; got gradients of a loss that this optimizer did not"
        " multiply, from scaler.scale(loss).backward() or from code that writes to"
        " .grad. Call opt.discard(), and write opt.backward(loss, weight=n). To compute"
        " gradients without backward(), call opt.weigh(n), and differentiate"
        " opt.scale(loss). If the losses are sums over items, you may wrap with"
        ' reduction="sum_per_item" instead.'
    )


def other_weight_error(weight: float, earlier: float) -> UsageError:
    return UsageError(
        f"weight: expected {earlier:g}, the weight that this micro-batch already has;"
        f" got {weight!r} ({type(weight).__name__}). Call opt.step() after each"
        " micro-batch. If a micro-batch has several losses, call opt.weigh(n) once for"
        " all of them."
    )
