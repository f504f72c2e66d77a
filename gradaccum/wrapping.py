"""`gradaccum.wrap`: one call for every framework. Its types are in ``wrapping.pyi``."""

from __future__ import annotations

from typing import Any

from gradaccum.registry import NOT_GIVEN, backend_of, wrap_with


def wrap(optimizer: Any, steps: object = NOT_GIVEN, **options: Any) -> Any:
    """Make an optimizer run once per window of micro-batches, with the gradient that
    the window would have as one large batch.

    Args:
        optimizer: a `torch.optim.Optimizer`, an `optax.GradientTransformation`, a
            `mindspore.nn.Optimizer` or an optimizer of any installed backend. It may
            also be a learning-rate scheduler that was created for a wrapped optimizer,
            in which case no other arguments are allowed. The scheduler then steps only
            when an update was applied.
        steps: the number of micro-batches per window. This is an int >= 1, a list of
            pairs ``(first optimizer_step, steps)``, a function of the optimizer step,
            or ``gradaccum.until_weight(n)``, which ends a window when its weight
            reaches n. None means that the caller closes every window with ``flush``.
        options: keyword arguments. Each framework has its own options, and all
            frameworks have the following:

            - ``reduction``: ``"mean"`` (the default) gives sum(w_i g_i) / sum(w_i),
              where g_i is the gradient of a mean loss, and the weight w_i is the number
              of items (default 1). ``"sum"`` gives sum(g_i). ``"sum_per_item"`` gives
              sum(g_i) / sum(w_i), where g_i is the gradient of a summed loss.
            - ``clip_norm``: clip the window's gradient to this global 2-norm, once,
              when the window ends.
            - ``skip_norm``: apply no update if the window's gradient has a larger
              global 2-norm.
            - ``accumulate_dtype``: the dtype of the gradient sum. The default is
              float32 for float16 and bfloat16 gradients, and the gradient's own dtype
              for all others.
            - ``loss_scale``: the factor by which the loss is multiplied before
              differentiation: a number, a `DynamicLossScale`, or in torch a
              `torch.amp.GradScaler`, which is then updated once per window.
            - ``on_overflow``: what happens if a gradient is not finite. With
              ``"skip_window"`` (the default) the window ends without an update. With
              ``"drop_micro_batch"`` the micro-batch adds nothing. With ``"ignore"`` the
              gradient is applied, as it would be without gradaccum, and the norm is
              computed only if another option needs it. ``"ignore"`` cannot be combined
              with a dynamic loss scale.
            - ``master_weights``: True keeps float32 copies of the float16 and bfloat16
              parameters. The inner optimizer updates these copies, and the rounded
              copies are written into the model.

    Returns:
        An optimizer of the same framework. In JAX it is an
        `optax.GradientTransformationExtraArgs`.

    Raises:
        ArgumentTypeError: `optimizer` belongs to no installed backend, or is already
            wrapped; an option has the wrong type, or is passed with a scheduler.
        ArgumentValueError: an option has an invalid value.
    """
    return wrap_with(backend_of(optimizer), optimizer, steps, **options)
