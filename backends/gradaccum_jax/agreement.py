"""An inner optimizer that reduces over devices runs on all of them or on none.

Each device decides by its own gradient. Where one does not run the optimizer, because its part of the gradient is not finite, the
others would wait in the reduction for ever. So such an optimizer's devices agree, once per window: all run it, or none.

What cannot be agreed on is refused: each device measures and weighs its own gradient, the reduced one is known to the optimizer alone.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from gradaccum import UsageError
from gradaccum.kit import Options, explain
from gradaccum_jax.control_flow import ControlFlow, once

Axes = frozenset[str]


def require_equal_parts(options: Options, axes: Axes, weight: Any) -> None:
    """Refuse what would be each device's own where the inner optimizer reduces over `axes`.

    Raises:
        UsageError: a weight or a norm is asked for, or micro-batches may be dropped.
    """
    dropping = options.on_overflow == "drop_micro_batch" or None
    asked = {"clip_norm": options.clip_norm, "skip_norm": options.skip_norm, "on_overflow": dropping, "weight": weight}
    for name in (name for name, value in asked.items() if axes and value is not None):
        fix = "Reduce the gradients before tx.update, as in jax.lax.pmean(grads, axis), and leave the reduction out of the optimizer."
        expected = f"nothing, as the optimizer reduces over {sorted(axes)} and this would be each device's own"
        raise explain(UsageError, name, expected=expected, found="an option or argument that is set", fix=fix)


def agree(apply: Any, overflow: Any, last: Any, axes: Axes, control_flow: ControlFlow) -> tuple[Any, Any]:
    """`apply` where it holds on all devices along `axes`, `overflow` where on any: bool scalars.

    Args:
        apply: bool scalar: this device's.
        overflow: bool scalar: this device's.
        last: bool scalar: whether the window ends; the same on all devices. Only then do they talk to each other.
        axes: the names; none: nothing to agree on.
        control_flow: how the talk is left out.
    """
    if not axes:
        return apply, overflow

    def ask(own: tuple[Any, Any]) -> tuple[Any, Any]:
        return jnp.where(own[0], every(own[0], axes), False), jnp.where(own[1], True, ~every(~own[1], axes))

    return once(last, ask, (apply, overflow), control_flow)


def every(flag: Any, axes: Axes) -> Any:
    """Whether `flag` holds on every device along `axes`."""
    return lax.pmin(flag.astype(jnp.int32), tuple(sorted(axes))) > 0  # type: ignore[no-untyped-call]
