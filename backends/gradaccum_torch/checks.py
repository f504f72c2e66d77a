"""Checks of a user's arguments (optimizer, accumulation dtype, window size) and of
calls that would make a window wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from inspect import Parameter, signature
from typing import Literal, get_args

import torch
from torch import Tensor

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    AutoMicroBatchSize,
    StepResult,
    UsageError,
)
from gradaccum.kit import (
    Division,
    Options,
    UntilWeight,
    accumulate_dtype_error,
    explain,
    require_steps,
    select,
    steps_at,
)


def require_accumulate_dtype(dtype: object) -> torch.dtype | None:
    """Raise unless `dtype` is a real floating-point dtype, or the name of one; return
    it as a torch dtype.
    """
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise accumulate_dtype_error(dtype)
    return found


Size = int | UntilWeight | None
"""How long a window is: its micro-batches, or its weight; None: the caller closes it.
"""


def window_size(options: Options, optimizer_step: int) -> Size:
    if options.steps is None or isinstance(options.steps, int):
        return options.steps  # Checked by wrap.
    return require_steps(
        steps_at(options.steps, optimizer_step, select), optimizer_step, options.steps
    )


def known_window_size(options: Options, optimizer_step: int) -> Size:
    """Return the size of a window that has not begun; None if the schedule raises."""
    try:
        return window_size(options, optimizer_step)
    except Exception:
        return None


def require_layouts(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Raise unless the trainable parameters are dense: torch adds no gradient to a
    compressed sparse one.
    """
    for parameter in (
        each for group in optimizer.param_groups for each in group["params"]
    ):
        if parameter.requires_grad and parameter.layout in _COMPRESSED:
            expected, fix = (
                "dense parameters",
                (
                    "Hold the values in a dense parameter, and build the sparse tensor"
                    " in the forward pass."
                ),
            )
            raise explain(
                ArgumentTypeError,
                "optimizer",
                expected=expected,
                found=f"a parameter in the layout {parameter.layout}",
                fix=fix,
            )
    return optimizer


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def require_no_collective(loss: Tensor) -> None:
    """Raise unless the backward pass of `loss` has no collective, in which other
    workers would wait for this one.
    """
    nodes, seen = [loss.grad_fn], set[object]()
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            if node.name() in _COLLECTIVES:
                expected, found = (
                    "items, where other workers may wait for the backward pass",
                    f"0 for a loss with a {node.name()}",
                )
                fix = (
                    'Write reduction="sum_per_item", opt.weigh(0) and loss.backward(): the'
                    " other workers need the gradients of its keys."
                )
                raise explain(
                    UsageError, "weight", expected=expected, found=found, fix=fix
                )


_FUNCTIONS = (
    "Redistribute",
    "_AllGather",
    "_AllGatherBase",
    "_AllReduce",
    "_AlltoAll",
    "_AlltoAllSingle",
    "_Reduce_Scatter",
)
_COLLECTIVES = {f"{name}Backward" for name in _FUNCTIONS}
"""The nodes of autograd's graph that `torch.distributed.tensor` and
`torch.distributed.nn` make.
"""


def require_update_in_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the optimizer makes its update in ``step``, from what is in
    ``.grad``.

    LOMO and AdaLOMO update in the backward pass, Opacus' optimizer from gradients by
    sample; LBFGS evaluates the model again.
    """
    name, own = type(optimizer).__name__, "Use it alone: "
    if callable(getattr(optimizer, "fused_backward", None)):
        found = (
            f"{name}, which makes it within each backward pass and keeps no gradient to"
            " add up"
        )
        raise explain(
            ArgumentTypeError,
            "optimizer",
            expected=_IN_STEP,
            found=found,
            fix=f"{own}it does not accumulate.",
        )
    if any(
        kind.__module__.partition(".")[0] == "opacus"
        for kind in type(optimizer).__mro__
    ):
        found = f"{name} of Opacus, which makes it from gradients by sample"
        fix = (
            f"{own}opacus.utils.batch_memory_manager.BatchMemoryManager adds up clipped"
            " gradients, and adds noise once per batch."
        )
        raise explain(
            ArgumentTypeError, "optimizer", expected=_IN_STEP, found=found, fix=fix
        )

    required = [
        each.name
        for each in signature(optimizer.step).parameters.values()
        if each.default is Parameter.empty and each.kind not in _ANY
    ]
    if required:
        found = (
            f"{name}, whose step evaluates the model again and again by a closure"
            if required == ["closure"]
            else f"{name}, whose step needs {' and '.join(required)}"
        )
        raise explain(
            ArgumentTypeError,
            "optimizer",
            expected=_IN_STEP,
            found=found,
            fix=f"{own}give it the whole batch.",
        )


_ANY = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
_IN_STEP = "an optimizer that makes its update in step() from what is in .grad"


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


# The errors for calls that would make an open window wrong. Each is raised before
# anything changed.


class Change(Enum):
    """A change of ``.grad``, by its likeliest cause: what was found, and what to
    write.
    """

    SHARED = (
        "gradients of parameters that another wrapped optimizer has too",
        "Give each optimizer parameters of its own; wrap each once.",
    )
    REDUCED = (
        (
            "gradients that were changed, most likely averaged by"
            " DistributedDataParallel or divided by a pipeline's schedule"
        ),
        (
            "Write gradaccum.wrap(optimizer, ..., module=parallel); build the schedule"
            " with scale_grads=False; clip by clip_norm=."
        ),
    )
    CLEARED = (
        (
            "gradients that were cleared, most likely by model.zero_grad() or by"
            " another optimizer's zero_grad()"
        ),
        "Call opt.zero_grad() in its place, which keeps the window's sum.",
    )
    REPLACED = (
        "a .grad that was assigned (p.grad = ...)",
        (
            "Write torch.autograd.backward(parameters, gradients) in place of p.grad ="
            " gradient."
        ),
    )
    WRITTEN = (
        "gradients that were written into, most likely by clip_grad_norm_",
        (
            "To clip, write gradaccum.wrap(optimizer, ..., clip_norm=...), or change"
            " the window's gradient in opt.register_step_pre_hook(...); to log the"
            " norm, read opt.result.grad_norm after a window's end."
        ),
    )


def changed_gradients_error(change: Change) -> UsageError:
    found, fix = change.value
    expected = "the gradients as backward() accumulated them since the window began"
    otherwise = (
        "A loop that needs .grad for itself is right with separate_sums=True. The"
        " window cannot be mended: call opt.discard()."
    )
    return explain(
        UsageError, ".grad", expected=expected, found=found, fix=f"{fix} {otherwise}"
    )


def no_backward_error() -> UsageError:
    fix = (
        "Call opt.backward(loss) before each step(), and opt.backward(loss, weight=0)"
        " for a micro-batch that adds nothing; "
    )
    fix += "to close a short window at the end of the data, opt.flush()."
    found = "none that reached a parameter of this optimizer"
    return explain(
        UsageError,
        "step()",
        expected="a backward pass since the last step()",
        found=found,
        fix=fix,
    )


def unfinished_error(call: str) -> UsageError:
    fix = (
        "Call opt.step() first, or opt.discard() to drop the whole window. Keep a"
        " backward() for something else, as a GAN's generator, "
    )
    fix += (
        "away from these parameters:"
        " loss.backward(inputs=list(generator.parameters())), or write"
        " separate_sums=True."
    )
    found = "a call between backward() and step() of a micro-batch in an open window"
    return explain(
        UsageError, call, expected="to be called after step()", found=found, fix=fix
    )


def interrupted_error(*, apart: bool = False) -> UsageError:
    """Return the error for a backward pass that raised; `apart`: the window does not
    hold what it delivered.
    """
    fix = (
        "Call opt.discard() to drop the window, which holds that part; in its first"
        " micro-batch opt.zero_grad() does. "
    )
    if apart:
        fix = "Call opt.zero_grad() after it. "
    fix += (
        "opt.backward(loss), in place of loss.backward(), takes that part out by"
        " itself."
    )
    found = (
        "a backward pass that raised, such as out of memory, when it had delivered a"
        " part of them"
    )
    return explain(
        UsageError,
        "backward()",
        expected="to deliver a micro-batch's gradients or none",
        found=found,
        fix=fix,
    )


def second_pass_error() -> UsageError:
    expected = (
        "gradients in memory of their own beside the first second pass of a micro-batch"
    )
    found = (
        "memory that somebody else may have written into since the first one, such as a"
        " CUDA graph's"
    )
    fix = (
        "Call opt.zero_grad() and repeat the micro-batch: from here on gradients are"
        " copied out of such memory."
    )
    return explain(UsageError, "backward()", expected=expected, found=found, fix=fix)


def cast_in_window_error() -> UsageError:
    found = "parameters that were cast in an open window, and its partial sum with them"
    fix = "Call opt.flush() before it. The window cannot be mended: call opt.discard()."
    return explain(
        UsageError,
        "model.to(dtype)",
        expected="a call between two windows",
        found=found,
        fix=fix,
    )


def not_scaled_error(arrived: bool) -> UsageError:
    expected = (
        "to be multiplied by the loss scale and the weight before it is differentiated"
    )
    found = (
        "a micro-batch with a plain backward()"
        if arrived
        else "a step() without opt.backward(loss) before it"
    )
    fix = (
        "Write opt.backward(loss) in place of loss.backward(). To start the window anew"
        " call opt.discard()."
    )
    return explain(UsageError, "loss", expected=expected, found=found, fix=fix)


def multiplied_error() -> UsageError:
    expected = "one that this optimizer was given, or one that nothing multiplies"
    found = (
        "gradients from another wrapped optimizer's backward(loss), which multiplied"
        " the loss by its weight or its loss scale"
    )
    fix = (
        'One loss for several optimizers: wrap them with reduction="sum_per_item", sum the'
        " loss, call loss.backward(), and give each its "
    )
    fix += (
        "weight by opt.weigh(n). To keep them out: opt.backward(loss,"
        " inputs=list(generator.parameters())). Or call opt.discard()."
    )
    return explain(UsageError, "loss", expected=expected, found=found, fix=fix)


def not_weighed_error(weight: float) -> UsageError:
    expected = (
        f'to be multiplied by its weight, {weight:g}, as reduction="mean" adds it'
    )
    fix = (
        "Sum the loss over the items and write gradaccum.wrap(optimizer, ...,"
        ' reduction="sum_per_item"), or pass the loss to '
    )
    fix += "opt.backward(loss). To start the window anew call opt.discard()."
    found = "a plain backward() after opt.weigh(), which multiplies nothing"
    return explain(UsageError, "loss", expected=expected, found=found, fix=fix)


def other_weight_error(weight: float, earlier: float) -> UsageError:
    expected = f"{earlier:g}, the weight that the same micro-batch was given before"
    fix = "Call opt.step() after each micro-batch, or opt.weigh(n) once for all losses."
    return explain(UsageError, "weight", expected=expected, got=weight, fix=fix)


def require_graph(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        fix = (
            "Run the model on any batch on this worker too, and give its loss with"
            " weight=0."
        )
        expected, found = (
            "one of the model, because every backward pass is that of all workers",
            "one without a graph",
        )
        raise explain(UsageError, "loss", expected=expected, found=found, fix=fix)
    return loss


# What a layered window refuses.


Borders = Literal["keep", "recompute", "host"]
Within = Literal["recompute", "keep"]


def require_activations(borders: object, within: object) -> None:
    for name, given, kind in (
        ("borders", borders, Borders),
        ("within", within, Within),
    ):
        if given not in get_args(kind):
            fix = f"Write {name}={get_args(kind)[0]!r}, or leave it out."
            raise explain(
                ArgumentValueError,
                name,
                expected=f"one of {get_args(kind)}",
                got=given,
                fix=fix,
            )
    if within == "keep" and borders != "keep":
        fix = 'Leave within= out, or write borders="keep".'
        found = f"borders={borders!r} beside kept activations, which hold the borders"
        raise explain(
            ArgumentValueError,
            "borders",
            expected="'keep' beside within=\"keep\"",
            found=found,
            fix=fix,
        )


def require_fixed_size(division: Division) -> None:
    """Raise unless a micro-batch has a size: after an update of a layer no smaller one
    can be tried.
    """
    size = division.micro_batch_size
    if isinstance(size, AutoMicroBatchSize):
        fix = "Write steps=4, or find a size by gradaccum_torch.backward."
        raise explain(
            ArgumentTypeError,
            "micro_batch_size",
            expected="a number of items",
            got=size,
            fix=fix,
        )


def written_input_error(name: str) -> UsageError:
    fix = (
        "Give its first operation inplace=False, or join it with the layer before:"
        " nn.Sequential(nn.Conv2d(...), nn.ReLU(inplace=True)). "
    )
    fix += (
        "If another layer or loss_fn writes into the same memory, as into a buffer that"
        " a layer returned, return a clone()."
    )
    return explain(
        UsageError,
        name,
        expected="an input that stays as it is",
        found="one that something wrote into",
        fix=fix,
    )


def shared_step_error(moved: list[str]) -> UsageError:
    fix = (
        'Leave on_overflow="ignore" out: the inner optimizer then makes one step per'
        " window. Load the last checkpoint first."
    )
    expected = (
        "an inner optimizer whose step moves nothing but parameters with a gradient and"
        " their state"
    )
    found = f"one that moves {moved}"
    return explain(UsageError, "optimizer", expected=expected, found=found, fix=fix)
