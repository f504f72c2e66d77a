"""The backend object: what the core finds by name, and `wrap` by the optimizer's type."""

from __future__ import annotations

from typing import Any

import optax

from gradaccum import ArgumentTypeError, Options, explain, require_options
from gradaccum_jax.checks import require_dtype
from gradaccum_jax.control_flow import require_control_flow
from gradaccum_jax.masters import on_masters, without_masters
from gradaccum_jax.optimizer import Accumulation


class JaxBackend:
    """Wraps optax gradient transformations."""

    name = "jax"

    def wrap(
        self, optimizer: Any, options: Options | None, *, control_flow: str = "while_loop", **unknown: Any
    ) -> optax.GradientTransformationExtraArgs:
        """See `gradaccum.wrap`.

        Args:
            optimizer: an `optax.GradientTransformation`.
            options: the validated options.
            control_flow: how the inner optimizer is run once per window: ``"while_loop"``, also once under `jax.vmap`; or ``"cond"``,
                which has a reverse mode, for those who differentiate through the optimizer, and in which it may reduce over
                a named axis of `jax.vmap`: with the loop, such a reduction raises `UsageError` where it is vmapped.
            unknown: nothing.

        Raises:
            ArgumentTypeError: `optimizer` is no such transformation or is wrapped already; an option is unknown; `loss_scale` is the
                scaler of another framework.
            ArgumentValueError: `control_flow` is neither.
        """
        require_transformation(optimizer)
        for option in unknown:
            raise explain(ArgumentTypeError, option, expected="an option of gradaccum.wrap", got=unknown[option], fix="Leave it out.")
        checked = require_options(options)
        require_no_scaler(checked.scaler)
        checked = checked._replace(accumulate_dtype=require_dtype(checked.accumulate_dtype))
        inner = optax.with_extra_args_support(optimizer)
        held = on_masters(inner) if checked.master_weights else without_masters(inner)
        wrapped = Accumulation(held, checked, require_control_flow(control_flow))
        return optax.GradientTransformationExtraArgs(wrapped.init, wrapped.update)


def accumulation_of(tx: Any) -> Accumulation | None:
    """The accumulation behind a wrapped transformation, None if it is not wrapped."""
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, Accumulation) else None


def require_accumulation(tx: Any) -> Accumulation:
    """The accumulation behind `tx`.

    Raises:
        ArgumentTypeError: it is not wrapped.
    """
    found = accumulation_of(tx)
    if found is None:
        fix = "Pass what gradaccum.wrap returned; of an optax.chain that holds it, pass it and its own part of the chain's state."
        raise explain(ArgumentTypeError, "tx", expected="a wrapped optimizer", got=f"a {type(tx).__name__} that is not wrapped", fix=fix)
    return found


def require_transformation(optimizer: Any) -> None:
    """Refuse what is not an optax transformation, and what is wrapped already.

    Raises:
        ArgumentTypeError: it is one of those.
    """
    expected = "an optax.GradientTransformation"
    if not isinstance(optimizer, optax.GradientTransformation):
        fix = "Pass for example optax.adamw(1e-3); instead of an optax.MultiSteps, pass the optimizer inside it."
        raise explain(ArgumentTypeError, "optimizer", expected=expected, got=optimizer, fix=fix)
    if accumulation_of(optimizer) is not None:
        fix = "Wrap it once; steps multiply, so one wrap with the product does the same."
        raise explain(ArgumentTypeError, "optimizer", expected=f"{expected} that is not wrapped", got="one that is wrapped", fix=fix)


def require_no_scaler(scaler: Any) -> None:
    """Refuse a scaler with a state of its own: this one's is in the optimizer's state, where `jax.jit` sees it.

    Raises:
        ArgumentTypeError: there is one.
    """
    if scaler is not None:
        expected, fix = (
            "a number or a rule of gradaccum's",
            "Write loss_scale=gradaccum.DynamicLossScale() with the same factors and interval.",
        )
        raise explain(
            ArgumentTypeError, "loss_scale", expected=expected, got=f"a {type(scaler).__name__} that keeps its own state", fix=fix
        )


backend = JaxBackend()
