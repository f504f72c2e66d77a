"""`gradaccum.wrap`: one call for every framework."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from gradaccum.errors import ArgumentTypeError, explain
from gradaccum.loss_scale import ScalerDriver
from gradaccum.options import make_options
from gradaccum.registry import Backend, GatingBackend, backend_of

_NOT_GIVEN: Any = object()
_DEFAULTS = {name: parameter.default for name, parameter in signature(make_options).parameters.items() if name not in ("steps", "driver")}


def wrap(
    optimizer: Any,
    steps: object = _NOT_GIVEN,
    *,
    reduction: str = "mean",
    clip_norm: float | None = None,
    skip_norm: float | None = None,
    accumulate_dtype: object = None,
    loss_scale: object = None,
    on_overflow: str = "skip_window",
    master_weights: bool = False,
    noise_scale: bool | float = False,
    **backend_options: object,
) -> Any:
    """Make an optimizer run once per window of micro-batches, with the gradient of the window as one large batch.

    Args:
        optimizer: a `torch.optim.Optimizer`, an `optax.GradientTransformation`, a `mindspore.nn.Optimizer` or an optimizer of any
            installed backend. Or a torch learning-rate scheduler built on a wrapped optimizer, then with no other argument:
            it moves only when an update was applied.
        steps: micro-batches per window: an int >= 1; a callable of the optimizer step; pairs ``(first optimizer_step, steps)``;
            or None, and the caller closes every window with ``flush``. Or ``gradaccum.until_weight(n)`` of these: the window ends
            when its weight reaches n.
        reduction: ``"mean"``: sum(w_i g_i) / sum(w_i), g_i the gradient of a mean loss and w_i its number of items, 1 unless given;
            ``"sum"``: sum(g_i); ``"item_mean"``: sum(g_i) / sum(w_i), g_i the gradient of a summed loss.
        clip_norm: clip the window's gradient to this global 2-norm, once, at its end.
        skip_norm: make no update if the window's gradient has a larger global 2-norm.
        accumulate_dtype: dtype of the sum: float32 for float16 and bfloat16 gradients unless given, else the gradient's own.
        loss_scale: what the loss is multiplied by before differentiation: a number, `StaticLossScale`, `DynamicLossScale`, or the
            framework's own scaler (`torch.amp.GradScaler`, `mindspore.amp.DynamicLossScaler`), which then moves once per window.
        on_overflow: ``"skip_window"``: a non-finite gradient makes the window end without an update; ``"drop_micro_batch"``: such a
            micro-batch adds nothing; ``"ignore"``: it is applied as the bare optimizer would, and no norm is measured unless `clip_norm`,
            `skip_norm` or `noise_scale` asks for it. A loss scale that moves is refused there.
        master_weights: keep float32 masters of float16 and bfloat16 parameters: the inner optimizer works on those, and the model holds
            the rounded copy (Micikevicius et al., "Mixed Precision Training", 2018, section 3.1).
        noise_scale: measure the gradient noise scale, ``result.noise_scale``, with one norm more per window (McCandlish et al., "An
            Empirical Model of Large-Batch Training", 2018, appendix A.1). A number in [0, 1) is the decay of its running means, True
            is 0.99.
        backend_options: options of one backend, listed in its documentation.

    Returns:
        What that framework's users can use in the optimizer's place: a `torch.optim.Optimizer`, an
        `optax.GradientTransformationExtraArgs`, a `mindspore.nn.Optimizer`.

    Raises:
        ArgumentTypeError: `optimizer` belongs to no installed backend, or is already wrapped; an option has the wrong type or is unknown
            to the backend; an option stands beside a scheduler.
        ArgumentValueError: an option has a value that makes no sense.
    """
    backend = backend_of(optimizer)
    shared: dict[str, Any] = {
        "reduction": reduction,
        "clip_norm": clip_norm,
        "skip_norm": skip_norm,
        "accumulate_dtype": accumulate_dtype,
        "loss_scale": loss_scale,
        "on_overflow": on_overflow,
        "master_weights": master_weights,
        "noise_scale": noise_scale,
    }
    if isinstance(backend, GatingBackend) and backend.is_scheduler(optimizer):
        given = {"steps": steps, **{name: value for name, value in shared.items() if value is not _DEFAULTS[name]}, **backend_options}
        _require_nothing_beside_a_scheduler(given)
        return backend.gate(optimizer)
    _require_own_options(backend, backend_options)
    if steps is _NOT_GIVEN:
        fix = "Write gradaccum.wrap(optimizer, steps=4)."
        raise explain(ArgumentTypeError, "steps", expected="the number of micro-batches per window", found="nothing at all", fix=fix)
    driver = backend if isinstance(backend, ScalerDriver) else None
    return backend.wrap(optimizer, make_options(steps, **shared, driver=driver), **backend_options)


def _require_nothing_beside_a_scheduler(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value is not _NOT_GIVEN:
            expected, fix = "no option beside a scheduler, which follows its optimizer", "Write gradaccum.wrap(scheduler)."
            raise explain(ArgumentTypeError, name, expected=expected, got=value, fix=fix)


def _require_own_options(backend: Backend, given: Mapping[str, object]) -> None:
    """The options of one backend are the keyword-only arguments of its ``wrap``."""
    own = sorted(name for name, p in signature(backend.wrap).parameters.items() if p.kind is Parameter.KEYWORD_ONLY)
    for name, value in given.items():
        if name not in own:
            known = ", ".join((*_DEFAULTS, *own))
            fix = "Leave it out, or check its spelling."
            raise explain(ArgumentTypeError, name, expected=f"an option of gradaccum.wrap for {backend.name}: {known}", got=value, fix=fix)
