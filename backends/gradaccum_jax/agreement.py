"""An inner optimizer that reduces over devices runs on all of them or on none.

Each device decides by its own gradient. If one device skips the optimizer because its part of the gradient is not finite, the other
devices wait for it in the reduction for ever. So the devices of such an optimizer agree, once per window: all run it, or none.

They cannot agree on everything. Each device measures and weighs its own gradient; only the optimizer knows the reduced one. So the options
that need the reduced gradient are refused.
"""

from __future__ import annotations

import jax.numpy as jnp

from gradaccum import UsageError
from gradaccum.kit import Options, Scalar, explain
from gradaccum_jax.control_flow import once
from gradaccum_jax.types import Axes
from gradaccum_jax.varying import every


def require_equal_parts(options: Options, axes: Axes, weight: Scalar) -> None:
    """Refuse options that would differ from device to device where the inner optimizer reduces over `axes`.

    Raises:
        UsageError: a weight or a norm is asked for, or micro-batches may be dropped.
    """
    dropping = options.on_overflow == "drop_micro_batch" or None
    norms = {"clip_norm": options.clip_norm, "skip_norm": options.skip_norm, "noise_scale": options.noise_decay}
    asked = {**norms, "on_overflow": dropping, "weight": weight}
    for name in (name for name, value in asked.items() if axes and value is not None):
        fix = "Reduce the gradients before tx.update, as in jax.lax.pmean(grads, axis), and leave the reduction out of the optimizer."
        expected = f"nothing, as the optimizer reduces over {sorted(axes)} and this would be each device's own"
        raise explain(UsageError, name, expected=expected, found="an option or argument that is set", fix=fix)


def require_no_reduction(axes: Axes, reduced: tuple[str, ...]) -> None:
    """Refuse an inner optimizer that reduces over `axes` of which some are among those that are `reduced` over before it.

    Raises:
        UsageError: it does.
    """
    if twice := sorted(axes & frozenset(reduced)):
        fix = "Leave the reduction out of the optimizer: with axis_name its gradient is that of all devices."
        raise explain(UsageError, "optimizer", expected="one that does not reduce", found=f"one that reduces over {twice}", fix=fix)


def agree(apply: Scalar, overflow: Scalar, at_end: Scalar, axes: Axes) -> tuple[Scalar, Scalar]:
    """`apply` where it holds on all devices along `axes`, `overflow` where it holds on any: bool scalars.

    Args:
        apply: bool scalar: this device's.
        overflow: bool scalar: this device's.
        at_end: bool scalar: the window ends here; the same on all devices. Only then do they talk to each other.
        axes: the names of the axes; without any there is nothing to agree on.
    """
    if not axes:
        return apply, overflow

    def ask(own: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        return jnp.where(own[0], every(own[0], axes), False), jnp.where(own[1], True, ~every(~own[1], axes))

    return once(at_end, ask, (apply, overflow))
