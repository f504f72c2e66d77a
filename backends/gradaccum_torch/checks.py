"""Checks of what a user passes to `gradaccum.wrap` and `step`, and the errors for calls
that would make an open window wrong. Each is raised before anything has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from inspect import Parameter, signature

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, StepResult, UsageError
from gradaccum.kit import (
    Options,
    UntilWeight,
    accumulate_dtype_error,
    explain,
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


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def require_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the trainable parameters are dense: torch adds no gradient to a
    compressed sparse one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.layout in _COMPRESSED:
                raise explain(
                    ArgumentTypeError,
                    "optimizer",
                    expected="dense parameters",
                    found=f"a parameter in the layout {parameter.layout}",
                    fix="Hold the values in a dense parameter, and build the sparse"
                    " tensor in the forward pass.",
                )


def require_update_in_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer makes its update in ``step``, from what is in
    ``.grad``.

    LOMO and AdaLOMO update in the backward pass, Opacus' optimizer from gradients by
    sample; LBFGS evaluates the model again.
    """
    name = type(optimizer).__name__
    modules = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if callable(getattr(optimizer, "fused_backward", None)):
        raise _update_elsewhere_error(
            f"{name}, which makes it within each backward pass and keeps no gradient to"
            " add up",
            "Use it alone: it does not accumulate.",
        )
    if "opacus" in modules:
        raise _update_elsewhere_error(
            f"{name} of Opacus, which makes it from gradients by sample",
            "Use it alone: opacus.utils.batch_memory_manager.BatchMemoryManager adds up"
            " clipped gradients, and adds noise once per batch.",
        )
    required = [
        parameter.name
        for parameter in signature(optimizer.step).parameters.values()
        if parameter.default is Parameter.empty and parameter.kind not in _ANY
    ]
    if required:
        needs = f"{name}, whose step needs {' and '.join(required)}"
        if required == ["closure"]:
            needs = (
                f"{name}, whose step evaluates the model again and again by a closure"
            )
        raise _update_elsewhere_error(needs, "Use it alone: give it the whole batch.")


def _update_elsewhere_error(found: str, fix: str) -> ArgumentTypeError:
    return explain(
        ArgumentTypeError,
        "optimizer",
        expected="an optimizer that makes its update in step() from what is in .grad",
        found=found,
        fix=fix,
    )


def step_argument_error(
    closure: object, misplaced: Mapping[str, object]
) -> ArgumentTypeError:
    """Return the error for an argument of ``step`` that is no closure."""
    name, value = next(iter(misplaced.items()), ("closure", closure))
    fix = "Write opt.backward(loss), and then opt.step() without an argument."
    if name == "weight":
        fix = f"Write opt.backward(loss, weight={value!r}), and then opt.step()."
    return explain(
        ArgumentTypeError,
        "step()",
        expected="no argument but a closure",
        found=f"{name}={value!r}",
        fix=fix,
    )


def place_of_attribute(name: str) -> str | None:
    """Return where to find what has `name` elsewhere, as a sentence."""
    if name in StepResult._fields:
        return f"Read opt.result.{name}."
    if name == "accumulate":
        return "Call opt.step() after each backward pass: it accumulates by itself."
    return None


def require_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise explain(
            ArgumentTypeError,
            "loss",
            expected="a torch.Tensor",
            got=loss,
            fix="Write opt.backward(loss).",
        )
    return loss


class Change(Enum):
    """A change of ``.grad``, by its likeliest cause: what was found, and what to
    write.
    """

    SHARED = (
        "gradients of parameters that another wrapped optimizer has too",
        "Give each optimizer parameters of its own; wrap each once.",
    )
    REDUCED = (
        "gradients that were changed, most likely averaged by DistributedDataParallel"
        " or divided by a pipeline's schedule",
        "Write gradaccum.wrap(optimizer, ..., module=parallel); build the schedule with"
        " scale_grads=False; clip by clip_norm=.",
    )
    CLEARED = (
        "gradients that were cleared, most likely by model.zero_grad() or by another"
        " optimizer's zero_grad()",
        "Call opt.zero_grad() in its place, which keeps the window's sum.",
    )
    REPLACED = (
        "a .grad that was assigned (p.grad = ...)",
        "Write torch.autograd.backward(parameters, gradients) in place of p.grad ="
        " gradient.",
    )
    WRITTEN = (
        "gradients that were written into, most likely by clip_grad_norm_",
        "To clip, write gradaccum.wrap(optimizer, ..., clip_norm=...), or change the"
        " window's gradient in opt.register_step_pre_hook(...); to log the norm, read"
        " opt.result.grad_norm after a window's end.",
    )


def changed_gradients_error(change: Change) -> UsageError:
    found, fix = change.value
    return explain(
        UsageError,
        ".grad",
        expected="the gradients as backward() accumulated them since the window began",
        found=found,
        fix=f"{fix} A loop that needs .grad for itself is right with"
        " separate_sums=True. The window cannot be mended: call opt.discard().",
    )


def no_backward_error() -> UsageError:
    return explain(
        UsageError,
        "step()",
        expected="a backward pass since the last step()",
        found="none that reached a parameter of this optimizer",
        fix="Call opt.backward(loss) before each step(), and opt.backward(loss,"
        " weight=0) for a micro-batch that adds nothing; to close a short window at the"
        " end of the data, opt.flush().",
    )


def unfinished_error(call: str) -> UsageError:
    return explain(
        UsageError,
        call,
        expected="to be called after step()",
        found="a call between backward() and step() of a micro-batch in an open window",
        fix="Call opt.step() first, or opt.discard() to drop the whole window. Keep a"
        " backward() for something else, as a GAN's generator, away from these"
        " parameters: loss.backward(inputs=list(generator.parameters())), or write"
        " separate_sums=True.",
    )


def interrupted_error(*, is_separate: bool = False) -> UsageError:
    """Return the error for a backward pass that raised; `is_separate`: the window does
    not hold what it delivered.
    """
    fix = (
        "Call opt.discard() to drop the window, which holds that part; in its first"
        " micro-batch opt.zero_grad() does."
    )
    if is_separate:
        fix = "Call opt.zero_grad() after it."
    return explain(
        UsageError,
        "backward()",
        expected="to deliver a micro-batch's gradients or none",
        found="a backward pass that raised, such as out of memory, when it had"
        " delivered a part of them",
        fix=f"{fix} opt.backward(loss), in place of loss.backward(), takes that part"
        " out by itself.",
    )


def cast_in_window_error() -> UsageError:
    return explain(
        UsageError,
        "model.to(dtype)",
        expected="a call between two windows",
        found="parameters that were cast in an open window, and its partial sum with"
        " them",
        fix="Call opt.flush() before it. The window cannot be mended: call"
        " opt.discard().",
    )


def not_scaled_error(has_gradient: bool) -> UsageError:
    found = "a step() without opt.backward(loss) before it"
    if has_gradient:
        found = "a micro-batch with a plain backward()"
    return explain(
        UsageError,
        "loss",
        expected="to be multiplied by the loss scale and the weight before it is"
        " differentiated",
        found=found,
        fix="Write opt.backward(loss) in place of loss.backward(). To start the window"
        " anew call opt.discard().",
    )


def multiplied_error() -> UsageError:
    return explain(
        UsageError,
        "loss",
        expected="one that this optimizer was given, or one that nothing multiplies",
        found="gradients from another wrapped optimizer's backward(loss), which"
        " multiplied the loss by its weight or its loss scale",
        fix='One loss for several optimizers: wrap them with reduction="sum_per_item",'
        " sum the loss, call loss.backward(), and give each its weight by opt.weigh(n)."
        " To keep them out: opt.backward(loss, inputs=list(generator.parameters()))."
        " Or call opt.discard().",
    )


def not_weighed_error(weight: float) -> UsageError:
    return explain(
        UsageError,
        "loss",
        expected=f'to be multiplied by its weight, {weight:g}, as reduction="mean" adds'
        " it",
        found="a plain backward() after opt.weigh(), which multiplies nothing",
        fix="Sum the loss over the items and write gradaccum.wrap(optimizer, ...,"
        ' reduction="sum_per_item"), or pass the loss to opt.backward(loss). To start'
        " the window anew call opt.discard().",
    )


def other_weight_error(weight: float, earlier: float) -> UsageError:
    return explain(
        UsageError,
        "weight",
        expected=f"{earlier:g}, the weight that the same micro-batch was given before",
        got=weight,
        fix="Call opt.step() after each micro-batch, or opt.weigh(n) once for all"
        " losses.",
    )


def beyond_float16_error(factor: float) -> UsageError:
    return explain(
        UsageError,
        "loss",
        expected=f"a dtype that holds weight x loss scale, which is at least {factor:g}"
        " here",
        found="a float16 loss, in which that is inf, so that every gradient would"
        " overflow",
        fix="Compute the loss in float32: loss_fn(output.float(), target).",
    )


def second_wrapper_error(name: str) -> ArgumentTypeError:
    return explain(
        ArgumentTypeError,
        "optimizer",
        expected="one that no living wrapper has",
        found=f"{name}, which an earlier gradaccum.wrap has wrapped",
        fix="Use the optimizer that gradaccum.wrap returned first, or delete it (del"
        " opt) before you wrap again.",
    )


def bypassed_error(name: str) -> UsageError:
    return explain(
        UsageError,
        "step()",
        expected="the wrapped optimizer's, which alone knows when a window ends",
        found=f"the inner optimizer's own: {name}.step()",
        fix=f"Write optimizer = gradaccum.wrap({name}(...), ...), so that one name is"
        " left, and call its step().",
    )


def new_parameters_error(is_of_another_window: bool) -> UsageError:
    """Return the error for numbers in ``.grad`` of parameters that are new to a wrapped
    optimizer.
    """
    found = "gradients of earlier backward passes"
    fix = "Set .grad to None first, as optimizer.zero_grad() does."
    if is_of_another_window:
        found = "those of another wrapped optimizer, whose window is open"
        fix = "Call discard() of that one first, or model.zero_grad()."
    return explain(
        UsageError,
        ".grad",
        expected="no gradients in parameters that are new to a wrapped optimizer",
        found=found,
        fix=fix,
    )


def graph_error(argument: str) -> UsageError:
    return explain(
        UsageError,
        argument,
        expected="gradients without a graph",
        found="a .grad that can be differentiated again, after"
        " backward(create_graph=True)",
        fix="Leave create_graph=True out. An optimizer that needs it, such as AdaHessian,"
        " works only bare.",
    )


def taken_gradients_error() -> UsageError:
    return explain(
        UsageError,
        "separate_sums",
        expected="a backward pass since the step() of another wrapped optimizer of these"
        " parameters, which took their gradients",
        found="two calls of step() after one",
        fix="Give each optimizer parameters of its own, or call backward() before each"
        " step().",
    )


def added_noise_error() -> UsageError:
    """Return the error for Opacus' optimizer, which adds noise before it calls
    ``step``.
    """
    return explain(
        UsageError,
        "make_private",
        expected="an optimizer that is not wrapped, or with steps=1",
        found="a longer window of micro-batches, to each of which Opacus has added the"
        " noise of a whole batch",
        fix="Take opacus.utils.batch_memory_manager.BatchMemoryManager in place of"
        " gradaccum.wrap: it adds noise once per batch.",
    )


def pre_hook_error(result: object) -> UsageError:
    return explain(
        UsageError,
        "step pre-hook",
        expected="to return None, or a tuple of new positional and new keyword"
        " arguments",
        got=result,
        fix="Return nothing.",
    )


def copy_error() -> UsageError:
    return explain(
        UsageError,
        "copy, pickle",
        expected="an optimizer without module=, process_group= and norm_group=, as a"
        " copy has no part in the process group",
        found="one with several workers",
        fix="Save opt.state_dict(), and wrap anew where it is loaded.",
    )


def model_state_error() -> UsageError:
    return explain(
        UsageError,
        "torch.distributed.checkpoint.state_dict",
        expected="an optimizer whose state is the parameters' alone",
        found="a wrapped one, whose window and master weights it would leave out",
        fix="Write get_state_dict(model, opt.optimizer) between two windows, and save"
        ' opt.state_dict()["gradaccum"] beside it (DISTRIBUTED.md of gradaccum_torch).',
    )
