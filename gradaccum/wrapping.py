"""`gradaccum.wrap`: one call for every framework. Its types are in ``wrapping.pyi``."""

from __future__ import annotations

from typing import Any

from gradaccum.registry import NOT_GIVEN, backend_of, wrap_with


def wrap(
    optimizer: Any,
    steps: object = NOT_GIVEN,
    **options: Any,
) -> Any:
    """Make an optimizer run once per window of micro-batches, with the gradient of the
    window as one large batch.

    Args:
        optimizer: a `torch.optim.Optimizer`, an `optax.GradientTransformation`, a
            `mindspore.nn.Optimizer` or an optimizer of any installed backend. A
            learning-rate scheduler that was built on a wrapped optimizer can be passed
            too, without other arguments: it then steps only when an update was applied.
        steps: micro-batches per window: an int >= 1; a callable of the optimizer step;
            pairs ``(first optimizer_step, steps)``; ``gradaccum.until_weight(n)``,
            which ends a window when its weight reaches n; or None, which means that the
            caller closes every window with ``flush``.
        options: keyword arguments: the framework's own options, and the following:

            - ``reduction``: ``"mean"``, the default: sum(w_i g_i) / sum(w_i), where g_i
              is the gradient of a mean loss and w_i its number of items (default 1);
              ``"sum"``: sum(g_i); ``"sum_per_item"``: sum(g_i) / sum(w_i), where g_i is
              the gradient of a summed loss.
            - ``clip_norm``: clip the window's gradient to this global 2-norm, once, at
              its end.
            - ``skip_norm``: make no update if the window's gradient has a larger global
              2-norm.
            - ``accumulate_dtype``: the dtype of the gradient sum; by default float32
              for float16 and bfloat16 gradients, else the gradient's own dtype.
            - ``loss_scale``: the factor by which the loss is multiplied before
              differentiation: a number, a `DynamicLossScale`, or in torch a
              `torch.amp.GradScaler`, which is then updated once per window.
            - ``on_overflow``: ``"skip_window"``, the default: a non-finite gradient
              makes the window end without an update; ``"drop_micro_batch"``: such a
              micro-batch adds nothing; ``"ignore"``: the gradient is applied, as the
              bare optimizer would do, and no norm is measured unless another option
              needs it. ``"ignore"`` cannot be combined with a dynamic loss scale.
            - ``master_weights``: True keeps float32 copies of the float16 and bfloat16
              parameters. The inner optimizer updates these copies, and the model gets
              them rounded.

    Returns:
        An optimizer of the same framework; in JAX an
        `optax.GradientTransformationExtraArgs`.

    Raises:
        ArgumentTypeError: `optimizer` belongs to no installed backend, or is already
            wrapped; an option has the wrong type, or is passed with a scheduler.
        ArgumentValueError: an option has an invalid value.
    """
    return wrap_with(backend_of(optimizer), optimizer, steps, **options)
